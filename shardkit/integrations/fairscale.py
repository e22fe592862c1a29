"""fairscale, as shardkit: `from shardkit.integrations.fairscale import FullyShardedDataParallel, OSS, ...`

A script that imports these names from `fairscale.nn`, `fairscale.optim` and their submodules runs with the import line
changed. What then behaves differently is listed in docs/migrating.md. fairscale itself is neither needed nor imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn

from .. import activation, api
from ..errors import ConfigError
from ..runtime.managed import unit_of
from ..runtime.unit import Unit, in_backward
from . import fairscale_state, pickling
from ._common import PerUnit, WholeState, is_wrapped, set_unit_options, summoned, units_in
from .fairscale_config import ProcessGroupName, Settings, after_wrapping, explain, raise_inputs, translate
from .fairscale_ddp import ShardedDataParallel
from .fairscale_oss import OSS
from .fairscale_wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from .grad_scaler import ShardedGradScaler

__all__ = [
    "ConfigAutoWrap",
    "FullyShardedDataParallel",
    "GradScaler",
    "OSS",
    "ProcessGroupName",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
    "wrap",
]

GradScaler = ShardedGradScaler
_KEY = "_shardkit_fairscale"  # where a unit's module keeps its own options


class TrainingState(enum.Enum):
    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class FullyShardedDataParallel(WholeState):
    """fairscale's constructor and methods. Returns the module it was given, as a shardkit unit.

    `reshard_after_forward=False` keeps this unit's full parameters for backward. `mixed_precision` computes in
    `compute_dtype` (default float16) and reduces in it, or in float32 with `fp32_reduce_scatter`; shards are float32.
    `flatten_parameters` and `bucket_cap_mb` have no counterpart: parameters are always the original ones, and small
    gradients of a unit always travel together. Collectives, ranks and errors: `shardkit.FullyShardedDataParallel`.
    """

    def __new__(
        cls,
        module: nn.Module | None = None,
        process_group: Any = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: Any = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: Any = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ):
        if cls is not FullyShardedDataParallel:  # a generated class making another instance, as copy.deepcopy does
            return object.__new__(cls)
        given = {k: v for k, v in locals().items() if k not in ("cls", "module", "process_group", "__class__")}
        if not isinstance(module, nn.Module):
            raise ConfigError(f"expected an nn.Module to shard, got {type(module).__name__}.")
        if is_wrapped(module, cls):
            _rewrapped(module, given)
            return module
        explain(given)
        if force_input_to_fp32 and not mixed_precision:
            module.register_forward_pre_hook(raise_inputs, with_kwargs=True)
        options = translate(module, given)
        strategy = {"sharding_strategy": "none"} if process_group is _REPLICATED else {}
        group = None if process_group is _REPLICATED else process_group
        api._wrap(module, None, group, {**options, **strategy}, single=True, mixin=FullyShardedDataParallel)
        module.__dict__[_KEY] = PerUnit(
            drop_after_forward=bool(reshard_after_forward) and not strategy,
            cast_inputs=False,
            cast_root_inputs=mixed_precision,
            settings=Settings(
                **after_wrapping(given),
                no_broadcast_optim_state=bool(no_broadcast_optim_state),
                arguments=given,
                trained=tuple(flat.params[0].requires_grad for flat in unit_of(module).flats),  # type: ignore[union-attr]
            ),
        )
        set_unit_options(module, _KEY)
        return module

    @property
    def _shardkit_settings(self) -> Settings:
        return self.__dict__[_KEY].settings

    # ------------------------------------------------------------------------------------------------ state dicts

    def whole_state(self) -> dict[str, Any]:
        chosen = self._shardkit_settings
        return {"rank0_only": chosen.state_dict_on_rank_0_only, "cpu": True if chosen.state_dict_to_cpu else None}

    def local_state_dict(self, *args, **kwargs):
        """This rank's pieces as plain tensors. No communication. See `load_local_state_dict`, `local_metadata_dict`."""
        return fairscale_state.local_state_dict(self)

    def load_local_state_dict(self, state_dict: dict, strict: bool = True):
        """Loads what `local_state_dict` returned on this rank of as many. No communication."""
        return fairscale_state.load_local_state_dict(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Where the pieces of `local_state_dict` belong, for `consolidate_shard_weights`."""
        return fairscale_state.local_metadata_dict(self)

    consolidate_shard_weights = staticmethod(fairscale_state.consolidate_shard_weights)

    def gather_full_optim_state_dict(self, optim: torch.optim.Optimizer, **ignored) -> dict | None:
        """On the first rank the whole optimizer state, numbered as the unwrapped model's; elsewhere None. Collective.

        Any groups, any of the model's parameters. State of units with `no_broadcast_optim_state`, and of those whose
        process group has one rank in a larger world, stays with its rank.
        """
        return fairscale_state.gather_full_optim_state_dict(self, optim, self._names_apart())

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole optimizer state, for `load_state_dict` of its optimizer. No communication."""
        return fairscale_state.get_shard_from_optim_state_dict(self, full_optim_state_dict)

    def _names_apart(self) -> set[str]:
        largest = max(unit.flats[0].mesh.size for unit in units_in(self) if unit.flats)
        apart = set()
        for unit in units_in(self):
            own = unit.module.__dict__.get(_KEY)
            alone = bool(unit.flats) and unit.flats[0].mesh.size == 1 < largest
            if alone or (own is not None and own.settings.no_broadcast_optim_state):
                apart.add(unit.module)
        return fairscale_state.names_of(self, apart)

    # --------------------------------------------------------------------------------------------------- training

    def summon_full_params(self, recurse: bool = True, volatile: bool = False):  # type: ignore[override]
        """Context in which parameters are whole, on every rank. Collective at entry. volatile: changes are lost."""
        return summoned(self, recurse=recurse, writeback=not volatile)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales gradients so that their global norm is at most `max_norm`; returns the norm before. Collective.

        Raises NotImplementedError where units shard over different groups: their ranks would see different norms.
        """
        groups = {tuple(unit.flats[0].mesh.world.ranks) for unit in units_in(self) if unit.flats}
        if len(groups) > 1:
            raise NotImplementedError(
                f"clip_grad_norm_ over units with different process groups ({sorted(groups)}): each rank would scale "
                "by a norm of its own. Clip each group of parameters by itself."
            )
        return super().clip_grad_norm_(max_norm, norm_type)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """What summed gradients of this unit (`recursive`: and of those inside) are divided by: `pre * post`."""
        for unit in units_in(self) if recursive else [self._shardkit_unit]:
            for flat in unit.flats:
                flat.divisor = pre * post

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Has no effect: a parameter in two units is recognised as one when the second is wrapped."""

    def reset_parameters(self) -> None:
        """The module's own, on whole parameters, if `allow_reset_parameters`; RuntimeError otherwise. Collective."""
        if not self._shardkit_settings.allow_reset_parameters:
            raise RuntimeError("reset_parameters() of a wrapped module needs allow_reset_parameters=True.")
        with summoned(self):
            super().reset_parameters()  # type: ignore[misc]

    def assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raises ValueError where `training_state` is none of these."""
        wanted = [state] if isinstance(state, TrainingState) else list(state)
        if self.training_state not in wanted:
            raise ValueError(f"expected to be in states {wanted}, but the state is {self.training_state}.")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            unit = unit_of(self)
            if unit is not None and name == "training_state":
                return _training_state(unit)
            if unit is not None and name == "params_with_grad":
                return [p for p in self.parameters() if p.grad is not None]
            raise

    def extra_repr(self) -> str:
        own = self.__dict__.get(_KEY)
        if own is None or not own.settings.verbose:
            return super().extra_repr()
        shown = ", ".join(f"{k}={v}" for k, v in own.settings.arguments.items())
        return f"{super().extra_repr()}, world_size={self._shardkit_unit.step.mesh.size}, {shown}".removeprefix(", ")

    def __reduce_ex__(self, protocol):
        """Pickles this rank's pieces. Unpickling is collective over the default group, of as many ranks."""
        return pickling.reduced(self, FullyShardedDataParallel, _KEY)


def _rewrapped(module: nn.Module, given: dict[str, Any]) -> None:
    """A wrapper around a wrapper, as `FSDP(auto_wrap(model))`: it has no parameters, but a say in state dicts."""
    own = module.__dict__[_KEY]
    settings = dataclasses.replace(own.settings, **after_wrapping(given))
    module.__dict__[_KEY] = dataclasses.replace(own, settings=settings)


# auto_wrap_bn's process group: parameters stay whole on every rank, and gradients are averaged as everywhere.
_REPLICATED: Any = object()


def _training_state(unit: Unit) -> TrainingState:
    step = unit.step
    if in_backward():
        return TrainingState.BACKWARD_PRE if unit.opened else TrainingState.BACKWARD_POST
    if step._depth:
        return TrainingState.FORWARD
    return TrainingState.SUMMON_FULL_PARAMS if unit.active else TrainingState.IDLE


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Computes the activations of `module` again in backward. Returns it. See `shardkit.checkpoint_wrapper`."""
    return activation.checkpoint_wrapper(module, offload_to_cpu=offload_to_cpu)


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: Any = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Makes every batch normalisation in `module` a unit of its own, in its own precision. Returns `module`.

    single_rank_pg: keep its parameters whole on every rank; gradients are averaged all the same. fsdp_config: arguments
    in place of the usual ones. wrap_it: False only sets `wrapper_config`. assert_on_collision: raise ConfigError where
    one is set already.
    """
    usual = {"mixed_precision": False, "flatten_parameters": False, "reshard_after_forward": False, "bucket_cap_mb": 0}
    group = _REPLICATED if single_rank_pg else process_group
    config = fsdp_config if fsdp_config is not None else {"process_group": group, **usual}
    for name, m in module.named_modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            if assert_on_collision and hasattr(m, "wrapper_config"):
                raise ConfigError(f"{name or 'the module'} has a wrapper_config already, of another policy.")
            m.wrapper_config = config  # type: ignore[assignment]
    if not wrap_it:
        return module
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[nn.Module]:
    """The units in `mod`, itself included, in the order of the module tree; with `skip_empty` those with parameters."""
    found: list[Any] = [m for m in mod.modules() if isinstance(m, FullyShardedDataParallel)]
    return [m for m in found if not skip_empty or m._shardkit_unit.entries]


@contextlib.contextmanager
def no_pre_load_state_dict_hook() -> Iterator[None]:
    """Has no effect: names have no prefixes that a hook would have to rewrite."""
    yield
