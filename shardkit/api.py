"""The two ways in: `auto_wrap(model)`, and `FullyShardedDataParallel(module)` for one unit at a time."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn as nn

from .activation import choose_blocks, offload_activations, wrap_blocks
from .checkpoint.huggingface import save_pretrained
from .checkpoint.torch_state import answer_optimizer_request
from .comm import make_mesh
from .config import ActivationCheckpointing, ActivationOffload, CPUOffload, Options
from .errors import ConfigError
from .runtime.build import build
from .runtime.join import join
from .runtime.managed import Managed, unit_of
from .runtime.step import Step
from .runtime.summon import summon
from .wrap import Policy, find_units, from_torch_policy

# FSDP1's arguments that need no counterpart: what they switch on is how shardkit always works.
_ALWAYS_SO = ("use_orig_params", "limit_all_gathers")
_FSDP1_STRATEGIES = {
    "FULL_SHARD": "full",
    "SHARD_GRAD_OP": "grad_op",
    "NO_SHARD": "none",
    "HYBRID_SHARD": "hybrid",
    "_HYBRID_SHARD_ZERO2": "hybrid_grad_op",
}


class FullyShardedDataParallel(Managed):
    """Shards one module's parameters, gradients and optimizer state over the ranks of a group.

    `FullyShardedDataParallel(module, process_group=None, **options)` makes `module` one unit and returns the *same
    object*, now of a class that is both its own and this one. Modules inside that were wrapped before stay units of
    their own; their parameters are gathered when they compute, this module's when it does.

    Args:
        module: any `nn.Module` on a CPU, an accelerator or the meta device; every rank the same.
        process_group: ranks to shard over, or a (shard group, replicate group) pair. None: all ranks.
        device_mesh: instead of `process_group`; 1-D to shard over, 2-D (replicate x shard) for a hybrid.
        ignored_modules, ignored_states: modules, and modules or parameters, that are left alone.
        auto_wrap_policy: also make units of modules inside, as `policy` of `auto_wrap`; FSDP1's policies work.
        **options: see `shardkit.config.Options`.

    Collective over the ranks concerned: they compare plans and weights, and open a host channel.

    Raises:
        ConfigError: what was asked for cannot work (wrapped already, a scripted module, no process group, ...).
        PlanMismatchError: on all ranks, where the ranks' models or initial weights differ.
    """

    def __new__(cls, module: nn.Module | None = None, process_group=None, **options):
        if cls is not FullyShardedDataParallel:  # a generated class making another instance, as copy.deepcopy does
            return super().__new__(cls)
        policy = from_torch_policy(options.pop("auto_wrap_policy", None))
        return _wrap(module, policy, process_group, options, single=policy is None)

    def __init__(self, *args, **kwargs):
        if (args and args[0] is self) or kwargs.get("module") is self:
            return  # Python initialises what __new__ returned; the module is initialised already
        super().__init__(*args, **kwargs)

    @property
    def _shardkit_step(self) -> Step:
        unit = unit_of(self)
        assert unit is not None
        return unit.step

    def no_sync(self):
        """Context in which backward communicates no gradients: they stay whole on this rank, and the next backward
        outside reduces the sum. Costs memory for whole gradients. Applies to the whole root this module is in."""
        return self._shardkit_step.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales this module's gradients so that their global norm is at most `max_norm`; returns the norm before.

        The same as `torch.nn.utils.clip_grad_norm_(module.parameters(), ...)`: one all-reduce over the shard group.
        """
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def summon_full_params(self, writeback: bool = True, recurse: bool = True):
        """Context in which this module's parameters are whole, on every rank. Collective at entry.

        `named_parameters()` yields the same objects with whole `.data`, in the master dtype; forwards compute with
        them. With `writeback`, each rank keeps its piece of what was changed. Backward is not possible inside.
        """
        return summon(self._shardkit_step, self, writeback, recurse)

    def join(self, *optimizers: torch.optim.Optimizer):
        """Context for loops in which ranks have different numbers of batches. A rank that leaves the loop early serves
        the others until all are there: zeros to their gradients (still divided by all ranks), and the same optimizer
        steps on its shards. Optimizers are noticed when they first step; pass those of ranks that may have no batch.

        Clipping and gradient scaling inside are refused once a rank has left.
        """
        return join(self._shardkit_step, optimizers)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if callable(getattr(cls, "save_pretrained", None)):
            cls.save_pretrained = _save_pretrained  # type: ignore[attr-defined]

    def named_parameters(self, *args, **kwargs):
        self._shardkit_step.settle()  # after a step that broke off, full parameters may still be in place
        answer_optimizer_request(self, sys._getframe(1))
        return super().named_parameters(*args, **kwargs)


def _save_pretrained(self, save_directory, *args, **kwargs):
    """See `checkpoint.huggingface.save_pretrained`. Collective, unless it is given a `state_dict`."""
    after = type(self).__mro__[type(self).__mro__.index(FullyShardedDataParallel) + 1 :]
    method = next(c.__dict__["save_pretrained"] for c in after if "save_pretrained" in c.__dict__)
    return save_pretrained(self, method.__get__(self), save_directory, *args, **kwargs)


def auto_wrap(model: nn.Module, *, policy: Policy = "auto", **options: Any) -> nn.Module:
    """Shards a whole model: its blocks become units, and so does what is left over. Returns the same object.

    Args:
        model: as `module` of `FullyShardedDataParallel`.
        policy: which modules become units. "auto": the repeated blocks, large embeddings and heads; or a set of
            classes, a predicate `module -> bool`, or `shardkit.size_policy(n)`.
        **options: as for `FullyShardedDataParallel`. `activation_checkpointing` may also be True (the repeated blocks,
            here; the module itself, there), a fraction of the blocks, a set of classes or a predicate;
            `activation_offload` may be True.

    Collectives, ranks and errors are those of `FullyShardedDataParallel`.
    """
    return _wrap(model, policy, options.pop("process_group", None), options)


def _wrap(
    module: Any,
    policy: Policy,
    process_group,
    options: dict[str, Any],
    single: bool = False,
    mixin: type = FullyShardedDataParallel,
) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ConfigError(f"expected an nn.Module to shard, got {type(module).__name__}.")
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} is not initialised yet (a lazy module). Run one forward before wrapping.")
    mesh_arg = options.pop("device_mesh", None)
    ignored = options.pop("ignored_modules", None), options.pop("ignored_states", None)
    ignored_modules, ignored_params = _ignored(*ignored)
    checked = _options(options)
    nested = find_units(module, policy, ignored_modules)
    recomputed = choose_blocks(module, checked.activation_checkpointing, None if single else nested, ignored_modules)
    existing = {m for m in module.modules() for inner in [unit_of(m)] if inner is not None}
    nested = [(name, m) for name, m in nested if m not in existing]
    mesh = make_mesh(
        process_group,
        mesh_arg,
        shard=checked.strategy.shard,
        mesh2d=checked.strategy.mesh2d,
        check_order=checked.check_order,
        near=checked.near,
    )
    build(module, nested, mesh, checked, ignored_modules, ignored_params, mixin)
    wrap_blocks(recomputed, checked.activation_checkpointing)
    if checked.activation_offload is not None:
        offload_activations(module, checked.activation_offload)
    return module


def _options(options: dict[str, Any]) -> Options:
    for name in _ALWAYS_SO:
        options.pop(name, None)
    given = options.get("sharding_strategy")
    strategy = getattr(given, "name", given)  # FSDP1's enumeration, or its spelling
    if isinstance(strategy, str):
        options["sharding_strategy"] = _FSDP1_STRATEGIES.get(strategy.upper(), strategy)
    offload = options.get("cpu_offload")
    if isinstance(offload, bool):
        options["cpu_offload"] = CPUOffload() if offload else None
    where = options.get("activation_checkpointing")
    if where is not None and not isinstance(where, ActivationCheckpointing):
        options["activation_checkpointing"] = None if where is False else ActivationCheckpointing(where=where)
    if isinstance(options.get("activation_offload"), bool):
        options["activation_offload"] = ActivationOffload() if options["activation_offload"] else None
    device = options.get("device_id")
    if device is not None and not isinstance(device, torch.device):
        options["device_id"] = torch.device(device)
    if "forward_methods" in options:
        options["forward_methods"] = tuple(options["forward_methods"])
    known = Options.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}. Known ones: {', '.join(known)}, and those of the signature.")
    return Options(**options)


def _ignored(modules, states) -> tuple[set[nn.Module], set[nn.Parameter]]:
    given = [*(modules or ()), *(states or ())]
    for item in given:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise ConfigError(
                f"ignored_modules or ignored_states holds a {type(item).__name__}; expected modules or parameters."
            )
    roots = [item for item in given if isinstance(item, nn.Module)]
    return {m for root in roots for m in root.modules()}, {p for p in given if isinstance(p, nn.Parameter)}

