"""Where the ledger's entries come from: every operator's results, and the engine's own methods, which say what for.

`Watch` is a dispatch mode: it sees what operators return, in forward, in backward and in the optimizer's step.
`Observer` stands in front of a few methods of one sharded model's engine, on these objects alone, and takes itself away
again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.flat_param import FlatParam
from ..runtime.managed import unit_of
from ..runtime.saved_offload import _Kept
from ..runtime.step import Step
from ..runtime.unit import in_backward
from .ledger import BUFFERS, FULL, GRADIENTS, OPTIMIZER, PARAMETERS, REDUCTION, Ledger

ROOT = "(root)"


class Watch(TorchDispatchMode):
    """Enters into the ledger the memory of everything that operators return inside this context.

    What an operator allocates and frees within itself is not seen; `workspace(func, args)` may tell. `answers`: what
    the values of tensors are said to be, by operator, where there are none; NotImplemented for no answer.
    `in_backward`: is called before every operator of a backward. `host_copies`: what the engine makes for copies of
    activations on the host is there, and does not count.
    """

    def __init__(self, ledger: Ledger, answers: dict[Any, Callable] | None = None, in_backward: Callable | None = None):
        super().__init__()
        self.ledger, self.answers, self.in_backward = ledger, answers or {}, in_backward
        self.host_copies = False
        self.workspace: Callable | None = None
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        if self.in_backward is not None and in_backward():
            self.in_backward()
        kwargs = kwargs or {}
        answer = self.answers.get(func)
        out = NotImplemented if answer is None else answer(args[0])
        if out is NotImplemented:
            out = func(*args, **kwargs)
        if self.host_copies and func is torch.ops.aten.empty_like.default and _asked_by(_Kept.__init__):
            self.ledger.see_on_host(out)
            return out
        if isinstance(out, torch.Tensor):
            self.ledger.see(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.ledger.see(item)
                elif isinstance(item, (tuple, list)):
                    for inner in item:
                        if isinstance(inner, torch.Tensor):
                            self.ledger.see(inner)
        if self.workspace is not None:
            self.ledger.pass_through(self.workspace(func, args))
        return out


def _asked_by(method: Any) -> bool:
    frame = sys._getframe(2)
    for _ in range(3):
        if frame is None or frame.f_code is method.__code__:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


def steps_in(model: nn.Module) -> list[Step]:
    """The engine's roots in a model; empty where nothing is sharded."""
    units = (unit_of(m) for m in model.modules())
    return list(dict.fromkeys(unit.step for unit in units if unit is not None))


def name_of(unit) -> str:
    return unit.name or ROOT


class Observer:
    """Tells a ledger which unit computes and what the engine allocates for, from `attach` to `detach`."""

    def __init__(self, ledger: Ledger, model: nn.Module):
        self.ledger, self.model = ledger, model
        self.steps = steps_in(model)
        self._attached: list[tuple[Any, str]] = []
        self._stack: list[str] = []

    def attach(self) -> None:
        label_model(self.ledger, self.model)
        for step in self.steps:
            self._around(step, "_track", REDUCTION, after=lambda *_, step=step: self._label_reduced(step))
            self._around(step, "_deposit", REDUCTION, after=lambda *_, step=step: self._label_grads(step))
            self._replace(step, "open", self._opened(step))
            for flat in step.flats:
                for name in ("gather", "contribute", "gather_like_shard", "release"):
                    self._around(flat, name, FULL, unit=name_of(flat.unit))
                for name in ("reduce", "reduce_nothing"):
                    self._around(flat, name, REDUCTION, unit=name_of(flat.unit))
                self._replace(flat, "add_grads", self._add_grads(flat))
            for unit in step.units:
                self._replace(unit, "_enter", self._entering(unit))
                self._replace(unit, "_exit", self._leaving(unit))

    def detach(self) -> None:
        for owner, name in reversed(self._attached):
            owner.__dict__.pop(name, None)  # the method of the class is there again
        self._attached.clear()

    def before_forward(self, function: Callable) -> None:
        """Calls `function()` before every unit's forward, gathers included."""
        for step in self.steps:

            def begin(method=step.begin):
                function()
                return method()

            self._replace(step, "begin", begin)

    def label_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self.ledger.label(_tensors(optimizer.state), OPTIMIZER)

    def _replace(self, owner: Any, name: str, function: Callable) -> None:
        if name in owner.__dict__:
            return  # observed already
        owner.__dict__[name] = function
        self._attached.append((owner, name))

    def _around(
        self, owner: Any, name: str, category: str, unit: str | None = None, after: Callable | None = None
    ) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def run(*args, **kwargs):
            with self.ledger.allocating(category, unit):
                out = method(*args, **kwargs)
            if after is not None:
                after(*args)
            return out

        self._replace(owner, name, run)

    def _add_grads(self, flat: FlatParam) -> Callable:
        method, unit = flat.add_grads, name_of(flat.unit)

        def add_grads(indices, grads):
            self.ledger.label(grads, GRADIENTS, unit=unit)
            # Under no_sync whole gradients stay where they are added up.
            with self.ledger.allocating(REDUCTION if flat.step.sync else GRADIENTS, unit):
                return method(indices, grads)

        return add_grads

    def _label_reduced(self, step: Step) -> None:
        reduced = [flat.reduced for flat in step.flats if flat.reduced is not None]
        self.ledger.label(reduced, GRADIENTS, since_birth=False)

    def _label_grads(self, step: Step) -> None:
        for flat in step.flats:
            grads = [p.grad for p in flat.params if p.grad is not None]
            self.ledger.label(grads, GRADIENTS, since_birth=False, unit=name_of(flat.unit))

    # ------------------------------------------------------------------------------------------ who computes

    def _entering(self, unit) -> Callable:
        method = unit._enter

        def enter():
            self._stack.append(self.ledger.unit)
            self.ledger.unit = name_of(unit)
            return method()

        return enter

    def _leaving(self, unit) -> Callable:
        method = unit._exit

        def leave():
            try:
                return method()
            finally:
                self.ledger.unit = self._stack.pop() if self._stack else ""

        return leave

    def _opened(self, step: Step) -> Callable:
        method = step.open

        def opened(unit):
            if in_backward() and not self._stack:
                self.ledger.unit = name_of(unit)
            return method(unit)

        return opened


def label_model(ledger: Ledger, model: nn.Module) -> None:
    """Says which memory is parameters and buffers, of which unit."""
    ledger.label(model.buffers(), BUFFERS, unit=ROOT)
    for module in model.modules():
        owner = unit_of(module)
        if owner is not None:
            ledger.label(module.buffers(recurse=False), BUFFERS, unit=name_of(owner))
    steps = steps_in(model)
    flats = [flat for step in steps for flat in step.flats]
    sharded = {p for flat in flats for p in flat.params}
    ledger.label((p for p in model.parameters() if p not in sharded), PARAMETERS, unit=ROOT)
    for flat in flats:
        unit = name_of(flat.unit)
        block = ledger.see(flat.shard)
        buffer = ledger.see(flat.buffer) if flat.buffer is not None else None
        if buffer is not None and buffer is not block:
            ledger.label([flat.buffer], FULL, unit=unit)
        if block is not None and block is buffer and not flat.is_whole:
            block.shard = flat.shard.numel() * flat.shard.element_size()
            ledger.label([flat.shard], FULL, unit=unit)
        else:
            ledger.label([flat.shard], PARAMETERS, unit=unit)


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif depth < 4 and hasattr(value, "values"):
        for item in value.values():
            yield from _tensors(item, depth + 1)
