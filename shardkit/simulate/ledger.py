"""Which tensor memory is alive, and what it is for: the book that a simulated and a measured run both keep.

A *block* is one storage. It is entered when an operator first returns a tensor on it, and struck out when its last
reference goes, which a weak reference to the storage tells. What a block is for may be known only later (memory of a
forward that backward still finds is an activation, what an optimizer keeps is its state), so blocks carry labels, and
every question about a moment is answered at the end.

All sizes are bytes; times are event counts of this ledger, not seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Iterator

import torch

PARAMETERS = "parameters"
FULL = "full parameters"
GRADIENTS = "gradients"
REDUCTION = "reduction buffers"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
BUFFERS = "buffers"
INPUTS = "inputs"
SAVING = "checkpoint"
CATEGORIES = (PARAMETERS, FULL, GRADIENTS, REDUCTION, OPTIMIZER, ACTIVATIONS, TEMPORARIES, BUFFERS, INPUTS, SAVING)
PHASES = ("init", "forward", "backward", "step", "save")

_NEVER = 1 << 62


class Block:
    """One storage, from `born` to `died`. `labels`: (time, category) in order of time; `shard`: bytes of it that are
    this rank's parameters, where they lie inside kept full parameters."""

    __slots__ = ("size", "born", "died", "labels", "unit", "phase", "shard", "ref", "left")

    def __init__(self, size: int, born: int, category: str, unit: str, phase: str):
        self.size, self.born, self.died = size, born, _NEVER
        self.labels = [(born, category)]
        self.unit, self.phase, self.shard = unit, phase, 0
        self.left = _NEVER  # when it went to the host, where it no longer counts
        self.ref: weakref.ref | None = None

    def category_at(self, time: int) -> str:
        for since, category in reversed(self.labels):
            if since <= time:
                return category
        return self.labels[0][1]

    def shares_at(self, time: int) -> Iterator[tuple[str, int]]:
        """(category, bytes): two where the shard lies inside the full parameters."""
        category = self.category_at(time)
        if self.shard and category == FULL:
            yield PARAMETERS, self.shard
            yield FULL, self.size - self.shard
        else:
            yield category, self.size


@dataclasses.dataclass
class Visit:
    """One run through a phase. `peak`: the most bytes that were alive in it, at time `peak_at`; `within` of them inside
    an operator."""

    phase: str
    step: int
    start: int
    peak: int
    peak_at: int
    stop: int = _NEVER
    within: int = 0


class Ledger:
    """See the module docstring. `now`: number of events so far; `total`: bytes alive."""

    def __init__(self, devices: tuple[str, ...] | None = None):
        self.devices = devices  # kinds of device that count; None: all that have memory
        self.now = self.total = 0
        self.live: dict[int, Block] = {}  # by identity of the storage
        self.blocks: list[Block] = []
        self.visits: list[Visit] = [Visit("init", 0, 0, 0, 0)]
        self.purpose: str | None = None  # category of what the engine allocates right now
        self.unit = ""  # unit that computes right now
        self.open = True
        # With `cpu_offload` on a GPU that is simulated on the CPU: the phases whose new memory is on the host, and
        # categories that memory is moved there for.
        self.host_phases: tuple[str, ...] = ()
        self.host_labels: tuple[str, ...] = ()

    # ------------------------------------------------------------------------------------------------- entering

    def see(self, t: torch.Tensor) -> Block | None:
        """Enters the memory of `t` if it is new. None for a tensor without memory of its own kind."""
        try:
            storage = t.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, functorch wrappers
            return None
        block = self.live.get(storage._cdata)
        size = storage.nbytes()
        if block is not None and block.size == size:
            return block
        if not size or not self.open or not self._counts(t):
            return None
        if block is not None:  # grown in place, as an `out=` of size zero is
            self._gone(storage._cdata, block)
        return self._enter(storage, size)

    def _counts(self, t: torch.Tensor) -> bool:
        kind = t.device.type
        return kind != "meta" if self.devices is None else kind in self.devices

    def _enter(self, storage: torch.UntypedStorage, size: int) -> Block:
        self.now += 1
        visit = self.visits[-1]
        block = Block(size, self.now, self._guess(visit.phase), self.unit, visit.phase)
        key = storage._cdata
        block.ref = weakref.ref(storage, functools.partial(self._dead, key))
        self.live[key] = block
        self.blocks.append(block)
        if visit.phase in self.host_phases:
            block.left = self.now
            return block
        self.total += size
        if self.total > visit.peak:
            visit.peak, visit.peak_at, visit.within = self.total, self.now, 0
        return block

    def pass_through(self, size: int) -> None:
        """An operator that has just returned had `size` bytes more while it ran."""
        visit = self.visits[-1]
        if size and self.open and self.total + size > visit.peak:
            visit.peak, visit.peak_at, visit.within = self.total + size, self.now, size

    def see_on_host(self, t: torch.Tensor) -> None:
        """Enters new memory that does not count here."""
        with self.on_host():
            self.see(t)

    @contextlib.contextmanager
    def on_host(self, there: bool = True):
        """Context in which new memory is on the host, where it does not count; not `there`: on the device after all."""
        before, self.host_phases = self.host_phases, PHASES if there else ()
        try:
            yield
        finally:
            self.host_phases = before

    def to_host(self, category: str) -> None:
        """Everything of a category that is alive goes to the host."""
        for block in self.live.values():
            if block.labels[-1][1] == category:
                self._leave(block)

    def _leave(self, block: Block) -> None:
        if block.left == _NEVER:
            self.now += 1
            block.left = self.now
            self.total -= block.size

    def _guess(self, phase: str) -> str:
        if self.purpose is not None:
            return self.purpose
        if phase == "save":
            return SAVING
        # Backward computes without grad mode; what is computed with it is a forward that runs again.
        return ACTIVATIONS if phase == "backward" and torch.is_grad_enabled() else TEMPORARIES

    def _dead(self, key: int, ref: weakref.ref) -> None:
        block = self.live.get(key)
        if block is not None and block.ref is ref:
            self._gone(key, block)

    def _gone(self, key: int, block: Block) -> None:
        if not self.open:
            return
        self.now += 1
        del self.live[key]
        block.died, block.ref = self.now, None
        if block.left == _NEVER:
            self.total -= block.size

    # ------------------------------------------------------------------------------------------------- labelling

    def label(self, tensors: Iterable[torch.Tensor | None], category: str, since_birth: bool = True, unit=None) -> None:
        """Says what memory is for: from the beginning, or from now on."""
        for t in tensors:
            block = self.see(t) if t is not None else None
            if block is None:
                continue
            if since_birth:
                block.labels = [(block.born, category)]
            elif block.category_at(self.now) != category:
                self.now += 1  # a peak at the moment before keeps what it was
                block.labels.append((self.now, category))
                if category in self.host_labels:
                    self._leave(block)
            if unit is not None:
                block.unit = unit

    @contextlib.contextmanager
    def allocating(self, category: str | None, unit: str | None = None):
        """Context in which new memory is for `category`, of `unit` (None: of the one that computes)."""
        before = self.purpose, self.unit
        self.purpose = category
        if unit is not None:
            self.unit = unit
        try:
            yield
        finally:
            self.purpose, self.unit = before

    @contextlib.contextmanager
    def phase(self, name: str, step: int = 0):
        """Context of one phase. What a forward made and did not drop is an activation."""
        self.begin(name, step)
        try:
            yield self.visits[-1]
        finally:
            self.end()

    def begin(self, name: str, step: int = 0) -> None:
        self.end()
        self.visits.append(Visit(name, step, self.now, self.total, self.now))

    def end(self) -> None:
        visit = self.visits[-1]
        if visit.stop != _NEVER:
            return
        visit.stop = self.now
        if visit.phase == "forward":
            for block in self.live.values():
                if block.born > visit.start and block.labels[-1][1] == TEMPORARIES:
                    block.labels = [(block.born, ACTIVATIONS)]

    def close(self) -> None:
        """Ends the record: nothing is entered or struck out any more."""
        self.end()
        self.open = False
        for block in self.live.values():
            block.ref = None

    # -------------------------------------------------------------------------------------------------- answers

    def breakdown(self, time: int) -> dict[tuple[str, str], int]:
        """Bytes alive at a moment, by (unit, category)."""
        out: dict[tuple[str, str], int] = {}
        for block in self.blocks:
            if block.born <= time < min(block.died, block.left):
                for category, size in block.shares_at(time):
                    key = block.unit, category
                    out[key] = out.get(key, 0) + size
        return out

    def timeline(self, points: int = 400) -> list[dict]:
        """At most `points` moments, evenly spread over events, each the fullest of its stretch: `time`, `phase`,
        `step`, and bytes by category."""
        deltas: dict[int, dict[str, int]] = {}

        def add(time: int, category: str, size: int) -> None:
            at = deltas.setdefault(time, {})
            at[category] = at.get(category, 0) + size

        for block in self.blocks:
            gone = min(block.died, block.left)
            ends = [since for since, _ in block.labels[1:]] + [gone]
            for (start, _), stop in zip(block.labels, ends):
                if start >= gone:
                    break
                stop = min(stop, gone)
                for category, size in block.shares_at(start):
                    add(start, category, size)
                    if stop < _NEVER:
                        add(stop, category, -size)
        stride = max(1, -(-(self.now + 1) // points))
        now, rows = dict.fromkeys(CATEGORIES, 0), []
        best: tuple[int, int, dict[str, int]] = (-1, 0, {})
        for time in range(self.now + 1):
            for category, size in deltas.get(time, {}).items():
                now[category] += size
            total = sum(now.values())
            if total > best[0]:
                best = total, time, dict(now)
            if time % stride == stride - 1 or time == self.now:
                rows.append(best)
                best = (-1, 0, {})
        visits = iter([*self.visits, None])
        visit, coming, out = self.visits[0], next(visits), []
        for _, time, bytes_ in rows:
            while coming is not None and coming.start <= time:
                visit, coming = coming, next(visits)
            out.append(
                dict(time=time, phase=visit.phase, step=visit.step, bytes={k: v for k, v in bytes_.items() if v})
            )
        return out
