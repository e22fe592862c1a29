"""fairscale FSDP's local state dicts, their offline consolidation, and its whole optimizer states."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn as nn

from ..checkpoint.full import steps_of
from ..checkpoint.optimizer import _piece, full_optim_state_dict, parameter_names
from ..errors import CheckpointError, ConfigError
from ..local_shard import LocalShard
from ..runtime.flat_param import home_of
from ..runtime.managed import unit_of
from ._common import sharded_state


def local_state_dict(model: nn.Module) -> OrderedDict:
    """Copies of this rank's pieces and of the buffers, as plain tensors under the unwrapped model's names."""
    out: OrderedDict = OrderedDict()
    for name, value in _pieces(model).items():
        out[name] = value.to_local().clone() if isinstance(value, LocalShard) else value
    return out


def load_local_state_dict(model: nn.Module, state: dict, strict: bool = True):
    """Loads what `local_state_dict` returned, on as many ranks and with the same wrapping. No communication.

    Raises CheckpointError for a tensor that is not of this rank's shape.
    """
    pieces = {}
    for name, mine in _pieces(model).items():
        value = state.get(name)
        if isinstance(mine, LocalShard) and isinstance(value, torch.Tensor) and not isinstance(value, LocalShard):
            if value.shape != mine.shape:
                raise CheckpointError(
                    f"{name} of the local state dict has shape {tuple(value.shape)}, and this rank's piece has "
                    f"{tuple(mine.shape)}: it was saved on another rank, on another number of ranks, or wrapped "
                    "differently. consolidate_shard_weights() puts local state dicts together."
                )
            pieces[name] = LocalShard.wrap(value, mine.shard_info)
    with sharded_state():
        return model.load_state_dict({**state, **pieces}, strict=strict)


def local_metadata_dict(model: nn.Module) -> dict[str, Any]:
    """Where the pieces in `local_state_dict` belong: plain numbers and names, for `consolidate_shard_weights`."""
    entries = []
    for name, value in _pieces(model).items():
        if isinstance(value, LocalShard):
            info = value.shard_info
            entries.append({"name": name, "shape": info.shape, "piece": info.piece})
    return {"param_metadata": entries, "buffer_names": [name for name, _ in model.named_buffers()]}


def consolidate_shard_weights(
    shard_weights: list[dict[str, torch.Tensor]],
    shard_metadata: list[dict[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """The whole state dict, from all ranks' `local_state_dict` and `local_metadata_dict`. Needs no process group.

    Buffers come from the first rank. Where ranks hold the same elements (groups of their own), the first rank's count.
    strict: raise CheckpointError where elements or buffers are missing; else leave such tensors out.
    """
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        raise ConfigError(f"got {len(shard_weights)} state dicts and {len(shard_metadata)} metadata, not one each.")
    if any("fsdp_path" in entry for entry in shard_metadata[0]["param_metadata"]):
        raise CheckpointError("these shards were written by fairscale itself. `shardkit convert` reads them.")
    out: dict[str, torch.Tensor] = {}
    filled: dict[str, set[tuple[int, int]]] = {}
    for weights, metadata in zip(reversed(shard_weights), reversed(shard_metadata), strict=True):
        for entry in metadata["param_metadata"]:
            name, (start, stop), shape = entry["name"], entry["piece"], tuple(entry["shape"])
            if name not in weights:
                continue
            local = weights[name]
            if name not in out or (stop - start == out[name].numel() and stop > start):
                out[name], filled[name] = local.new_empty(shape), set()
            out[name].view(-1)[start:stop] = local.reshape(-1)
            filled[name].add((start, stop))  # replicas hold the same ones
    names = dict.fromkeys(entry["name"] for metadata in shard_metadata for entry in metadata["param_metadata"])
    missing = [n for n in names if n not in out or sum(b - a for a, b in filled[n]) < out[n].numel()]
    for name in missing:
        out.pop(name, None)
    whole = {name: out[name] for name in names if name in out}
    for name in shard_metadata[0]["buffer_names"] if with_module_buffers else ():
        if name in shard_weights[0]:
            whole[name] = shard_weights[0][name]
        else:
            missing.append(name)
    if missing and strict:
        raise CheckpointError(
            f"{missing[0]} and {len(missing) - 1} more are missing from the shards, in whole or in part. Pass every "
            "rank's, or strict=False to leave them out."
        )
    return whole


def _pieces(model: nn.Module) -> dict:
    steps_of(model)
    with sharded_state():
        return model.state_dict()


# ----------------------------------------------------------------------------------------------- optimizer state


def gather_full_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, apart: set[str]) -> dict | None:
    """On the first rank the whole state as the unwrapped model's optimizer would have it, in host memory; elsewhere
    None. Collective.

    Beside `state` and `param_groups`, `param_names` lists the parameters by number. Parameters named in `apart` belong
    to single ranks: their state stays out, and is kept on the model until `get_shard_from_optim_state_dict`.
    """
    whole = full_optim_state_dict(model, optim, rank0_only=True)
    names: dict[Any, str] = dict(parameter_names(model))
    model.__dict__[_KEPT] = {names[p]: dict(s) for p, s in optim.state.items() if names[p] in apart}
    if not whole:
        return None
    order = [name for group in whole["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(order)}
    return {
        **{k: v for k, v in optim.state_dict().items() if k not in ("state", "param_groups")},
        "state": {number[name]: values for name, values in whole["state"].items() if name not in apart},
        "param_groups": [{**g, "params": [number[name] for name in g["params"]]} for g in whole["param_groups"]],
        "param_names": order,
        "uncollected_local_ids": [number[name] for name in order if name in apart],
    }


def get_shard_from_optim_state_dict(model: nn.Module, full: dict[str, Any]) -> dict[str, Any]:
    """What `load_state_dict` of an optimizer with the same groups takes, from a whole state given on every rank.

    `full` came from `gather_full_optim_state_dict`, or from an optimizer over the unwrapped model's parameters in their
    order. It is not changed. No communication.
    """
    params = {name: p for p, name in parameter_names(model).items()}
    order = full.get("param_names") or list(params)
    number = {name: i for i, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {}
    for i, values in full["state"].items():
        if order[i] not in params:
            raise CheckpointError(f"the optimizer state holds {order[i]}, which the model does not have.")
        param = params[order[i]]
        home = home_of(param)
        is_scalar = home is not None and not home[0].infos[home[1]].shape
        state[i] = {k: v if is_scalar and k == "step" else _piece(v, param) for k, v in values.items()}
    for name, values in model.__dict__.get(_KEPT, {}).items():
        state[number[name]] = values
    left_out = ("state", "param_names", "uncollected_local_ids")
    return {**{k: v for k, v in full.items() if k not in left_out}, "state": state}


def names_of(model: nn.Module, modules: set[nn.Module]) -> set[str]:
    """Names of the parameters whose units' modules are in `modules`."""
    out = set()
    for param, name in parameter_names(model).items():
        home = home_of(param)
        if home is not None and home[0].unit.module in modules and unit_of(home[0].unit.module) is not None:
            out.add(name)
    return out


_KEPT = "_shardkit_uncollected"
