"""What a user may choose: frozen, keyword-only values, checked once, read by the engine.

Nothing here reads the environment or touches torch.distributed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn as nn

from .errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Which dtype is used where. `None` always means "leave as it is".

    The local shards and the optimizer keep the parameters' own dtype (the master dtype); the shard is cast once,
    before the gather, so that what travels and what computes is `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    """dtype of the gathered parameters. None: the parameter's own dtype."""
    master_dtype: torch.dtype | None = None
    """dtype of the local shards of trainable floating-point parameters. None: float32 for 16-bit parameters where
    `param_dtype` is a 16-bit type or the whole model is; others keep their own."""
    reduce_dtype: torch.dtype | None = None
    """dtype that gradients travel in. None: float32 where `param_dtype` is a 16-bit type, else the gradient's own.
    A 16-bit wire is summed in float32 on gloo groups of up to eight ranks, and averaged by the backend elsewhere."""
    buffer_dtype: torch.dtype | None = None
    """dtype that floating-point buffers are cast to when wrapping. None: buffers are not touched."""
    output_dtype: torch.dtype | None = None
    """dtype that floating-point outputs of the outermost unit are cast to. None: outputs are not touched."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of every unit to `param_dtype`."""
    keep_fp32: tuple[type[nn.Module] | str, ...] = ()
    """Module classes, or parts of parameter names, that keep computing in their own dtype inside a low-precision unit.
    Batch normalisation always does: its running statistics would otherwise drift."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """Keep the local shards, and with them gradients and optimizer state, in host memory."""

    pin_memory: bool = True
    """Pin the host shards, so that copies overlap with computation. Has no effect on a machine without a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Which modules compute their activations again in backward instead of keeping them, and how."""

    where: Any = True
    """True: the repeated blocks. A fraction in (0, 1]: that share of them, evenly spread. Or a set of module classes,
    or a predicate `module -> bool`."""
    use_reentrant: bool = False
    """torch's reentrant kind, which records no graph in forward."""
    offload_to_cpu: bool = False
    """Keep the inputs, which are all that is kept, in host memory."""
    preserve_rng_state: bool = True
    """Draw the same random numbers again. False: skip the bookkeeping, for models without dropout."""
    policy: Any = None
    """Operators whose results are kept after all, or torch's function `(context, operator, ...) -> CheckpointPolicy`.
    None: nothing is kept."""
    determinism_check: str = "default"
    """"default": compare shapes, dtypes and devices with forward. "none": do not."""
    early_stop: bool = True
    """Stop recomputing with the last tensor that backward needs."""

    def __post_init__(self):
        where, policy = self.where, self.policy
        if isinstance(where, (int, float)) and not 0 < where <= 1:
            raise ConfigError(f"activation_checkpointing={where!r}: a fraction is above 0 and at most 1.")
        if isinstance(where, Collection) and not isinstance(where, str):
            if not where or not all(isinstance(c, type) and issubclass(c, nn.Module) for c in where):
                raise ConfigError(f"activation_checkpointing={where!r}: a collection must hold module classes.")
        elif not (isinstance(where, (int, float)) or callable(where)) or isinstance(where, (type, nn.Module)):
            raise ConfigError(
                f"activation_checkpointing={where!r}: use True, a fraction in (0, 1], a set of module classes, a "
                "predicate(module) -> bool or shardkit.ActivationCheckpointing(...)."
            )
        if policy is None:
            return
        if self.use_reentrant:
            raise ConfigError("use_reentrant=True and policy=: torch's reentrant checkpoint keeps no single operators.")
        if not callable(policy):
            object.__setattr__(self, "policy", tuple(policy))
            for op in self.policy:
                if not isinstance(op, torch._ops.OpOverload):
                    raise ConfigError(
                        f"policy holds {op!r}. Use overloads of operators, such as torch.ops.aten.mm.default."
                    )

    def __getstate__(self):
        ops = [str(op) for op in self.policy] if isinstance(self.policy, tuple) else None  # operators are not picklable
        return {**self.__dict__, "policy": self.policy if ops is None else None, "ops": ops}

    def __setstate__(self, state):
        ops = state.pop("ops")
        if ops is not None:
            state["policy"] = tuple(functools.reduce(getattr, name.split("."), torch.ops) for name in ops)
        self.__dict__.update(state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Keep what autograd saves in forward in host memory. Weights are not concerned: they are gathered again."""

    min_bytes: int = 1 << 16
    """Smaller tensors stay on the device: they are not worth a copy."""
    pin_memory: bool = True
    """Pin the host memory, so that copies overlap with computation. Has no effect on a machine without a GPU."""


class Strategy:
    """What is dropped when. One instance per name in `STRATEGIES`; see the table in docs/design.md."""

    def __init__(self, name: str, *, after_forward: bool, after_backward: bool, shard=True, mesh2d=False):
        self.name = name
        self.drop_after_forward = after_forward
        self.drop_after_backward = after_backward
        self.shard = shard
        self.mesh2d = mesh2d

    def __repr__(self) -> str:
        return f"Strategy({self.name!r})"


STRATEGIES = {
    s.name: s
    for s in (
        Strategy("full", after_forward=True, after_backward=True),
        Strategy("grad_op", after_forward=False, after_backward=True),
        Strategy("zero2", after_forward=False, after_backward=False),
        Strategy("zero1", after_forward=False, after_backward=False),
        Strategy("none", after_forward=False, after_backward=False, shard=False),
        Strategy("hybrid", after_forward=True, after_backward=True, mesh2d=True),
        Strategy("hybrid_grad_op", after_forward=False, after_backward=True, mesh2d=True),
    )
}


_KINDS: dict[str, type] = {
    "mixed_precision": MixedPrecision,
    "cpu_offload": CPUOffload,
    "activation_checkpointing": ActivationCheckpointing,
    "activation_offload": ActivationOffload,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one wrapping, after checking. Spelled as FSDP1 spells them where it has them."""

    sharding_strategy: str = "full"
    """One of `STRATEGIES`."""
    reshard_after_forward: bool | int | None = None
    """Drop full parameters after forward. A whole number n: split them over n neighbouring ranks instead, so that
    backward gathers among these (ZeRO++'s hierarchical partitioning). None: what the strategy says."""
    mixed_precision: MixedPrecision | None = None
    """None: everything stays in the dtype it has."""
    cpu_offload: CPUOffload | None = None
    """None: shards live on the compute device."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Which modules recompute their activations. None: those that do so already."""
    activation_offload: ActivationOffload | None = None
    """None: activations stay on the compute device."""
    sync_module_states: bool | str = False
    """Broadcast parameters and buffers from the first rank while wrapping. False: verify that ranks agree.
    "differing": broadcast what is on the meta device on some rank, and parameters of which a sample of 8192 elements
    differs; weights that all ranks have mapped from one file are then read where a rank's own piece lies."""
    param_init_fn: Callable[[nn.Module], Any] | None = None
    """Initialises one module whose parameters were on the meta device, after they were allocated.
    None: the module's own `reset_parameters()`."""
    device_id: torch.device | None = None
    """Device that computes. None: the parameters' device, or the current accelerator for CPU parameters of a
    model that is trained with an accelerator's process group."""
    forward_methods: tuple[str, ...] = ()
    """Further methods of the wrapped module during which its own parameters are full."""
    forward_prefetch: bool = True
    """Start the next unit's gather while this unit computes forward."""
    backward_prefetch: bool = True
    """Start the previous unit's gather while this unit computes backward."""
    check_order: bool = True
    """Agree on the order of collectives, so that ranks that take different branches still train right.
    False: trust that all ranks run the same units in the same order (saves two small host messages a step)."""

    def __post_init__(self):
        if self.sharding_strategy not in STRATEGIES:
            raise ConfigError(
                f"sharding_strategy={self.sharding_strategy!r} is not known. Use one of {', '.join(STRATEGIES)}."
            )
        if self.sync_module_states not in (True, False, "differing"):
            raise ConfigError(f"sync_module_states={self.sync_module_states!r}: use True, False or 'differing'.")
        strategy = STRATEGIES[self.sharding_strategy]
        if self.reshard_after_forward and not strategy.drop_after_backward:
            raise ConfigError(
                f"reshard_after_forward=True contradicts sharding_strategy={self.sharding_strategy!r}, which keeps "
                "full parameters between steps. Use 'full' or 'hybrid', or leave reshard_after_forward at None."
            )
        if not isinstance(self.reshard_after_forward, (bool, int, type(None))) or self.near < 0:
            raise ConfigError(
                f"reshard_after_forward={self.reshard_after_forward!r}: expected True, False, None or a number of "
                "ranks."
            )
        for field, kind in _KINDS.items():
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{field}={value!r}: expected shardkit.{kind.__name__}(...) or None.")
        if self.cpu_offload and not strategy.drop_after_backward:
            raise ConfigError(
                f"cpu_offload contradicts sharding_strategy={self.sharding_strategy!r}, which keeps full parameters on "
                "the device between steps. Use 'full', 'grad_op' or a hybrid of them."
            )

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.sharding_strategy]

    @property
    def near(self) -> int:
        """Number of neighbouring ranks that keep full parameters between forward and backward; 0: no such group."""
        chosen = self.reshard_after_forward
        return 0 if chosen is None or isinstance(chosen, bool) else chosen

    @property
    def drop_after_forward(self) -> bool:
        chosen = self.reshard_after_forward
        return self.strategy.drop_after_forward if chosen is None else bool(chosen)
