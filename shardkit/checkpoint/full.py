"""Whole state dicts of sharded models, under the names of the unwrapped model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn as nn

from ..errors import StateError
from ..local_shard import LocalShard
from ..runtime.managed import unit_of
from ..runtime.step import Step


def steps_of(model: nn.Module) -> list[Step]:
    """The roots inside `model`, in the order of the module tree. Raises StateError where nothing is sharded."""
    units = (unit_of(m) for m in model.modules())
    steps = list(dict.fromkeys(u.step for u in units if u is not None))
    if not steps:
        raise StateError(f"{type(model).__name__} holds no sharded module. Wrap it first: shardkit.auto_wrap(model).")
    for step in steps:
        step.check_idle("reading or writing the model's state")
    return steps


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu: bool | None = None) -> dict:
    """The state dict that the unwrapped model would have: same names, shapes, dtypes, buffers and extra state.

    Gathered one flat parameter at a time: the peak is the result plus one of them. Tensors are copies, which later
    steps do not change; names of a tied parameter share one.

    rank0_only: other ranks than the first of the group take part and get an empty dict.
    cpu: copy to host memory. None: where `rank0_only` is.
    Collective over the model's shard groups; every rank must call it.
    """
    return gather_whole(model, model.state_dict(), rank0_only=rank0_only, cpu=cpu)


def gather_whole(model: nn.Module, state: dict, *, rank0_only: bool = False, cpu: bool | None = None) -> dict:
    """`full_state_dict` for some of the entries of `model.state_dict()`: only the flat parameters that they are in are
    gathered. Every rank passes the same keys."""
    steps = steps_of(model)
    keep = not rank0_only or steps[0].mesh.world.rank == 0
    device = torch.device("cpu") if (rank0_only if cpu is None else cpu) else None
    homes = {info: (flat, i) for step in steps for flat in step.flats for i, info in enumerate(flat.infos)}
    wanted: dict = {}
    for key, value in state.items():
        if isinstance(value, LocalShard):
            flat, i = homes[value.shard_info]
            wanted.setdefault(flat, {}).setdefault(i, []).append(key)
    out: OrderedDict[str, Any] = OrderedDict((key, None) for key in state) if keep else OrderedDict()
    for flat, by_index in wanted.items():
        whole = flat.gather_like_shard(flat.shard)
        for i, keys in by_index.items() if keep else ():
            full = whole.as_strided(*flat.full_geometry[i])
            full = full.clone() if device is None or full.device == device else full.to(device)
            out.update(dict.fromkeys(keys, full))
        del whole  # before the next is gathered, or two are there at a time
    if keep:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, LocalShard):
                out[key] = value.detach().clone() if device is None else value.detach().to(device, copy=True)
            elif not isinstance(value, torch.Tensor):
                out[key] = value
        if hasattr(state, "_metadata"):
            out._metadata = state._metadata  # type: ignore[attr-defined]
    return out


def load_full_state_dict(model: nn.Module, state: dict, strict: bool = True):
    """Loads a whole state dict, given on every rank: each keeps its piece. No communication.

    Returns the named tuple (missing_keys, unexpected_keys) of `load_state_dict`, and raises as it does.
    """
    steps_of(model)
    return model.load_state_dict(state, strict=strict)
