"""One root: which unit runs when, what is gathered ahead, what happens at the end of backward and after an exception.

A `Step` owns the units below one root and carries out, in this order:

    forward    each unit in turn: gather (unless the unit before did so ahead), start the next gather, compute, drop
    backward   a unit is opened by whatever comes first: a hook on its outputs, or a saved weight that is asked for;
               opening gathers it, installs full parameters, and starts the previous unit's gather. When its last use
               has reported, it is closed and its reduction starts.
    the end    what is still open is closed and reduced; ranks meet; gradients are put at `param.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ..comm import Mesh, Work
from ..config import Options
from ..errors import StateError
from ..local_shard import LocalShard
from . import precision
from .flat_param import FlatParam
from .join import Join
from .order import BACKWARD, CAPTURE, EVALUATION, FORWARD, GATHER, GATHER_NEAR, REDUCE, STEP, Order
from .recipes import Record, SavedWeights
from .unit import Entry, Unit, in_backward

_IN_FLIGHT = 1  # reductions that may be under way while the next one is prepared


class Reduction:
    """A gradient on its way: reduce-scatter within the shard group, then all-reduce across replicas."""

    def __init__(self, flat: FlatParam, scatter: Work):
        self.flat = flat
        self._scatter: Work | None = scatter
        self._across = Work()

    def advance(self) -> None:
        """Waits for the first half, starts the second, and lets go of the full gradient."""
        if self._scatter is not None:
            self.result = self._scatter.wait()
            self._scatter = None
            self._across = self.flat.mesh.replicate.all_reduce(self.result)

    def settle(self) -> torch.Tensor:
        """The reduced gradient, 1-D, laid out, placed and typed as the local shard."""
        self.advance()
        self._across.wait()
        shard = self.flat.shard
        return self.result.to(device=shard.device, dtype=shard.dtype)

    def finish(self) -> None:
        """Adds the reduced gradient to what this backward already reduced for the flat parameter."""
        flat, result = self.flat, self.settle()
        flat.reduced = result if flat.reduced is None else flat.reduced.add_(result)


class Step:
    """See the module docstring. `units[0]` is the root."""

    def __init__(self, units: list[Unit], mesh: Mesh, options: Options):
        self.units, self.mesh, self.options = units, mesh, options
        self.flats: list[FlatParam] = [flat for unit in units for flat in unit.flats]
        self.storages: dict[int, FlatParam] = {}  # gathered memory, by the identity of its storage
        self.order = Order.of(mesh.channel)
        self.root_id = mesh.channel.register(self) if mesh.channel is not None else 0
        self.saved_weights = SavedWeights(self, None)
        with torch.inference_mode(False), torch.enable_grad():
            self.anchor = torch.empty(0, requires_grad=True)
            self.anchor_node: Any = self.anchor.expand(0).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        self.sync = True  # False inside no_sync
        self.joining: Join | None = None  # inside join()
        self._sequence: list[Unit] = []  # units in the order of this forward
        self._last_sequence: list[Unit] = []
        self._depth = 0
        self.lent: list[Unit] = []  # units that others read in this forward
        self._leaves = [unit for unit in units[1:] if unit.is_leaf]
        self._mode: tuple[bool, bool] | None = None
        self._broken = False

        self._backward_open = False
        self._opened: list[Unit] = []
        self._positions: dict[Unit, int] = {}
        self._pending: list[Reduction] = []
        self._captured: Reduction | None = None

        for unit in units:
            unit.step = self
            unit.ancestors = {u for u in units if u is not unit and _contains(u.module, unit.module)}
        for index, flat in enumerate(self.flats):
            flat.step, flat.index = self, index
            flat.users = [flat.unit] + [u for u in units if u is not flat.unit and flat in u.sources]

    # ------------------------------------------------------------------------------------- carrying out requests

    def perform(self, what: int, index: int) -> None:
        """Runs a collective that this rank asked for."""
        if what == STEP:
            return  # the optimizer does it
        flat = self.flats[index]
        if what in (GATHER, GATHER_NEAR):
            flat.gather()
        elif what == REDUCE:
            self._track(flat, flat.reduce())
        elif what == CAPTURE:
            self._captured = Reduction(flat, flat.reduce_apart(*self._capturing))

    def serve(self, what: int, index: int) -> None:
        """Takes part in a collective, or a step, that only other ranks asked for."""
        if what == STEP:
            assert self.joining is not None
            self.joining.serve_step(index)
            return
        flat = self.flats[index]
        if what == GATHER:
            flat.contribute()
        elif what == REDUCE:
            self._track(flat, flat.reduce_nothing())
        else:
            Reduction(flat, flat.reduce_nothing()).settle()

    def _gather(self, flats: Iterable[FlatParam]) -> None:
        for flat in flats:
            if flat.ready or (flat.gathered and flat.holders > 1):
                continue  # there already; or somebody computes with it, and must see the same values
            if flat.mesh.shard.size == 1 or flat.layout.numel == 0:
                flat.gather()
            else:
                self.order.request(self, GATHER if flat.nearby is None else GATHER_NEAR, flat.index)

    # --------------------------------------------------------------------------------------------------- forward

    @property
    def in_forward(self) -> bool:
        return self._depth > 0

    @property
    def in_backward(self) -> bool:
        """True from the moment backward reaches this root until its gradients are at `param.grad`."""
        return self._backward_open

    @property
    def computing(self) -> bool:
        """True during a forward or a backward of this root."""
        return self._depth > 0 or (self._backward_open and in_backward())

    def begin(self) -> None:
        """A unit is called. The outermost call of a forward settles what is left from before."""
        if self._depth == 0:
            self.settle()
            mode = (self.units[0].module.training, torch.is_grad_enabled())
            for flat in self.flats:
                flat.nearby = None  # of a forward whose backward never came
                if flat.gathered and flat.may_be_stale(mode != self._mode):
                    flat.forget()
            self._mode = mode
            self._sequence = []
            for unit in self._leaves:
                unit.doze()
        self._depth += 1

    def end(self, failed: bool) -> None:
        if self._depth == 1:
            self._end_lending()
        self._depth -= 1
        if self._depth:
            return
        if failed:
            self._broken = True
            return
        self._last_sequence = self._sequence
        self._positions = {unit: i for i, unit in enumerate(self._sequence)}
        self.order.end(self, FORWARD if torch.is_grad_enabled() else EVALUATION)

    def _end_lending(self) -> None:
        for unit in reversed(self.lent):
            unit.take_back()
        self.lent.clear()
        for unit in self._leaves:
            unit.wake()

    def gather(self, unit: Unit) -> None:
        """Makes a unit's full parameters complete, and starts the gather of the one that came next last time."""
        self._gather(unit.sources)
        self._sequence.append(unit)
        at, last = len(self._sequence), self._last_sequence
        if self.options.forward_prefetch and at < len(last) and last[at - 1] is unit:
            self._gather(last[at].sources)
        for flat in unit.sources:
            flat.wait()

    def keeps_after_forward(self, unit: Unit) -> bool:
        """True where full parameters stay for backward: by strategy, or because backward begins with this unit."""
        if not torch.is_grad_enabled():
            return False
        if not unit.drops_after_forward or unit is self.units[0]:
            return True
        last = self._last_sequence
        return len(last) > 1 and last[-1] is unit and len(self._sequence) == len(last)

    def cast_output(self, out):
        mp = self.options.mixed_precision
        if mp is None or mp.output_dtype is None or self._depth:
            return out
        return precision.cast_floats(out, mp.output_dtype)

    # -------------------------------------------------------------------------------------------------- backward

    def begin_backward(self) -> None:
        if not self._backward_open:
            self._backward_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def open(self, unit: Unit) -> None:
        """Backward has reached a unit."""
        self.begin_backward()
        if unit.opened:
            return
        for other in list(self._opened):
            # A unit without live uses is done once backward moves on: frozen ones, and recomputed ones, whose uses
            # come and go. Should backward come back to it, it is gathered, and reduced, again.
            if not other.live and other not in unit.ancestors and unit not in other.ancestors:
                self._close(other)
        self._opened.append(unit)
        unit.open_for_backward()
        at = self._positions.get(unit, 0)
        if self.options.backward_prefetch and at > 0:
            before = self._sequence[at - 1]
            if not before.opened:
                self._gather(flat for flat in before.sources if flat.needed_in_backward)

    def gather_for_backward(self, unit: Unit, everything: bool) -> None:
        """Makes complete what the unit's backward needs: `everything` where it recomputes a forward."""
        flats = [flat for flat in unit.sources if everything or flat.needed_in_backward]
        self._gather(flats)
        for flat in flats:
            flat.wait()

    def weights_for_backward(self, flat: FlatParam) -> torch.Tensor:
        """The gathered buffer that a recipe asks for."""
        if not flat.gathered:
            self.open(flat.unit)
            if not flat.gathered:
                self._gather([flat])
        return flat.wait()

    def report(self, unit: Unit, arrived: list[tuple[Entry, torch.Tensor]], record: Record) -> None:
        """Gradients of full parameters have arrived at one use of a unit."""
        self.begin_backward()
        done = not unit.live and record.ref is not None
        if done and unit in self._opened:
            # Before the reduce buffer is allocated: full parameters and that buffer never exist together.
            self._opened.remove(unit)
            unit.close_after_backward()
        for flat in unit.sources:
            mine = [(entry.index, grad) for entry, grad in arrived if entry.flat is flat]
            if mine:
                flat.add_grads([i for i, _ in mine], [g for _, g in mine])
        if done:
            self._reduce_settled(unit)

    def _close(self, unit: Unit) -> None:
        self._opened.remove(unit)
        unit.close_after_backward()
        self._reduce_settled(unit)

    def _reduce_settled(self, unit: Unit) -> None:
        if self.sync:
            for flat in unit.sources:
                if flat.has_grad and flat.settled:
                    self.order.request(self, REDUCE, flat.index)

    def _track(self, flat: FlatParam, scatter: Work) -> None:
        """Notes a reduction that has started, and finishes older ones so that few full gradients exist at a time."""
        while len(self._pending) > _IN_FLIGHT:
            self._pending.pop(0).finish()
        for reduction in self._pending:
            reduction.advance()
        self._pending.append(Reduction(flat, scatter))

    def capture(self, flat: FlatParam, indices: list[int], grads: list[torch.Tensor]) -> list[LocalShard]:
        """Reduces gradients now and returns the local pieces, without touching `param.grad`."""
        self._capturing = (indices, grads)
        self.order.request(self, CAPTURE, flat.index)
        reduction, self._captured = self._captured, None
        del self._capturing
        assert reduction is not None
        result = reduction.settle()
        return [flat.local_piece(result, i) for i in indices]

    def _finish_backward(self) -> None:
        """Runs once, when autograd is done."""
        for unit in list(self._opened):
            self._close(unit)
        if self.sync:
            for flat in self.flats:
                if flat.has_grad:
                    self.order.request(self, REDUCE, flat.index)
        for flat in self.flats:
            flat.release()  # gathered ahead for a unit that backward did not reach
        trained = [{i for i, p in enumerate(flat.params) if p.requires_grad} for flat in self.flats]
        all_used = all(flat.touched >= wanted for flat, wanted in zip(self.flats, trained, strict=True))
        everywhere = self.order.end(self, BACKWARD, all_used or not self.sync)
        if self.sync:
            self._deposit(trained if everywhere and all_used else self._used_anywhere())
        self._backward_open = False

    def finish_served_backward(self, all_used: bool) -> None:
        """The end of a backward that only other ranks ran: their gradients' local pieces belong here."""
        trained = [{i for i, p in enumerate(flat.params) if p.requires_grad} for flat in self.flats]
        self._deposit(trained if all_used else self._used_anywhere())

    def _deposit(self, used: list[set[int]]) -> None:
        for reduction in self._pending:
            reduction.finish()
        self._pending.clear()
        for flat, indices in zip(self.flats, used, strict=True):
            reduced, flat.reduced, flat.touched = flat.reduced, None, set()
            if reduced is not None:
                flat.deposit(reduced, indices)
        if self.joining is not None:
            self.joining.pending = True

    def _used_anywhere(self) -> list[set[int]]:
        """Which parameters got a gradient on some rank: the others keep `grad=None`, as in a single process."""
        if self.mesh.channel is None:
            return [set(flat.touched) for flat in self.flats]
        mask = torch.zeros(sum(len(flat.params) for flat in self.flats), dtype=torch.uint8)
        starts, at = [], 0
        for flat in self.flats:
            starts.append(at)
            for i in flat.touched:
                mask[at + i] = 1
            at += len(flat.params)
        self.mesh.channel.maximum(mask)
        flags = mask.tolist()
        return [
            {i for i in range(len(flat.params)) if flags[at + i]} for flat, at in zip(self.flats, starts, strict=True)
        ]

    # -------------------------------------------------------------------------------------------------- recovery

    def settle(self) -> None:
        """Clears up after a forward or backward that an exception broke off, on every rank. Else does nothing."""
        if in_backward() or self._depth or not (self._broken or self._backward_open):
            return
        in_the_middle_of_backward = self._backward_open
        self._broken = self._backward_open = False
        try:
            # First of all: ranks that broke off elsewhere may need this one's help to end what they had begun.
            self.order.broke_off(self)
        finally:
            self._clear(in_the_middle_of_backward)

    def _clear(self, gradients_are_partial: bool) -> None:
        for reduction in self._pending:
            reduction.finish()
        self._pending.clear()
        self._opened.clear()
        self.lent.clear()
        for unit in self.units:
            unit.reset()
        for flat in self.flats:
            flat.holders = 0
            flat.forget()
            flat.reduced = None
            if gradients_are_partial:
                flat.drop_grad()

    @contextlib.contextmanager
    def no_sync(self):
        """Backwards inside keep their gradients on this rank, unreduced; the next one outside reduces the sum."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def check_idle(self, what: str) -> None:
        """Raises StateError during a forward or backward; clears up after one that broke off."""
        if self.computing:
            raise StateError(f"{what} was called during a forward or backward of the model. Call it between steps.")
        self.settle()


def _contains(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    return any(m is other for m in module.modules())

