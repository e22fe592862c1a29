"""One training loop for both: the simulated run and the measured one execute these lines, so that they differ in
nothing but the memory behind the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from ..errors import ConfigError
from .ledger import INPUTS, Ledger
from .observe import Observer, _tensors

Optimizer = str | Callable[[Any], torch.optim.Optimizer] | None


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that a model returns, or the mean of what it returns.

    Mappings are passed by keyword and tuples by position. Raises ConfigError where there is no tensor in the result.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
    if loss is None:
        loss = next(_tensors(out), None)
    if loss is None:
        raise ConfigError(
            f"{type(model).__name__} returned a {type(out).__name__} without a loss. Pass loss_fn=, a function "
            "(model, batch) -> loss, or labels in the batch."
        )
    return loss if loss.dim() == 0 else loss.float().mean()


def make_optimizer(optimizer: Optimizer, model: nn.Module, gpu: bool) -> torch.optim.Optimizer:
    """The optimizer that `optimizer` names: a function of the parameters, or one of torch's by name, such as "adamw",
    "sgd" or "adamw-fused". torch uses the foreach form where it is not told on a GPU, and a loop on the CPU.

    Raises ConfigError for an unknown name.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    if callable(optimizer):
        return optimizer(params)
    name, _, form = (optimizer or "adamw").lower().partition("-")
    known = {cls.lower(): cls for cls in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adafactor")}
    if name not in known or form not in ("", "fused", "foreach", "loop", "momentum"):
        raise ConfigError(
            f"optimizer={optimizer!r} is not known. Use {', '.join(known)}, with -fused, -foreach or -loop, "
            "sgd-momentum, or pass a function of the parameters."
        )
    options: dict[str, Any] = dict(foreach=form == "foreach" or (gpu and form != "loop"))
    if form == "fused":
        options = dict(fused=True)
    if form == "momentum":
        options["momentum"] = 0.9
    return getattr(torch.optim, known[name])(params, lr=1e-4, **options)


class Trainer:
    """Trains a wrapped model for some steps, under a ledger."""

    def __init__(
        self, ledger: Ledger, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn=None, accumulate: int = 1
    ):
        self.ledger, self.model, self.optimizer = ledger, model, optimizer
        self.loss_fn = loss_fn or default_loss
        self.accumulate = accumulate
        self.observer = Observer(ledger, model)

    def run(self, batches: list[Any]) -> None:
        """One optimizer step for each batch, which is used for every one of its micro-batches."""
        self.observer.attach()
        for batch in batches:  # which may be the same one each time
            self.ledger.label(_tensors(batch), INPUTS)
        try:
            for step, batch in enumerate(batches):
                self._step(step, batch)
        finally:
            self.observer.detach()

    def _step(self, step: int, batch: Any) -> None:
        ledger, loss = self.ledger, None
        for micro in range(self.accumulate):
            last = micro == self.accumulate - 1
            no_sync = getattr(self.model, "no_sync", contextlib.nullcontext)
            with contextlib.nullcontext() if last else no_sync():
                with ledger.phase("forward", step):
                    loss = self.loss_fn(self.model, batch)
                with ledger.phase("backward", step):
                    loss.backward()
        ledger.unit = ""
        with ledger.phase("step", step):
            self.optimizer.step()
            self.observer.label_optimizer(self.optimizer)
        self.optimizer.zero_grad()
        del loss
