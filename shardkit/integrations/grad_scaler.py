"""Gradient scalers under fairscale's and FSDP1's names. With shardkit's gradients torch's own is right already; these
add what it lacks: gradients that are no LocalShards (of experts, say) on other ranks of a group, and 16-bit ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..comm import Group


class _GroupGradScaler(torch.amp.GradScaler):
    _group: Any = None

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        if dist.is_initialized() and dist.get_world_size(self._group) > 1:
            group = Group(self._group if self._group is not None else dist.group.WORLD)
            if not found:
                found = {inv_scale.device: found_inf.to(inv_scale.device)}  # the others have gradients: take part
            for value in found.values():
                group.all_reduce(value, dist.ReduceOp.MAX).wait()
        return found


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


class ShardedGradScaler(_GroupGradScaler):
    """fairscale's: an infinity on any rank of `process_group` (None: all ranks) makes every rank skip the step.

    Collective in `unscale_` or `step`: one all-reduce of one number. Works on CPUs as on accelerators.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ):
        super().__init__(_device(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = process_group


class FSDPGradScaler(_GroupGradScaler):
    """FSDP1's: as `ShardedGradScaler`, with its order of arguments."""

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ):
        super().__init__(device or _device(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._group = process_group
