"""torch's FSDP1, as shardkit: `from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP, ...`

A script that imports these names from `torch.distributed.fsdp` (and `.wrap`) runs with the import line changed. What
then behaves differently is listed in docs/migrating.md; an argument without effect says why in a warning.

FSDP2's names are methods of the sharded module, see `fsdp2.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn

from .. import api
from ..errors import ConfigError, StateError
from ..runtime.flat_param import home_of
from . import torch_optim
from ._common import WholeState, is_wrapped, say, set_unit_options, summoned, units_in
from .fsdp2 import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from .grad_scaler import FSDPGradScaler as ShardedGradScaler
from .torch_config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings,
    translate,
)
from .torch_wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    units_of_policy,
    wrap,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "always_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

_KEY = "_shardkit_fsdp1"  # where a unit's module keeps its own options and its state dict settings
_FULL = settings(StateDictType.FULL_STATE_DICT)
# What torch's and DDP's hooks of these names change: the dtype that gradients travel in. None: nothing.
_HOOKS = {
    "allreduce_hook": None,
    "reduce_scatter_hook": None,
    "fp16_compress_hook": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
}


class FullyShardedDataParallel(FSDPModule, WholeState):
    """FSDP1's constructor and methods. Returns the module it was given, as a shardkit unit.

    `sharding_strategy` None: FULL_SHARD. `use_orig_params` and `forward_prefetch` have no counterpart: parameters are
    always the original ones, and the next unit is always gathered ahead. `backward_prefetch` None gathers each unit
    when backward reaches it. Collectives, ranks and errors are those of `shardkit.FullyShardedDataParallel`.
    """

    def __new__(
        cls,
        module: nn.Module | None = None,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ):
        if cls is not FullyShardedDataParallel:  # a generated class making another instance, as copy.deepcopy does
            return object.__new__(cls)
        given = {k: v for k, v in locals().items() if k not in ("cls", "module", "process_group", "auto_wrap_policy")}
        given.pop("__class__", None)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"expected an nn.Module to shard, got {type(module).__name__}.")
        if is_wrapped(module, cls):
            return module  # FSDP(FSDP(m)): the outer one would have no parameters
        modules, states = list(ignored_modules or ()), list(ignored_states or ())
        given |= {"ignored_modules": modules, "ignored_states": states}
        modules += [item for item in states if isinstance(item, nn.Module)]
        left_alone = {p for m in modules for p in m.parameters()} | {s for s in states if isinstance(s, nn.Parameter)}
        policy, apart = units_of_policy(module, auto_wrap_policy, modules, left_alone)
        common = {**given, "process_group": process_group}
        for unit, arguments in apart:
            cls(unit, **{**common, **arguments})
        options, own = translate(module, given)
        single = auto_wrap_policy is None
        before = {unit.module for unit in units_in(module)}
        api._wrap(module, policy, process_group, options, single=single, mixin=FullyShardedDataParallel)
        for made in units_in(module):
            if made.module not in before:
                made.module.__dict__[_KEY] = dataclasses.replace(own, settings=_FULL)
        set_unit_options(module, _KEY)
        return module

    # ------------------------------------------------------------------------------------------------ the module

    def whole_state(self) -> dict[str, Any] | None:
        chosen = self.__dict__[_KEY].settings
        if chosen.state_dict_type is not StateDictType.FULL_STATE_DICT:
            return None
        config = chosen.state_dict_config
        return {"rank0_only": config.rank0_only, "cpu": config.offload_to_cpu}

    def pieces_to_cpu(self) -> bool:
        return self.whole_state() is None and self.__dict__[_KEY].settings.state_dict_config.offload_to_cpu

    def check_is_root(self) -> bool:
        """Whether this is the outermost of the units that train together."""
        return self._shardkit_step.units[0].module is self

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[nn.Module]:
        """The units in `module`, itself included, in the order of the module tree; only roots with `root_only`."""
        found: list[Any] = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m.check_is_root()] if root_only else found

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Takes torch's hooks by name: `allreduce_hook`, `reduce_scatter_hook`, and `fp16_compress_hook` or
        `bf16_compress_hook`, which set the dtype that gradients travel in. `state` has no effect.

        Call it on the root, on every rank. Raises ConfigError for any other hook.
        """
        name = getattr(hook, "__name__", repr(hook))
        if name not in _HOOKS:
            raise ConfigError(
                f"register_comm_hook({name}): gradients are sent from where autograd left them, so there is no flat "
                f"tensor to hand to a hook. Hooks that stand for a dtype are understood: {', '.join(_HOOKS)}."
            )
        if not self.check_is_root():
            raise StateError("register_comm_hook() was called on a nested unit. Call it on the root.")
        for flat in self._shardkit_step.flats:
            dtype = _HOOKS[name]
            if dtype is not None and flat.reduce_dtype.is_floating_point:
                flat.reduce_dtype = dtype

    # -------------------------------------------------------------------------------------------- full parameters

    # A plain function, so that FSDP.summon_full_params(model) and model.summon_full_params() both work.
    @contextlib.contextmanager
    def summon_full_params(  # type: ignore[override]
        module: nn.Module,  # noqa: N805
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Context in which parameters of the units in `module` are whole, on every rank. Collective at entry.

        writeback: each rank keeps its piece of what was changed, of gradients too with `with_grads`, which shows whole
        gradients (one gather each). offload_to_cpu: whole parameters are in host memory inside.
        """
        if rank0_only and writeback:
            raise ConfigError("rank0_only=True needs writeback=False: every rank keeps a piece of what was changed.")
        if rank0_only:
            say("summon_full_params(rank0_only=True): other ranks, which take part in it, see whole parameters too.")
        params = [p for unit in units_in(module) for flat in unit.flats for p in flat.params]
        reduced: list[Any] = [(p, p.grad) for p in params if with_grads and p.grad is not None]
        grads = [(p, grad, grad.full_tensor()) for p, grad in reduced]
        with summoned(module, recurse=recurse, writeback=writeback):
            device = [(p, p.data) for p in params if offload_to_cpu and p.device.type != "cpu"]
            for p, there in device:
                p.data = there.cpu()
            for p, _, whole in grads:
                p.grad = whole.to(p.device)
            try:
                yield
            finally:
                changed = {p: p.grad for p, _, _ in grads}
                for p, _, _ in grads:
                    p.grad = None
                for p, there in device:
                    if writeback:
                        there.copy_(p.data)
                    p.data = there
        for p, grad, _ in grads:
            flat, index = home_of(p)  # type: ignore[misc]
            new = changed[p]
            if writeback and new is not None:
                piece = new.detach().reshape(-1)[slice(*flat.infos[index].piece)]
                grad.copy_(piece.view(flat.infos[index].local_shape))
            p.grad = grad

    # ------------------------------------------------------------------------------------------------ state dicts

    @staticmethod
    def set_state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> StateDictSettings:
        """Sets what `state_dict()` of the units in `module` returns; returns what was set before.

        FULL_STATE_DICT: whole tensors. SHARDED_STATE_DICT and LOCAL_STATE_DICT: LocalShards, which
        `torch.distributed.checkpoint` saves and loads for any number of ranks.
        """
        before = FullyShardedDataParallel.get_state_dict_type(module)
        chosen = settings(state_dict_type, state_dict_config, optim_state_dict_config)
        for unit in FullyShardedDataParallel.fsdp_modules(module):
            unit.__dict__[_KEY] = dataclasses.replace(unit.__dict__[_KEY], settings=chosen)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What was set for the units in `module`. Raises StateError where there are none."""
        for unit in FullyShardedDataParallel.fsdp_modules(module):
            return unit.__dict__[_KEY].settings
        raise StateError(f"{type(module).__name__} holds no FSDP unit.")

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
    ) -> Iterator[None]:
        """`set_state_dict_type` for a while."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            FullyShardedDataParallel.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )

    @staticmethod
    def optim_state_dict(model, optim, optim_state_dict=None, group=None) -> dict[str, Any]:
        """The optimizer's state by parameter names, whole or sharded as `set_state_dict_type` says. Collective."""
        chosen = FullyShardedDataParallel.get_state_dict_type(model)
        config = chosen.optim_state_dict_config
        if chosen.state_dict_type is StateDictType.FULL_STATE_DICT:
            only, cpu = config.rank0_only, config.offload_to_cpu
            return torch_optim.whole_state(model, optim, optim_state_dict, rank0_only=only, cpu=cpu)
        return torch_optim.sharded_state(model, optim, optim_state_dict, cpu=config.offload_to_cpu)

    @staticmethod
    def optim_state_dict_to_load(
        model, optim, optim_state_dict, is_named_optimizer=False, load_directly=False, group=None
    ) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `optim_state_dict` returned; it is loaded with `load_directly`.

        Communicates only where the state dict type has `rank0_only`: then the first rank's is handed out.
        """
        config = FullyShardedDataParallel.get_state_dict_type(model).optim_state_dict_config
        if getattr(config, "rank0_only", False):
            optim_state_dict = torch_optim.scattered(model, optim_state_dict)
        state = torch_optim.to_load(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(state)
        return state

    @staticmethod
    def full_optim_state_dict(model, optim, optim_input=None, rank0_only=True, group=None) -> dict[str, Any]:
        """The whole state by parameter names, in host memory; empty on other ranks with `rank0_only`. Collective."""
        return torch_optim.whole_state(model, optim, rank0_only=rank0_only, cpu=True)

    @staticmethod
    def sharded_optim_state_dict(model, optim, group=None) -> dict[str, Any]:
        """The state by parameter names; what is split is a LocalShard. No communication."""
        return torch_optim.sharded_state(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(full_optim_state_dict, model, optim_input=None, optim=None) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from a whole state given on every rank. No communication."""
        return torch_optim.to_load(model, _optim(model, optim, optim_input), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim) -> dict[str, Any]:
        """What `optim.load_state_dict` takes, from what `sharded_optim_state_dict` returned. No communication."""
        return torch_optim.to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict, model, optim_input=None, optim=None, group=None
    ) -> dict[str, Any]:
        """As `shard_full_optim_state_dict`, from a state that only the first rank has. Collective."""
        state = torch_optim.scattered(model, full_optim_state_dict)
        return torch_optim.to_load(model, _optim(model, optim, optim_input), state)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict, optim_state_key_type, model, optim_input=None, optim=None
    ) -> dict[str, Any]:
        """The state with parameters' numbers in place of names, or names in place of numbers. No communication."""
        to_names = getattr(optim_state_key_type, "name", optim_state_key_type) == "PARAM_NAME"
        return torch_optim.rekeyed(optim_state_dict, to_names, model, optim, optim_input)


def _optim(model: nn.Module, optim: Any, optim_input: Any) -> Any:
    """The optimizer, or one that was built from `optim_input` (default: the model's parameters) as far as states go."""
    if optim is not None:
        return optim
    items = list(model.parameters() if optim_input is None else optim_input)
    return torch.optim.SGD(items, lr=0.0)
