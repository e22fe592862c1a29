"""Activation checkpointing and offload: `checkpoint_wrapper`, and what `activation_checkpointing=` and
`activation_offload=` do.

Both change a module in place, as wrapping does: the same object, its class a generated subclass under the old name, so
that parameter names get no prefix. torch.utils.checkpoint does the work of a checkpoint, either kind; added here:

- whatever the order of wrapping, a unit gathers outside of its checkpoint: a block is gathered twice a step (forward,
  backward), not a third time to recompute, and the engine's own operators stay out of a selective checkpoint
- tensors in keyword arguments and nested structures are inputs like positional ones: kept once, version-checked,
  offloaded if asked. Outputs of any structure keep it, and their gradients, in the reentrant kind as well
- running statistics of normalisation layers are updated by the forward and not again by the recomputation

Offload is done by runtime/saved_offload.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .config import ActivationCheckpointing, ActivationOffload
from .errors import ConfigError
from .runtime.managed import _generate, unit_of
from .runtime.saved_offload import to_host
from .runtime.unit import Unit, in_backward
from .wrap import find_units

_CHECKPOINT, _OFFLOAD = "_shardkit_checkpoint", "_shardkit_offload"  # where a module keeps its settings
_MAX_DEPTH = 6  # of containers in inputs and outputs, as runtime/precision.py looks into them
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
_generated: dict[tuple[type, type], type] = {}


def checkpoint_wrapper(
    module: nn.Module,
    *,
    use_reentrant: bool = False,
    offload_to_cpu: bool = False,
    preserve_rng_state: bool = True,
    policy: Callable | Iterable | None = None,
    determinism_check: str = "default",
    early_stop: bool = True,
) -> nn.Module:
    """Makes calls of `module` keep their inputs alone, and compute again in backward what backward needs.

    Returns the same object; a second time, it changes the settings. Before or after sharding, on units, parts of units
    and modules around units. No collectives; with sharding, every rank must do the same. A call without grad mode is an
    ordinary one, and so is `module.forward(...)`. Hooks on `module` run again in the recomputation.

    Args:
        module: any `nn.Module`; its forward must compute the same when run again.
        use_reentrant: torch's reentrant kind. It runs forward without a graph; outputs require grad even where they
            were detached inside, and `torch.autograd.grad` is not supported.
        offload_to_cpu: keep the inputs in host memory.
        preserve_rng_state: the recomputation draws the same random numbers (dropout). False saves the bookkeeping.
        policy: operators whose results are kept (`torch.ops.aten.mm.default`, ...), or torch's policy function
            `(context, operator, *args, **kwargs) -> CheckpointPolicy`. Not for the reentrant kind.
        determinism_check, early_stop: as for `torch.utils.checkpoint.checkpoint`. Not for the reentrant kind.

    Raises:
        ConfigError: a contradiction among the arguments, or `module` is no module or a scripted one.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"checkpoint_wrapper takes an nn.Module that is not scripted, got {type(module).__name__}.")
    config = ActivationCheckpointing(
        use_reentrant=use_reentrant, offload_to_cpu=offload_to_cpu, preserve_rng_state=preserve_rng_state,
        policy=policy, determinism_check=determinism_check, early_stop=early_stop,
    )  # fmt: skip
    return _become(module, Checkpointed, _CHECKPOINT, config)


def _become(module: nn.Module, mixin: type, key: str, config: object) -> nn.Module:
    module.__dict__[key] = config
    if not isinstance(module, mixin):
        module.__class__ = _with(type(module), mixin)
    return module


def _with(cls: type, mixin: type) -> type:
    if (cls, mixin) not in _generated:
        _generated[cls, mixin] = _generate(cls, mixin, ())
    return _generated[cls, mixin]


class Checkpointed(nn.Module):
    """Mixin of a module whose calls are checkpointed."""

    def __call__(self, *args, **kwargs):
        call = super().__call__
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        unit = unit_of(self)
        if unit is None or unit.active:
            return _checkpointed(self, call, args, kwargs)
        return unit.call(self, lambda *a, **k: _checkpointed(self, call, a, k), args, kwargs, "__call__")

    def __reduce_ex__(self, protocol):
        # The generated class is found under no name, so what is pickled is the class before and the mixin's work.
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        base = next(c for c in type(self).__mro__[1:] if c is not Checkpointed)
        return _remade, (base, make, tuple(base if a is type(self) else a for a in args)), *rest


def _remade(base: type, make: Callable, args: tuple) -> nn.Module:
    module = make(*args)
    module.__class__ = _with(base, Checkpointed)
    return module


@torch._disable_dynamo  # as torch's checkpoint itself, whose other way, tracing into it, knows no contexts like ours
def _checkpointed(module: nn.Module, call: Callable, args: tuple, kwargs: dict):
    """`call(*args, **kwargs)` under a checkpoint. The units around are active."""
    config: ActivationCheckpointing = module.__dict__[_CHECKPOINT]
    tensors, skeleton = _take_out((args, kwargs))
    units = dict.fromkeys(u for m in module.modules() for u in [unit_of(m)] if u is not None)
    recomputation = _Recomputation(module, [u for u in units if u.active])
    first: list = [(args, kwargs)]  # the forward gets what was passed, so that it may change it; later runs a copy
    offload: Any = contextlib.nullcontext()
    if config.offload_to_cpu:
        offload = to_host(next(iter(units)).step if units else None, ActivationOffload(min_bytes=0))

    if not config.use_reentrant:

        def run(*tensors):
            args, kwargs = first.pop() if first else _put_back(skeleton, tensors)
            return call(*args, **kwargs)

        def contexts():
            if config.policy is None:
                return contextlib.nullcontext(), recomputation
            ops = config.policy if callable(config.policy) else list(config.policy)
            in_forward, recomputation.mode = create_selective_checkpoint_contexts(ops)
            return in_forward, recomputation

        with offload:
            return checkpoint(
                run, *tensors, use_reentrant=False, preserve_rng_state=config.preserve_rng_state, context_fn=contexts,
                determinism_check=config.determinism_check, early_stop=config.early_stop,
            )  # fmt: skip

    if not any(t.requires_grad for t in (*tensors, *module.parameters())):
        return call(*args, **kwargs)  # torch's reentrant kind would claim that the outputs require grad
    structure: list = []

    def run_whole(_, *tensors):
        if first:
            args, kwargs = first.pop()
            out = call(*args, **kwargs)
            structure.append(out)
        else:
            with recomputation:
                args, kwargs = _put_back(skeleton, tensors)
                out = call(*args, **kwargs)
        return tuple(_distinct_tensors(out).values())

    anchor = torch.empty(0, requires_grad=True)  # torch wants an input that requires grad, even if only weights do
    with offload:
        rng = config.preserve_rng_state
        results = checkpoint(run_whole, anchor, *tensors, use_reentrant=True, preserve_rng_state=rng)
    out = structure.pop()
    differentiable = dict(zip(_distinct_tensors(out), results, strict=True))
    return _replaced(out, lambda t, _: differentiable[id(t)])


class _Recomputation:
    """Context of a recomputation: units around have their full parameters in place, running statistics are set aside.
    Entered once per backward, before the dispatch mode of a selective checkpoint."""

    mode: Any = contextlib.nullcontext()

    def __init__(self, module: nn.Module, units: list[Unit]):
        self.module, self.units = module, units

    def __enter__(self):
        inside = list(self.module.modules())
        looks_up = any(isinstance(m, _LOOKUPS) for m in inside)
        with contextlib.ExitStack() as stack:
            for unit in self.units if in_backward() else ():
                # Rows that are looked up again need a gather that backward itself does without. Active, so that the
                # calls inside go straight through, and save weights through the checkpoint as they did in forward.
                unit.call(unit.module if looks_up else self.module, _nothing, (), {}, "recomputation")
                unit.active += 1
                stack.callback(_deactivate, unit)
            for norm in inside:
                if isinstance(norm, _NormBase) and norm.training and norm.track_running_stats:
                    stack.callback(norm._buffers.update, dict(norm._buffers))
                    with torch.no_grad():
                        norm._buffers.update({k: b if b is None else b.clone() for k, b in norm._buffers.items()})
            stack.enter_context(self.mode)
            self._stack = stack.pop_all()

    def __exit__(self, *error):
        return self._stack.__exit__(*error)


def _deactivate(unit: Unit) -> None:
    unit.active -= 1


def _nothing() -> None:
    pass


# --------------------------------------------------------------------------------------------- inputs and outputs


def _replaced(value: Any, change: Callable[[torch.Tensor, bool], Any], depth: int = 0, inside: bool = False) -> Any:
    """`value` with every tensor t replaced by `change(t, inside)`; containers on the way are copied where something
    changed. `inside`: t is an attribute of an object that is no dataclass, tuple, list or mapping."""
    if isinstance(value, torch.Tensor):
        return change(value, inside)
    if depth > _MAX_DEPTH or isinstance(value, (nn.Module, type, str)):
        return value
    if isinstance(value, (tuple, list)):
        items = [_replaced(v, change, depth + 1, inside) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # namedtuples take arguments
    mapping = isinstance(value, Mapping)
    if mapping:
        old = value
    elif dataclasses.is_dataclass(value):
        old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif hasattr(value, "__dict__") and not callable(value):
        old, inside = vars(value), True
    else:
        return value
    new = {k: _replaced(v, change, depth + 1, inside) for k, v in old.items()}
    if all(new[k] is v for k, v in old.items()):
        return value
    out = copy.copy(value)
    for k, v in new.items():
        if mapping:
            out[k] = v
        else:
            object.__setattr__(out, k, v)  # also of frozen dataclasses
    return out


def _take_out(value: Any) -> tuple[list[torch.Tensor], Any]:
    """The distinct tensors in `value`, and `value` with a placeholder for each. An object's attributes are taken only
    if they require grad: other objects (caches, say) must stay the ones that they are."""
    tensors: list[torch.Tensor] = []
    placeholders: dict[int, torch.Tensor] = {}

    def take(t: torch.Tensor, inside: bool) -> torch.Tensor:
        if inside and not t.requires_grad:
            return t
        if id(t) not in placeholders:
            placeholders[id(t)] = torch.empty(0)
            tensors.append(t)
        return placeholders[id(t)]

    structure = _replaced(value, take)
    return tensors, (structure, [id(p) for p in placeholders.values()], list(placeholders.values()))


def _put_back(skeleton: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    structure, ids, _ = skeleton
    values = dict(zip(ids, tensors, strict=True))
    return _replaced(structure, lambda t, _: values.get(id(t), t))


def _distinct_tensors(value: Any) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}

    def see(t: torch.Tensor, _) -> torch.Tensor:
        found.setdefault(id(t), t)
        return t

    _replaced(value, see)
    return found


# ------------------------------------------------------------------------------------------------- which modules


def choose_blocks(
    model: nn.Module,
    config: ActivationCheckpointing | None,
    units: list[tuple[str, nn.Module]] | None,
    ignored: Collection[nn.Module] = (),
) -> list[nn.Module]:
    """The modules that `activation_checkpointing=` means, except those that are Checkpointed already. Changes nothing.

    True: the blocks, which are the `units` ((name, module) pairs) with modules of their own inside whose class is
    repeated, or what "auto" would find where no unit is such a one. A fraction: that share of the blocks, evenly
    spread. A set of classes or a predicate: what matches below `model`. `units=None` stands for a single unit: True is
    `model` itself.

    Raises ConfigError where nothing is selected, or is checkpointed by other means already.
    """
    if config is None:
        return []
    where = config.where
    if isinstance(where, (int, float)):
        if units is None:
            if where != 1:
                raise ConfigError(f"activation_checkpointing={where!r} needs blocks to choose from. Use auto_wrap.")
            chosen = [model]
        else:
            blocks = _blocks(units) or _blocks(find_units(model, "auto", ignored))
            n = len(blocks)
            k = max(1, round(where * n))
            # The first of each stretch: what the last block keeps is used at once, so that is the one to leave out.
            chosen = [b for i, b in enumerate(blocks) if math.ceil(i * k / n) < math.ceil((i + 1) * k / n)]
    else:
        matches: Callable = where if callable(where) else lambda m: isinstance(m, tuple(where))
        left_alone = {m for root in ignored for m in root.modules()} | {model}
        chosen = [m for m in model.modules() if m not in left_alone and matches(m)]
    if not chosen:
        raise ConfigError(
            f"activation_checkpointing={where!r} selects no module of {type(model).__name__}. Pass the class of its "
            "blocks, as activation_checkpointing={Block}, or a predicate(module) -> bool."
        )
    for block in chosen:
        for m in block.modules():
            if getattr(m, "gradient_checkpointing", False) is True:
                raise ConfigError(
                    f"activation_checkpointing and gradient_checkpointing_enable() would both recompute "
                    f"{type(m).__name__}. Use one of them."
                )
    return [m for m in chosen if not isinstance(m, Checkpointed)]


def wrap_blocks(blocks: list[nn.Module], config: ActivationCheckpointing | None) -> None:
    """Checkpoints what `choose_blocks` chose."""
    for block in blocks:
        _become(block, Checkpointed, _CHECKPOINT, config)


def _blocks(units: list[tuple[str, nn.Module]]) -> list[nn.Module]:
    inner = [m for _, m in units if any(True for child in m.children() for _ in child.parameters())]
    count = Counter(_kind(m) for m in inner)
    return [m for m in inner if count[_kind(m)] > 1] or inner


def _kind(module: nn.Module) -> tuple[str, str]:
    """The class by name, which is the same before and after checkpointing and sharding."""
    return type(module).__module__, type(module).__qualname__


# -------------------------------------------------------------------------------------------------------- offload


def offload_activations(module: nn.Module, config: ActivationOffload) -> None:
    """Makes calls of a sharded `module` keep in host memory what autograd saves in them."""
    _become(module, Offloaded, _OFFLOAD, config)


class Offloaded(nn.Module):
    """Mixin of a sharded module whose saved activations go to the host."""

    def __call__(self, *args, **kwargs):
        unit = unit_of(self)
        assert unit is not None
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with to_host(unit.step, self.__dict__[_OFFLOAD]):
            return super().__call__(*args, **kwargs)
