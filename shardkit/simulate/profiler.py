"""The same book for a run that really happens: `profile(model)` measures while it trains, `explain_oom` reads it after
a failure."""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import ConfigError, StateError
from ..runtime.unit import in_backward
from .ledger import ACTIVATIONS, FULL, GRADIENTS, OPTIMIZER, PARAMETERS, PHASES, REDUCTION, TEMPORARIES, Ledger
from .observe import Observer, Watch, steps_in
from .report import Moment, Report, make, moment, size

_current: weakref.ref[profile] | None = None  # the profile that was entered last, for explain_oom


class profile(contextlib.AbstractContextManager):  # noqa: N801 - used like torch.profiler.profile
    """Measures the memory of training steps by category, phase and unit, and reports it as `estimate` does.

        with shardkit.profile(model, optim) as prof:
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                optim.step()
                optim.zero_grad()
        print(prof.report)

    Phases are recognised by themselves: a forward begins when the model is called, backward when autograd runs, the
    step when the optimizer steps. On every rank the same, or on some; no communication.

    Live bytes are those of tensors' storages, on the device of the model's parameters. Memory from before counts where
    it is the model's, its gradients' and the optimizer's. On CUDA `report.extra` also has the allocator's peak of
    allocated and of reserved bytes since the context began. It costs time for every operator: profile a few steps.

    Args:
        model: a model that `auto_wrap` made, or any other (then without units). It may be sharded or moved until the
            context is entered, as by a Trainer or `accelerator.prepare`.
        optimizers: whose state is told apart from other memory. Those that step inside are noticed.
        device: kind of device whose memory counts. None: that of the model's parameters.
    """

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, device: str | None = None):
        self.model, self.optimizers = model, list(optimizers)
        self._asked = device
        self.ledger = Ledger()
        self._watch = Watch(self.ledger, in_backward=self._backward_begins)
        self._observer = Observer(self.ledger, model)
        self._hooks: list[Any] = []
        self._step = 0
        self._report: Report | None = None

    # ------------------------------------------------------------------------------------------------- a context

    def __enter__(self) -> profile:
        global _current
        if self._hooks or not self.ledger.open:
            raise StateError("this profile has been used. Make a new one: shardkit.profile(model).")
        # Now, not before: a Trainer moves and shards the model after its callbacks are made.
        self.device = self._asked or next((p.device.type for p in self.model.parameters()), "cpu")
        self.ledger.devices = (self.device,)
        self._observer = Observer(self.ledger, self.model)
        for step in self._observer.steps:
            step.check_idle("shardkit.profile()")
        self._began = time.perf_counter()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._observer.attach()
        self.ledger.label((p.grad for p in self.model.parameters() if p.grad is not None), GRADIENTS)
        self._observer.label_optimizer(*self.optimizers)
        self._hooks += [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        if self._observer.steps:
            self._observer.before_forward(self._forward_begins)
        else:
            self._hooks.append(self.model.register_forward_pre_hook(self._forward_begins))
        self._watch.__enter__()
        _current = weakref.ref(self)
        return self

    def __exit__(self, *error) -> None:
        self._watch.__exit__(*error)
        self._observer.detach()
        for hook in self._hooks:
            hook.remove()
        self.ledger.close()
        self._seconds = time.perf_counter() - self._began
        if self.device == "cuda":
            self._allocated, self._reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    # --------------------------------------------------------------------------------------------------- phases

    def _forward_begins(self, *_) -> None:
        # Recomputation is backward's; and a forward goes on until backward begins, with the loss, or with another
        # model.
        if not in_backward() and self.ledger.visits[-1].phase != "forward":
            self.ledger.begin("forward", self._step)

    def _backward_begins(self) -> None:
        if self.ledger.visits[-1].phase == "forward":
            self.ledger.begin("backward", self._step)

    def _step_begins(self, optimizer, args, kwargs) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        if not self._observer.steps:  # the engine says which gradients are whose
            self.ledger.label((p.grad for p in self.model.parameters() if p.grad is not None), GRADIENTS)
        self.ledger.unit = ""
        self.ledger.begin("step", self._step)

    def _step_ends(self, optimizer, args, kwargs) -> None:
        self._observer.label_optimizer(optimizer)
        self._step += 1

    @contextlib.contextmanager
    def phase(self, name: str = "save"):
        """Context that counts as a phase of its own, which cannot be recognised:

            with prof.phase("save"):
                shardkit.save_checkpoint(path, model, optim)

        Raises ConfigError for another name than those of `ledger.PHASES`, StateError outside of the profile.
        """
        if name not in PHASES:
            raise ConfigError(f"phase {name!r} is not known. Use one of {', '.join(PHASES)}.")
        if not self._hooks or not self.ledger.open:
            raise StateError(f"phase({name!r}) outside of the profile. Use it inside `with shardkit.profile(...):`.")
        before, self.ledger.unit = self.ledger.visits[-1].phase, ""
        try:
            with self.ledger.phase(name, self._step):
                yield
        finally:
            self.ledger.begin(before, self._step)

    # --------------------------------------------------------------------------------------------------- answers

    @property
    def report(self) -> Report:
        """What was measured. Raises StateError inside the context."""
        if self.ledger.open:
            raise StateError("the profile is still running. Read its report after the with block.")
        if self._report is None:
            extra: dict[str, Any] = dict(seconds=self._seconds, operators=self._watch.operators)
            if self.device == "cuda":
                extra |= dict(allocated_bytes=self._allocated, reserved_bytes=self._reserved)
            steps = steps_in(self.model)
            about = dict(
                model=type(self.model).__name__, device=self.device, torch=torch.__version__,
                world_size=steps[0].mesh.size if steps else 1, rank=steps[0].mesh.world.rank if steps else 0,
            )  # fmt: skip
            self._report = make(self.ledger, "measured", about, extra)
        return self._report

    def now(self) -> Moment:
        """What is alive at this moment."""
        return moment(self.ledger, self.ledger.now)

    def callback(self, first: int = 1, last: int = 3):
        """A `transformers.TrainerCallback` that runs this profile during steps `first` to `last`, counted from 0."""
        from .callback import trainer_callback

        return trainer_callback(self, first, last)

    def over(self, batches: Iterable[Any], first: int = 1, last: int = 3) -> Iterator[Any]:
        """The batches, one after another; this profile runs while the loop works on batches `first` to `last`, counted
        from 0. For loops of one's own, Accelerate's among them:

            model, optim, loader = accelerator.prepare(model, optim, loader)
            prof = shardkit.profile(model, optim)
            for batch in prof.over(loader):
                ...
        """
        running = False
        try:
            for number, batch in enumerate(batches):
                if number == first:
                    self.__enter__()
                    running = True
                yield batch
                if number == last and running:
                    running = False
                    self.__exit__(None, None, None)
        finally:
            if running:
                self.__exit__(None, None, None)


# -------------------------------------------------------------------------------------------------- out of memory

# category: (what it is, what makes it smaller, by about how much). The factor is the share that goes away.
_ADVICE = {
    ACTIVATIONS: ("activation_checkpointing=True", 0.8, "keeps only each block's input and computes the rest again"),
    FULL: ("sharding_strategy='full' with blocks as units", 0.7, "gathers one block at a time"),
    OPTIMIZER: ("cpu_offload=True", 1.0, "keeps the optimizer's state on the host; or more ranks, or hybrid to full"),
    PARAMETERS: ("cpu_offload=True", 1.0, "keeps the shards on the host; or more ranks"),
    GRADIENTS: ("gradient accumulation without no_sync()", 0.7, "reduces every micro-batch's gradients at once"),
    REDUCTION: ("mixed_precision with reduce_dtype=torch.bfloat16", 0.5, "halves the reduction's buffers"),
}


def explain_oom(error: BaseException | None = None, prof: profile | None = None) -> str:
    """An out-of-memory error in words: what was alive, of which units, and which setting would help most.

    Args:
        error: what was raised. None: the one being handled.
        prof: the profile that was running. None: the last one that was entered.

    Without a profile, only what the error itself says.
    """
    if error is None:
        import sys

        error = sys.exc_info()[1]
    wanted = _wanted(str(error)) if error is not None else None
    first = f"Out of memory while asking for {size(wanted)}." if wanted else "Out of memory."
    if prof is None:
        prof = _current() if _current is not None else None
    if prof is None:
        return (
            f"{first} What was alive is not known: train inside `with shardkit.profile(model, optim):`, or see "
            "shardkit.estimate(...), which finds it without running."
        )
    return f"{first} {describe_moment(_at_failure(prof), prof)}"


def _at_failure(prof: profile) -> Moment:
    ledger = prof.ledger
    if ledger.open:
        return _as_activations(prof.now()) if ledger.visits[-1].phase == "forward" else prof.now()
    # The context has ended; the exception let go of much on its way. The fullest moment of the last phase is meant.
    return moment(ledger, ledger.visits[-1].peak_at)


def _as_activations(live: Moment) -> Moment:
    """Of a forward that has not ended: what it has not dropped yet is mostly kept for backward."""

    def moved(parts: dict[str, int]) -> dict[str, int]:
        rest = {c: n for c, n in parts.items() if c != TEMPORARIES}
        if TEMPORARIES in parts:
            rest[ACTIVATIONS] = rest.get(ACTIVATIONS, 0) + parts[TEMPORARIES]
        return rest

    return Moment(live.total, moved(live.categories), {unit: moved(parts) for unit, parts in live.units.items()})


def describe_moment(live: Moment, prof: profile) -> str:
    """Sentences about what is alive, and the setting that would help most."""
    parts = sorted(live.categories.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {size(n)} ({100 * n / max(live.total, 1):.0f} %)" for name, n in parts[:4])
    units = [(name, sum(u.values()), max(u, key=u.__getitem__)) for name, u in live.units.items() if name][:3]
    where = ", ".join(f"{name} {size(n)} (mostly {what})" for name, n, what in units)
    text = f"Alive on this rank in {prof.ledger.visits[-1].phase}: {size(live.total)}, of which {shares}."
    if where:
        text += f" By unit, most in {where}."
    saved = [(n * _ADVICE[c][1], c) for c, n in live.categories.items() if c in _ADVICE and not _has(prof, c)]
    if saved:
        most, category = max(saved)
        setting, _, why = _ADVICE[category]
        text += f" What would help most: {setting}, which {why}: about {size(most)} less."
    return text


def _has(prof: profile, category: str) -> bool:
    """True where the setting that would help is on already."""
    for step in prof._observer.steps:
        o = step.options
        if category == ACTIVATIONS and o.activation_checkpointing is not None:
            return True
        if category in (OPTIMIZER, PARAMETERS) and o.cpu_offload is not None:
            return True
        if category == FULL and o.drop_after_forward:
            return True
        mp = o.mixed_precision
        if category == REDUCTION and mp is not None and mp.reduce_dtype == torch.bfloat16:
            return True
    return not prof._observer.steps and category == FULL


def _wanted(message: str) -> float | None:
    found = re.search(r"allocate ([\d.]+) ?(bytes|[KMGT]i?B)", message)
    if found is None:
        return None
    scale = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    return float(found[1]) * scale[found[2][0].lower()]
