"""`estimate`: the memory of a training step, found by running the engine and the step on tensors without memory.

What runs is the program itself: the model's forward, autograd's backward, the engine with its gathers, prefetches and
reductions, the optimizer, and saving. Only kernels, messages and files do nothing. So there is no formula here that
could disagree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from ..config import MixedPrecision
from ..errors import ConfigError
from . import kernels, padding, saving
from .allocator import reserved_bytes
from .ledger import BUFFERS, GRADIENTS, PARAMETERS, Ledger
from .models import Source, default_batch, source
from .observe import Watch, label_model, steps_in
from .report import Report, make
from .training import Optimizer, Trainer, make_optimizer
from .world import groups, no_memory, world

_VALUE = torch.ops.aten._local_scalar_dense.default  # what `.item()` and `bool()` come down to
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None, "no": None}


def estimate(
    model: Any,
    batch: Any,
    optimizer: Optimizer = "adamw",
    world_size: int = 8,
    *,
    device: str = "cuda",
    rank: int = 0,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    overrides: dict[str, Any] | None = None,
    deferred_init: bool = False,
    dtype: torch.dtype | None = None,
    accumulate: int = 1,
    steps: int = 2,
    save: str | None = "sharded",
    wrap: Callable[..., nn.Module] | None = None,
    **options: Any,
) -> Report:
    """Peak bytes of one rank of a training run, by category, phase and unit, without the memory and the ranks.

    Needs the memory of neither the model nor the activations: a 70 B model on 512 ranks takes minutes and some hundred
    MB.

    Args:
        model: a function that builds the model, "module:function", a preset ("llama-7b"), a `transformers`
            configuration, its file, or the name of its class.
        batch: one rank's micro-batch: tensors in a dict, tuple or alone (only shapes and dtypes matter), a function
            that makes them, or for presets and configurations (samples, tokens), or samples of images.
        optimizer: a function of the parameters, or a name: see `make_optimizer`.
        world_size: number of ranks.
        device: "cuda": what the engine does on GPUs (native collectives, foreach optimizers). "cpu": what it does on
            CPU ranks (point-to-point reductions without a buffer, up to 8 ranks).
        rank: which rank to look at.
        loss_fn: (model, batch) -> loss. None: the loss in the model's output, or the mean of the output.
        overrides: fields of a transformers configuration to change.
        deferred_init: as if the model were built on the meta device: its weights get memory unit by unit, when they are
            sharded. False: every rank builds it whole.
        dtype: default dtype while the model is built. None: torch's.
        accumulate: micro-batches per step, all but the last under `no_sync()`.
        steps: training steps to run; two reach the steady state.
        save: what is saved at the end, as the phase "save". "sharded": `save_checkpoint` of model and optimizer.
            "async": `async_save` of them, whose copy counts where the device is the host. "full":
            `full_state_dict(rank0_only=True)`. None: nothing.
        wrap: what to call in place of `shardkit.auto_wrap(model, **options)`.
        **options: of `shardkit.auto_wrap`. `device_mesh` may be the sizes (replicas, shards), `mixed_precision` a name
            ("bf16", "fp16").

    Returns:
        A `Report`. Live bytes are exact up to what operators allocate and free within themselves. What a caching
        allocator would reserve for them is in `report.extra["reserved_bytes"]`, by the rules in `allocator.py`; on
        "cuda" `report.extra["save_host_bytes"]` is what saving copies to host memory at a time.
        Attention counts as torch's flash kernel does: its result and one number per row, no matrix of scores.

    Raises:
        ConfigError: an argument that cannot work; a model whose control flow depends on the values of tensors.
        StateError: torch.distributed is initialised in this process.
    """
    if device not in ("cuda", "cpu"):
        raise ConfigError(f"device={device!r}: expected 'cuda' or 'cpu'. Sizes of GPUs are for `plan`.")
    gpu = device == "cuda"
    saving.check(save)
    origin, began = source(model, overrides), time.perf_counter()
    mesh = options.pop("device_mesh", None)
    _check_mesh(mesh, options)
    ledger = Ledger()
    watch = Watch(ledger, {_VALUE: _zero})
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(world_size, rank, "fake_nccl" if gpu else "fake_gloo"))
        if mesh is not None:
            options["process_group"] = groups(tuple(mesh))
        stack.enter_context(_sentences(origin.name))
        mode = stack.enter_context(no_memory())
        stack.enter_context(watch)
        wrapped = _build(ledger, origin, _checked(options), deferred_init, dtype, wrap)
        watch.answers[_VALUE] = functools.partial(_answer, ledger)
        stack.enter_context(padding.nothing_masked(mode))
        if gpu:
            _offload(ledger, watch, wrapped)
        else:
            watch.workspace = kernels.workspace
        trainer = Trainer(ledger, wrapped, make_optimizer(optimizer, wrapped, gpu), loss_fn, accumulate)
        trainer.run([_batch(origin, batch)] * steps)
        extra: dict[str, Any] = {}
        if save is not None and steps_in(wrapped):
            copied = saving.run(ledger, wrapped, trainer.optimizer, save, gpu)
            extra = {"save_host_bytes": copied} if gpu else {}
        ledger.close()
    about = dict(
        model=origin.name, world_size=world_size, rank=rank, device=device, optimizer=_name(optimizer), mesh=mesh,
        accumulate=accumulate, deferred_init=deferred_init or None, save=save,
    )  # fmt: skip
    extra |= dict(operators=watch.operators, seconds=time.perf_counter() - began)
    report = _report(ledger, wrapped, gpu, about, options, extra)
    del trainer, wrapped, ledger, watch
    gc.collect()  # modules, units and hooks refer to each other; the next estimate should not have to carry them
    return report


def _check_mesh(mesh: Any, options: dict[str, Any]) -> None:
    hybrid = str(options.get("sharding_strategy", "")).startswith("hybrid")
    if hybrid and mesh is None and "process_group" not in options:
        raise ConfigError(
            "a hybrid strategy needs device_mesh=(replicas, shards) (on the command line, --mesh) here: a simulation "
            "has no machines to ask."
        )


def _report(ledger: Ledger, model: nn.Module, gpu: bool, about: dict, options, more: dict[str, Any]) -> Report:
    about["torch"] = torch.__version__
    about["options"] = {k: _name(v) for k, v in options.items() if k != "process_group"}
    parameters, sent = _facts(model)
    extra: dict[str, Any] = dict(parameters=parameters, sent_bytes=sent, **more)
    if gpu:
        extra["reserved_bytes"] = reserved_bytes(ledger)
    return make(ledger, "predicted", about, extra)


def _build(ledger: Ledger, origin: Source, options: dict[str, Any], deferred: bool, dtype, wrap) -> nn.Module:
    from ..api import auto_wrap

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        # Deferred: weights get memory when their unit is sharded, which is when the ledger first meets them.
        ledger.open = not deferred
        model = origin.make()
        ledger.open = True
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{origin.name} returned a {type(model).__name__}; expected an nn.Module.")
    finally:
        torch.set_default_dtype(before)
    if not deferred:
        ledger.label(model.parameters(), PARAMETERS)
        ledger.label(model.buffers(), BUFFERS)
    model.train()
    if wrap is None:
        options = {"device_id": "cpu", **options}  # else offloaded models go to the GPU, where there is one
    with ledger.allocating(PARAMETERS):
        wrapped = (wrap or auto_wrap)(model, **options)
    label_model(ledger, wrapped)
    return wrapped


def _batch(origin: Source, batch: Any) -> Any:
    if callable(batch):
        return batch()
    if isinstance(batch, int):
        return default_batch(origin, batch, None)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(n, int) for n in batch):
        return default_batch(origin, *batch)
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    made = [torch.empty(t.shape, dtype=t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves]
    return torch.utils._pytree.tree_unflatten(made, spec)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    mp = options.get("mixed_precision")
    if isinstance(mp, str):
        if mp not in _DTYPES:
            raise ConfigError(f"mixed_precision={mp!r} is not known. Use one of {', '.join(_DTYPES)}.")
        low = _DTYPES[mp]
        options["mixed_precision"] = MixedPrecision(param_dtype=low) if low is not None else None
    return options


def _facts(model: nn.Module) -> tuple[int, int]:
    from ..describe import describe

    if not steps_in(model):
        return sum(p.numel() for p in model.parameters()), 0
    rows = describe(model).rows
    return sum(row.parameters for row in rows), sum(row.sent_bytes for row in rows)


def _name(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if dataclasses.is_dataclass(value):
        changed = {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default
        }
        return f"{type(value).__name__}({', '.join(f'{k}={v}' for k, v in changed.items())})"
    return getattr(value, "__name__", repr(value))


def _zero(t: torch.Tensor) -> Any:
    """The value of a tensor while a model is built: initialisers ask whether they are done, or read a schedule off a
    tensor. Sizes never depend on it."""
    return 0.0 if t.dtype.is_floating_point else t.dtype != torch.bool and 0


def _offload(ledger: Ledger, watch: Watch, model: nn.Module) -> None:
    """Where the engine keeps memory on the host, which here has the same device as the rest."""
    chosen = [step.options for step in steps_in(model)]
    if any(o.cpu_offload is not None for o in chosen):
        ledger.host_labels = (GRADIENTS,)
        ledger.host_phases = ("init", "step")
        ledger.to_host(PARAMETERS)
    recomputed = [o.activation_checkpointing for o in chosen if o.activation_checkpointing is not None]
    watch.host_copies = any(o.activation_offload is not None for o in chosen) or any(
        c.offload_to_cpu for c in recomputed
    )


def _answer(ledger: Ledger, t: torch.Tensor) -> Any:
    """The value of a tensor during training: of learning rates that an optimizer computes, as Adafactor does, and of
    masks. Other questions have none."""
    if ledger.visits[-1].phase == "step" and t.dtype.is_floating_point:
        return 1.0
    return padding.answer(t)


@contextlib.contextmanager
def _sentences(name: str) -> Iterator[None]:
    """Turns what fake tensors raise where a value is asked for into a ConfigError that says what to do."""
    from torch._subclasses import fake_tensor

    asked = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )
    try:
        yield
    except asked as e:
        raise ConfigError(
            f"{name} asks for the values of tensors ({_where(e)}: {e}), and a simulation has shapes only. Let it take "
            "one branch while it is simulated (pass a function that builds it so), or measure a run with "
            "shardkit.profile."
        ) from e


def _where(e: BaseException) -> str:
    """The innermost line that belongs neither to torch nor to shardkit."""
    place, trace = "in the model", e.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/shardkit/" not in file:
            place = f"{file.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
