"""What this rank has to save: its pieces of model and optimizer, under names that do not depend on the wrapping.

Names are the paths of `{"model": state_dict, "optim": {"state": {parameter: {key: value}}, "param_groups": [...]}}`,
the form in which `torch.distributed.checkpoint.state_dict.get_state_dict` hands FSDP2's state to `dcp.save`.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from ..errors import ConfigError
from ..local_shard import LocalShard, ShardInfo
from ..runtime.flat_param import FlatParam, home_of
from ..runtime.step import Step
from .full import steps_of
from .optimizer import _check_known, parameter_names

Path = tuple[Any, ...]  # of strings, and integers for places in a list

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclasses.dataclass
class Piece:
    """A run of a sharded tensor, in this rank's memory."""

    path: Path
    info: ShardInfo
    local: torch.Tensor  # shape info.local_shape; plain
    replicas: int = 1  # ranks that hold the same run, and share the writing
    replica: int = 0
    alias_of: Path | None = None  # a tied parameter is written once


@dataclasses.dataclass
class Whole:
    """A tensor or object that is the same on every rank."""

    path: Path
    value: Any


@dataclasses.dataclass
class ShardReference:
    """Stands, in a pickled extra, for a LocalShard (an averaged copy of the weights, say) that is saved as a tensor."""

    path: Path
    parameter: str


@dataclasses.dataclass
class Snapshot:
    """Everything that this rank knows about a checkpoint to be. Tensors share memory with the model until `to_host`."""

    pieces: list[Piece]
    wholes: list[Whole]
    extra: dict[str, bytes]  # pickled; may differ between ranks
    local_state: bytes | None = None  # pickled optimizer state that belongs to this rank's pieces alone

    def add(self, other: Snapshot) -> None:
        """Takes in the pieces and wholes of another snapshot of the same rank, and its local state."""
        self.pieces += other.pieces
        self.wholes += other.wholes
        self.local_state = other.local_state or self.local_state

    def to_host(self) -> None:
        """Copies every tensor to host memory of its own: later steps do not change it. Pinned where that is faster."""
        copies: dict[int, torch.Tensor] = {}
        device = None
        for holder, name in [(p, "local") for p in self.pieces] + [(w, "value") for w in self.wholes]:
            tensor = getattr(holder, name)
            if not isinstance(tensor, torch.Tensor) or (isinstance(holder, Piece) and holder.alias_of is not None):
                continue
            if id(tensor) not in copies:
                pin = tensor.device.type == "cuda"
                device = tensor.device if pin else device
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
                copies[id(tensor)] = copy.copy_(tensor.detach(), non_blocking=True)
            setattr(holder, name, copies[id(tensor)])
        if device is not None:
            torch.cuda.current_stream(device).synchronize()


def take(model: nn.Module, optim: torch.optim.Optimizer | None, extra: dict[str, Any]) -> Snapshot:
    """This rank's part of a checkpoint. No communication."""
    out = take_model(model, model.state_dict())
    if optim is not None:
        out.add(take_optimizer(model, optim))
    flats = _flats(model)
    for name, value in extra.items():
        out.extra[name] = pickled(_without_shards(_state_of(value), (name,), flats, out))
    return out


def take_model(model: nn.Module, state: Mapping[str, Any]) -> Snapshot:
    """This rank's part of `state`, which is the state dict of `model` or some of its entries. No communication."""
    flats, out = _flats(model), Snapshot([], [], {})
    first: dict[ShardInfo, Path] = {}
    for key, value in state.items():
        path: Path = ("model", clean(key))
        if isinstance(value, LocalShard):
            piece = _piece(path, value.shard_info, value.to_local(), flats[value.shard_info])
            piece.alias_of = first.get(value.shard_info)
            first.setdefault(value.shard_info, path)
            out.pieces.append(piece)
        else:
            out.wholes.append(Whole(path, value))
    return out


def _flats(model: nn.Module) -> dict[ShardInfo, FlatParam]:
    return {info: flat for step in steps_of(model) for flat in step.flats for info in flat.infos}


def clean(name: str) -> str:
    """A name in the unwrapped model: without the prefixes of checkpoint wrappers and torch.compile."""
    for prefix in WRAPPERS:
        name = name.replace(prefix, "")
    return name


def world_of(steps: list[Step]):
    """The group of all ranks concerned. Raises ConfigError where the model's roots live on different ranks."""
    worlds = {tuple(step.mesh.world.ranks) for step in steps}
    if len(worlds) > 1:
        raise ConfigError(
            f"the model's sharded parts live on different sets of ranks, {sorted(worlds)}: one checkpoint is written "
            "by one set. Save the parts one by one."
        )
    return steps[0].mesh.world


def _piece(path: Path, info: ShardInfo, local: torch.Tensor, flat: FlatParam) -> Piece:
    replicate = flat.mesh.replicate
    return Piece(path, info, local, replicate.size, replicate.rank)


def take_optimizer(model: nn.Module, optim: torch.optim.Optimizer, prefix: str = "optim") -> Snapshot:
    """This rank's part of the optimizer's state, under `prefix`. No communication."""
    names, out = parameter_names(model), Snapshot([], [], {})
    _check_known(optim, names)
    odd: dict[str, Any] = {}
    for group in optim.param_groups:
        for param in group["params"]:
            home = home_of(param)
            for key, value in optim.state.get(param, {}).items():
                path = (prefix, "state", names[param], key)
                sized = isinstance(value, torch.Tensor) and value.dim() > 0
                if home is None or not sized:
                    out.wholes.append(Whole(path, value))
                    continue
                flat, index = home
                info = flat.infos[index]
                if tuple(value.shape) == info.local_shape:
                    local = value.to_local() if isinstance(value, LocalShard) else value.detach()
                    out.pieces.append(_piece(path, info, local, flat))
                else:
                    # Factored moments, quantisation blocks: parts of this piece, not pieces of a whole.
                    odd.setdefault(names[param], {"piece": info.piece})[key] = value
    for number, group in enumerate(optim.param_groups):
        options = {**group, "params": [names[p] for p in group["params"]]}
        out.wholes.extend(Whole((prefix, "param_groups", number, k), v) for k, v in options.items())
    if odd:
        out.local_state = pickled(odd)
    return out


def _state_of(value: Any) -> Any:
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def _without_shards(value: Any, path: Path, flats: dict[ShardInfo, FlatParam], out: Snapshot) -> Any:
    """`value` with LocalShards, at any depth of dicts, replaced by references, and added to the pieces."""
    if isinstance(value, LocalShard):
        info = value.shard_info
        if info not in flats:
            raise ConfigError(f"{'.'.join(map(str, path))} holds a LocalShard of another model ({info.name}).")
        out.pieces.append(_piece(path, info, value.to_local(), flats[info]))
        return ShardReference(path, clean(info.name))
    if isinstance(value, Mapping) and any(_holds_shards(v) for v in value.values()):
        return {k: _without_shards(v, (*path, str(k)), flats, out) for k, v in value.items()}
    return value


def _holds_shards(value: Any) -> bool:
    return isinstance(value, LocalShard) or (isinstance(value, Mapping) and any(map(_holds_shards, value.values())))


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
