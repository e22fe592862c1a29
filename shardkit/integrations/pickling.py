"""Pickles of sharded modules, as fairscale's FSDP has them: this rank's pieces, and how the modules were wrapped."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn

from ..errors import StateError
from ..runtime.flat_param import home_of
from ..runtime.managed import _UNIT, Managed, unit_of
from ..runtime.unit import Unit
from ._common import units_in
from .fairscale_state import load_local_state_dict, local_state_dict

_GROUPS = ("process_group", "process_group_reduce_scatter")


def reduced(module: nn.Module, wrapper: type, key: str) -> tuple:
    """What `__reduce_ex__` of a sharded module returns. Process groups are left out: unpickling takes the default one.

    Raises StateError for units over other groups than the root's, and for a part of a unit.
    """
    root = unit_of(module)
    if root is None or root.module is not module:
        raise StateError("a module inside a unit cannot be pickled alone: its weights are a part of the unit's shard.")
    root.step.check_idle("pickling")
    units = units_in(module)
    names = {m: name for name, m in module.named_modules()}
    wrapped = []
    for unit in units:
        if unit.flats and unit.flats[0].mesh.world.ranks != root.step.mesh.world.ranks:
            raise StateError(f"unit {names[unit.module]!r} has a process group of its own, which cannot be pickled.")
        arguments = {k: v for k, v in _settings(unit, key).arguments.items() if k not in _GROUPS}
        wrapped.append((names[unit.module], arguments))
    wrapped.sort(key=lambda item: -len(item[0].split(".")) if item[0] else 0)  # inner ones first, the root last
    # Pieces are laid out by what was trainable then, which may have changed.
    then = {p: t for u in units for f, t in zip(u.flats, _settings(u, key).trained, strict=True) for p in f.params}
    trainable = [(then.get(p, p.requires_grad), p.requires_grad) for p in module.parameters()]
    return _restore, (_plain(module, key), wrapped, trainable, local_state_dict(module), root.step.mesh.size, wrapper)


def _settings(unit: Unit, key: str) -> Any:
    return unit.module.__dict__[key].settings


def _restore(plain: nn.Module, wrapped: list, trainable: list, pieces: dict, size: int, wrapper: Any) -> nn.Module:
    """Collective over the default process group."""
    if torch.distributed.get_world_size() != size:
        raise StateError(
            f"a model that was pickled on {size} ranks is unpickled on {torch.distributed.get_world_size()}. Use as "
            "many, or consolidate_shard_weights() of all ranks' local_state_dict()."
        )
    for p, (then, _) in zip(plain.parameters(), trainable, strict=True):
        p.requires_grad_(then)
    for name, arguments in wrapped:
        wrapper(plain.get_submodule(name), **arguments)
    load_local_state_dict(plain, pieces)
    for p, (_, now) in zip(plain.parameters(), trainable, strict=True):
        p.requires_grad_(now)
    return plain


def _plain(module: nn.Module, key: str) -> nn.Module:
    """A copy of the module tree with the classes it had, and zeros for weights, so that ranks agree on them."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        home = home_of(p)
        if home is not None:
            shape = home[0].infos[home[1]].shape
            # One element in memory, and in the pickle, until it is sharded.
            memo[id(p)] = nn.Parameter(torch.zeros((), dtype=p.dtype).expand(shape), requires_grad=False)
    return _copied(module, key, memo)


def _copied(module: nn.Module, key: str, memo: dict) -> nn.Module:
    """`copy.deepcopy` of a module tree, as if nothing in it were sharded."""
    if id(module) in memo:
        return memo[id(module)]
    cls = type(module)
    while issubclass(cls, Managed):  # generated classes come first, then the mixins; the last base is what it had
        cls = cls.__bases__[-1]
    new = cls.__new__(cls)
    memo[id(module)] = new
    for child in module.children():
        _copied(child, key, memo)
    hidden = (_UNIT, key, "_shardkit_uncollected")
    new.__setstate__(copy.deepcopy({k: v for k, v in module.__dict__.items() if k not in hidden}, memo))
    return new
