"""fairscale's ShardedDataParallel, as the `zero2` strategy under its signature."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn as nn

from .. import api
from ..config import MixedPrecision
from ..errors import ConfigError, StateError
from ..runtime.managed import unit_of
from ..runtime.unit import in_backward
from ._common import WholeState, keep_dtype, sharded_state
from .fairscale_oss import OSS

_BROADCASTS = "_shardkit_broadcast_buffers"  # on the root: whether each forward takes the first rank's buffers


class ShardedDataParallel(WholeState):
    """Shards gradients and optimizer state; parameters are whole between steps. Returns the module it was given.

    `state_dict()` needs no other rank after an OSS has stepped (or before the first backward), so that one rank may
    save alone; after a step of another optimizer it is collective.

    Args:
        module: as for `shardkit.auto_wrap`, whose "auto" policy decides what is reduced together.
        sharded_optimizer: an OSS or several. Other optimizers over the module's parameters train right as well.
        process_group: None: all ranks.
        broadcast_buffers: each forward begins with the first rank's buffers, but inside `no_sync`.
        sync_models_at_startup: take the first rank's weights. False: raise PlanMismatchError where they differ.
        reduce_fp16: gradients travel in float16.
        reduce_buffer_size, auto_refresh_trainable, warn_on_trainable_params_changed: have no effect. Small gradients of
            a unit always travel together, and parameters may be frozen or unfrozen at any time.
    """

    def __new__(
        cls,
        module: nn.Module | None = None,
        sharded_optimizer: OSS | list[OSS] | None = None,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ):
        if cls is not ShardedDataParallel:  # a generated class making another instance, as copy.deepcopy does
            return object.__new__(cls)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"expected an nn.Module to shard, got {type(module).__name__}.")
        optimizers = sharded_optimizer if isinstance(sharded_optimizer, (list, tuple)) else [sharded_optimizer]
        for optim in optimizers:
            if isinstance(optim, OSS):
                optim._release()
        options = {
            "sharding_strategy": "zero2",
            "sync_module_states": sync_models_at_startup,
            "mixed_precision": keep_dtype(module, MixedPrecision(reduce_dtype=torch.float16) if reduce_fp16 else None),
        }
        api._wrap(module, "auto", process_group, options, mixin=ShardedDataParallel)
        module.__dict__[_BROADCASTS] = broadcast_buffers
        for optim in optimizers:
            if isinstance(optim, OSS):
                optim._attach(module)
        module._refresh_weights()  # type: ignore[operator]
        return module

    def __call__(self, *args, **kwargs):
        if self.__dict__.get(_BROADCASTS) and self._shardkit_step.sync and not in_backward():
            self.sync_buffers()
        return super().__call__(*args, **kwargs)

    def sync_buffers(self, blocking: bool = False) -> None:
        """Takes the first rank's buffers. Collective."""
        group = self._shardkit_step.mesh.world
        for buffer in self.buffers():
            whole = buffer.contiguous()
            group.broadcast(whole).wait()
            if whole is not buffer:
                buffer.copy_(whole)

    def reduce(self) -> None:
        """Reduces what backwards inside `no_sync` accumulated, without another backward. Collective.

        Raises StateError where there is nothing to reduce on this rank.
        """
        step = self._shardkit_step
        step.check_idle("reduce()")
        if not any(flat.has_grad for flat in step.flats):
            raise StateError("no gradients are waiting to be reduced. Only those of backwards inside no_sync() do.")
        step._finish_backward()

    def refresh_trainable(self) -> None:
        """Has no effect: parameters may be frozen or unfrozen at any time."""

    def whole_state_dict(self, **options) -> dict:
        """From the full parameters of this rank where they are today's, without communication. Else collective."""
        flats = self._shardkit_step.flats
        if not all(flat.ready and not flat._deposited for flat in flats):
            return super().whole_state_dict(**options)
        wholes = {info: (flat, i) for flat in flats for i, info in enumerate(flat.infos)}
        with sharded_state():
            state = self.state_dict()
        out = OrderedDict()
        for key, value in state.items():
            info = getattr(value, "shard_info", None)
            if info is not None:
                flat, i = wholes[info]
                out[key] = flat.wait().as_strided(*flat.full_geometry[i]).to(flat.shard.dtype, copy=True)
            else:
                out[key] = value.clone() if isinstance(value, torch.Tensor) else value
        out._metadata = state._metadata  # type: ignore[attr-defined]
        return out

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False):
        """As of any module. Names that all begin with `module.`, as fairscale wrote them, are taken. Collective."""
        own = set(dict(self.named_parameters())) | set(dict(self.named_buffers()))
        if state_dict and all(key.startswith("module.") for key in state_dict) and not own & set(state_dict):
            state_dict = {key.removeprefix("module."): value for key, value in state_dict.items()}
        result = super().load_state_dict(state_dict, strict, assign)
        self._refresh_weights()
        return result

    def _refresh_weights(self) -> None:
        """Makes the full parameters those of today. Collective."""
        unit = unit_of(self)
        assert unit is not None
        step = unit.step
        if step.computing or step.units[0] is not unit:
            return
        for flat in step.flats:
            flat.absorb()
        stale = [flat for flat in step.flats if flat.may_be_stale(False)]  # frozen ones are not
        for flat in stale:
            flat.forget()
        step._gather(stale)
        for flat in stale:
            flat.wait()
