"""FSDP2's names: `fully_shard(module)`, the methods it gives to a module, and `register_fsdp_forward_method`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

import torch.nn as nn

from .. import api
from ..config import MixedPrecision
from ..errors import ConfigError, StateError
from ..runtime.managed import Managed, _inside_unit, unit_of
from ..runtime.summon import summon
from ._common import keep_dtype, say

_SUMMONED = "_shardkit_unshard"  # where a module keeps what unshard() opened


class UnshardHandle:
    """What `unshard(async_op=True)` returns. Whoever uses the parameters waits for them anyway."""

    def wait(self) -> None:
        """Does nothing."""


class FSDPModule(nn.Module):
    """FSDP2's methods of a sharded module."""

    def __call__(self, *args, **kwargs):
        if _SUMMONED in self.__dict__:
            self.reshard()  # what a forward computes with must be its own, or backward could not reduce it
        return super().__call__(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Between steps: this module's parameters are whole until `reshard()` or the module's next call, and changes to
        them are lost. During a forward or backward: starts the gather, for whoever needs it next. Collective.
        """
        unit = _unit(self)
        if unit.step.computing:
            unit.step._gather(unit.sources)
        elif _SUMMONED not in self.__dict__:
            stack = contextlib.ExitStack()
            stack.enter_context(summon(unit.step, self, writeback=False, recurse=False))
            self.__dict__[_SUMMONED] = stack
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Ends what `unshard()` began. During a forward or backward it has no effect: each unit drops its own."""
        stack = self.__dict__.pop(_SUMMONED, None)
        if stack is not None:
            stack.close()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backwards keep whole gradients on this rank, until one with True reduces the sum."""
        step = _unit(self).step
        if step.units[0].module is not self or not recurse:
            say("set_requires_gradient_sync() on a part of the model holds for the whole of it: units reduce together.")
        step.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Has no effect: gradients are averaged over replicas in every backward, which gives the same sum."""
        if not requires_all_reduce:
            say("set_requires_all_reduce(False) has no effect: replicas are averaged in every backward.")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are dropped after forward; those of the root and of the last unit never are."""
        unit = _unit(self)
        inside = set(self.modules()) if recurse else {self}
        for other in unit.step.units:
            if other.module in inside:
                if other.step.options.strategy.drop_after_backward is False and reshard_after_forward:
                    raise ConfigError(f"sharding_strategy={other.step.options.sharding_strategy!r} keeps parameters.")
                other.drop_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Has no effect: whether parameters are kept between steps is a strategy's choice (zero1, zero2)."""
        if not reshard_after_backward:
            say("set_reshard_after_backward(False) has no effect. To keep parameters, use sharding_strategy='zero2'.")

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Has no effect: the next unit is gathered ahead in the order of the last forward."""
        say("set_modules_to_forward_prefetch() has no effect: the order of units is learnt from the last forward.")

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Has no effect: the previous unit is gathered ahead in the order of the last forward."""
        say("set_modules_to_backward_prefetch() has no effect: the order of units is learnt from the last forward.")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Has no effect: every backward ends by itself."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What summed gradients are divided by, in place of the number of ranks."""
        for flat in _unit(self).flats:
            flat.divisor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor


def _unit(module: nn.Module):
    unit = unit_of(module)
    if unit is None:
        raise StateError(f"{type(module).__name__} is not sharded.")
    return unit


class _FullyShard(FSDPModule, api.FullyShardedDataParallel):
    """A unit made by `fully_shard`. Its state dict holds LocalShards, as FSDP2's holds DTensors."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Any:
    """FSDP2's function: makes `module` a unit, and returns it. Collective, as `shardkit.FullyShardedDataParallel`.

    mesh: 1-D to shard over, 2-D (replicate x shard). mp_policy, offload_policy: FSDP2's objects, read by attribute.
    Raises ConfigError for a list of modules: wrap the module around them, or each of them.
    """
    if isinstance(module, (list, tuple)):
        raise ConfigError("fully_shard of a list of modules: wrap each, or the module that holds them.")
    if shard_placement_fn is not None:
        say("shard_placement_fn has no effect: parameters are cut along dimension 0 of the flat buffer they share.")
    mp = None
    if mp_policy is not None:
        mp = MixedPrecision(
            param_dtype=mp_policy.param_dtype,
            reduce_dtype=mp_policy.reduce_dtype or mp_policy.param_dtype,
            output_dtype=mp_policy.output_dtype,
            cast_forward_inputs=mp_policy.cast_forward_inputs,
        )
    offload = offload_policy is not None and hasattr(offload_policy, "pin_memory")
    options: dict[str, Any] = {
        "sharding_strategy": "hybrid" if mesh is not None and mesh.ndim == 2 else "full",
        "device_mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mixed_precision": keep_dtype(module, mp),
        "cpu_offload": offload,
        "ignored_states": list(ignored_params or ()),
    }
    api._wrap(module, None, None, options, single=True, mixin=_FullyShard)
    if isinstance(reshard_after_forward, bool):
        _unit(module).drop_after_forward = reshard_after_forward
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` compute with full parameters, as calling the module does.

    Does nothing for a module that is not sharded, or has no such method. What `forward_methods=` does at wrap time.
    """
    cls = type(module)
    method = getattr(cls, method_name, None)
    if not isinstance(module, Managed) or method is None:
        return
    inside = _inside_unit(method, method_name)
    new = types.new_class(cls.__name__, (cls,), {}, lambda ns: ns.update({method_name: inside}))
    new.__qualname__, new.__module__, new.__doc__ = cls.__qualname__, cls.__module__, cls.__doc__
    module.__class__ = new
