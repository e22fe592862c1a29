"""`copy.deepcopy` of sharded modules: an independent copy with shards of its own, on the same process groups."""

from __future__ import annotations

import copy

import torch.nn as nn

from ..errors import StateError
from .flat_param import FlatParam
from .managed import _UNIT, copy_plain, unit_of
from .step import Step
from .unit import Entry, Unit

_UNDER_WAY = "shardkit.copying"  # memo key: an outer sharded module is being copied and will settle the units


def deepcopy_module(module: nn.Module, memo: dict, parent) -> nn.Module:
    """Copies `module` and, at the outermost sharded module, rebuilds units, flat parameters and step for the copy.

    Raises StateError for a part of a unit (its weights live in the unit's shard), and during a forward or backward.
    """
    outermost = _UNDER_WAY not in memo
    if not outermost:
        return copy_plain(module, memo, parent)
    memo[_UNDER_WAY] = True
    unit = unit_of(module)
    assert unit is not None
    unit.step.check_idle("copy.deepcopy()")
    units = [u for u in unit.step.units if any(m is u.module for m in module.modules())]
    if unit not in units:
        raise StateError(
            f"a {type(module).__name__} inside unit {unit.name!r} cannot be copied alone: its weights are part of the "
            "unit's shard. Copy the unit's module or the whole model."
        )
    for flat in unit.step.flats:
        flat.absorb()
    new = copy_plain(module, memo, parent)
    flats = {flat: _copy_flat(flat, memo) for u in units for flat in u.flats}
    copies = {u: _copy_unit(u, flats, memo) for u in units}
    for old, fresh in flats.items():
        fresh.unit = copies[old.unit]
    for m in list(module.modules()):
        owner = unit_of(m)
        if owner is not None:
            memo[id(m)].__dict__[_UNIT] = copies[owner]
    Step(list(copies.values()), unit.step.mesh, unit.step.options)
    del memo[_UNDER_WAY]
    return new


def _copy_flat(flat: FlatParam, memo: dict) -> FlatParam:
    new = object.__new__(FlatParam)
    new.__dict__.update(flat.__dict__)
    new.params = [copy.deepcopy(p, memo) for p in flat.params]
    new.start_over()
    shard = new.new_shard(flat.shard.dtype, flat.shard.device, flat.shard.is_pinned())
    shard.copy_(flat.shard)
    new.bind(shard)
    return new


def _copy_unit(unit: Unit, flats: dict[FlatParam, FlatParam], memo: dict) -> Unit:
    missing = [e.flat for e in unit.entries if e.flat not in flats]
    if missing:
        raise StateError(
            f"unit {unit.name!r} borrows {missing[0].names[0]!r} from a unit that is not being copied. Copy the model."
        )
    entries = [
        Entry(flats[e.flat], e.index, [(memo[id(m)], attribute, key) for m, attribute, key in e.places])
        for e in unit.entries
    ]
    own = [flats[f] for f in unit.flats]
    new = Unit(unit.name, memo[id(unit.module)], own, entries, unit.mp)
    new.drop_after_forward = unit.drop_after_forward
    new.buffer_dtypes = {(memo[id(m)], name): dtype for (m, name), dtype in unit.buffer_dtypes.items()}
    return new
