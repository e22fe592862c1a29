"""`summon_full_params`: for a while, the parameters themselves are whole."""

from __future__ import annotations

import contextlib

import torch.nn as nn

from ..errors import StateError
from .step import Step


@contextlib.contextmanager
def summon(step: Step, module: nn.Module, writeback: bool, recurse: bool):
    """See `FullyShardedDataParallel.summon_full_params`. Collective over the shard groups of the units concerned."""
    step.check_idle("summon_full_params()")
    inside = set(module.modules()) if recurse else {module}
    units = [u for u in step.units if u.module in inside and not u.active]
    flats = list(dict.fromkeys(flat for u in units for flat in u.sources))
    for flat in flats:
        whole = flat.gather_like_shard(flat.shard)
        for i, p in enumerate(flat.params):
            p.data = whole.as_strided(*flat.full_geometry[i])
    for unit in units:
        unit.active += 1  # calls go straight through: the parameters in place are whole
    try:
        yield
    finally:
        for unit in units:
            unit.active -= 1
        strange = []
        for flat in flats:
            flat.forget()
            if writeback:
                flat.absorb()
            else:
                flat.bind(flat.shard)
            for name, p in zip(flat.names, flat.params, strict=True):
                if p.grad is not None and p.grad.shape != p.shape:
                    strange.append(name)
                    p.grad = None
    if strange:
        raise StateError(
            f"a backward ran inside summon_full_params(): {strange[0]} and {len(strange) - 1} more got whole gradients "
            "that no rank reduced. They were dropped. Run the forward and backward outside."
        )

