"""`model.join()`: ranks with different numbers of batches.

A rank that has run out of batches serves the others: it takes part in their gathers and reductions, adds zeros to their
gradients, and, because its shards are a part of the model that only it can update, takes the optimizer's steps that the
others take. Gradients are still divided by the number of all ranks, as in DDP's join.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import StateError
from .flat_param import home_of
from .order import BACKWARD, STEP, Order

if TYPE_CHECKING:
    from .step import Step


class Join:
    """The optimizers that have stepped inside one `join()`, numbered in the order of their first step."""

    def __init__(self, step: Step, optimizers):
        self.step = step
        self.optimizers: list[torch.optim.Optimizer] = list(optimizers)
        self.pending = False  # a backward has delivered gradients that no optimizer has used yet
        self._serving = False

    def on_step(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        """An optimizer is about to step on this rank: ranks that are done must step theirs."""
        if self._serving or not any(self._is_ours(p) for g in optimizer.param_groups for p in g["params"]):
            return
        if not any(o is optimizer for o in self.optimizers):
            self.optimizers.append(optimizer)
        number = next(i for i, o in enumerate(self.optimizers) if o is optimizer)
        self.pending = False
        self.step.order.request(self.step, STEP, number)

    def serve_step(self, number: int) -> None:
        """Takes a step that another rank takes."""
        if number >= len(self.optimizers):
            raise StateError(
                "this rank ran out of batches before its optimizer took a step inside join(), so it cannot take the "
                "steps of the others. Pass the optimizers: `with model.join(optim):`."
            )
        self._serving = True
        try:
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()
        finally:
            self._serving = False

    def serve_until_all_are_here(self) -> None:
        if not self.pending:
            for optimizer in self.optimizers:
                optimizer.zero_grad()  # what it held was used by this rank's last step
        assert isinstance(self.step.order, Order)
        for kind, all_used in self.step.order.serve_joined(self.step):
            if kind == BACKWARD:
                self.step.finish_served_backward(all_used)

    def _is_ours(self, param) -> bool:
        home = home_of(param)
        return home is not None and home[0].step is self.step


@contextlib.contextmanager
def join(step: Step, optimizers):
    """See `FullyShardedDataParallel.join`. Collective: every rank of the mesh enters and leaves."""
    step.check_idle("join()")
    if not isinstance(step.order, Order):
        yield  # nobody to wait for
        return
    joining = step.joining = Join(step, optimizers)
    handle = register_optimizer_step_pre_hook(joining.on_step)
    step.order.in_step_only += 1
    try:
        try:
            yield
        except BaseException:
            step.order.leave_join_broken(step)
            raise
        joining.serve_until_all_are_here()
    finally:
        handle.remove()
        step.order.in_step_only -= 1
        step.mesh.shard.absent = False
        step.order.forget()
        step.joining = None
