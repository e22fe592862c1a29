"""`plan`: which settings fit on given GPUs, the fastest first, by simulating them.

Not all combinations are simulated; they would be hundreds. First the strategies, meshes and shares of recomputation,
with units as `auto_wrap` chooses them, in order of predicted speed until enough of them fit. After one that does not
fit comes full sharding with the same share: where that does not fit either, nothing in between needs simulating.
Activation offload and smaller units are then tried on those that did not fit, where they could help and would still be
among the fastest; fewer, larger units on the fastest that fits, where they are predicted to be faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import ConfigError
from . import padding, settings
from .choice import AUTO, STRATEGIES, Choice, Granularity, granularity
from .devices import Device, device
from .estimate import _VALUE, _batch, _build, _checked, _sentences, _zero, estimate
from .ledger import ACTIVATIONS, FULL, REDUCTION, Ledger
from .models import Source, source
from .observe import Watch
from .report import Report, size, table
from .speed import Seconds, Traffic, seconds, traffic
from .training import Optimizer, default_loss
from .world import groups, no_memory, world

_LARGEST = 4096  # ranks, when looking for the smallest cluster that would do
_SAVERS = 4  # simulations of settings that differ from a failed one in what they keep on the device
_WORTH = 0.99  # other units are worth simulating where they are predicted to take at most this share of the time


@dataclasses.dataclass(frozen=True)
class Row:
    """A choice and what became of it. live, reserved: bytes, None where it was not simulated. reason: why it fits or
    not. activations, in_flight: bytes of activations at the end of forward, and of gathered parameters and reductions
    at the peak."""

    choice: Choice
    fits: bool
    seconds: Seconds
    traffic: Traffic
    live: int | None
    reserved: int | None
    reason: str
    activations: int = 0
    in_flight: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """`rows`: what fits first, by predicted speed. `str()` gives a table with reasons.

    smallest: (ranks, choice) of the smallest cluster of the same GPUs that would do, where nothing fits; None where no
    number of ranks up to 4096 helps.
    """

    model: str
    ranks: int
    gpu: Device
    precision: str
    rows: tuple[Row, ...]
    smallest: tuple[int, Choice] | None = None

    @property
    def best(self) -> Row | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def __str__(self) -> str:
        head = ["", "settings", "step", "arithmetic", "messages", "host", "live", "reserved", "why"]
        body = [
            [
                "fits" if r.fits else "no", str(r.choice), _time(r.seconds.total), _time(r.seconds.arithmetic),
                _time(r.seconds.messages + r.seconds.latency), _time(r.seconds.host + r.seconds.activations),
                "" if r.live is None else size(r.live), "" if r.reserved is None else size(r.reserved), r.reason,
            ]
            for r in self.rows
        ]  # fmt: skip
        title = (
            f"{self.model} on {self.ranks} x {self.gpu.name} ({size(self.gpu.usable)} usable each), {self.precision}"
        )
        lines = [title, "", *table(head, body, left=(0, 1, 8)), ""]
        if self.best is not None:
            texts = [f"fastest that fits: {self.best.choice}", self.call(), self.yaml(), self.launch()]
            return "\n".join([*lines, "\n\n".join(texts)])
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """A sentence where nothing fits."""
        if self.best is not None:
            return f"{self.best.choice} fits."
        if self.smallest is None:
            return (
                f"Nothing fits, on any number of {self.gpu.name} up to {_LARGEST}: the activations and one unit of a "
                "single rank are too large. Use a smaller batch or sequence per rank, or GPUs with more memory."
            )
        ranks, choice = self.smallest
        return (
            f"Nothing fits on {self.ranks} x {self.gpu.name}. The smallest cluster that would: {ranks} of them, with "
            f"{choice}."
        )

    def call(self, row: Row | None = None) -> str:
        """The Python call of a row (None: the best)."""
        return settings.call(_chosen(self, row).choice, self.precision)

    def yaml(self, row: Row | None = None) -> str:
        """The configuration file of Accelerate for a row (None: the best). Needs the options of `launch`."""
        machines = max(1, self.ranks // self.gpu.node)
        return settings.yaml(_chosen(self, row).choice, self.precision, self.ranks, machines)

    def launch(self, row: Row | None = None, file: str = "accelerate.yaml") -> str:
        """The command line, for every machine, that starts a script with that file: what it has no words for (zero2,
        shares of recomputation, activation offload) is in the variable SHARDKIT_OPTIONS."""
        return settings.launch(_chosen(self, row).choice, file)

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {**dataclasses.asdict(r), "step_seconds": r.seconds.total, "settings": str(r.choice)} for r in self.rows
        ]
        out = dict(
            model=self.model, ranks=self.ranks, gpu=dataclasses.asdict(self.gpu), precision=self.precision, rows=rows
        )
        if self.best is not None:
            return {**out, "fits": True, "call": self.call(), "yaml": self.yaml(), "launch": self.launch()}
        smallest = None if self.smallest is None else dict(ranks=self.smallest[0], settings=str(self.smallest[1]))
        return {**out, "fits": False, "smallest": smallest, "verdict": self.verdict()}


def _chosen(plan: Plan, row: Row | None) -> Row:
    row = row or plan.best
    if row is None:
        raise ConfigError(plan.verdict())
    return row


def _time(s: float) -> str:
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.1f} ms" if s else "0"


# ------------------------------------------------------------------------------------------------------- searching


def plan(
    model: Any,
    batch: Any,
    gpus: int = 8,
    gpu: str = "h100-80g",
    optimizer: Optimizer = "adamw",
    *,
    precision: str = "bf16",
    loss_fn: Callable | None = None,
    overrides: dict[str, Any] | None = None,
    keep: int = 4,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Settings with which a model trains on `gpus` GPUs, the fastest first; each that is shown to fit was simulated.

    Candidates are all strategies, hybrids where there are several machines, with no, half and all blocks checkpointed;
    where they are too large, also with activations on the host, and with units smaller than blocks; where nothing else
    fits, with shards on the host. They are simulated in order of predicted speed (`speed.py`), until `keep` of them
    fit. One that surely takes more memory than one that did not fit is not simulated. Last, larger units are tried on
    the fastest, where they would be faster still.

    Args:
        model, batch, optimizer, loss_fn, overrides: as for `estimate`. batch is one rank's.
        gpu: a name from `devices.DEVICES`, also with another amount of memory: "h100-64g".
        precision: "bf16", "fp16" or "fp32".
        progress: called with a line of text before every simulation.

    A setting fits where the allocator's reserved bytes (see `estimate`) are at most 94 % of the GPU's memory.
    Raises ConfigError as `estimate` does, and for an unknown GPU.
    """
    card, origin, say = device(gpu), source(model, overrides), progress or (lambda text: None)
    say(f"counting arithmetic and bytes of {origin.name}")
    survey = _survey(origin, batch, loss_fn)
    common = dict(optimizer=optimizer, loss_fn=loss_fn, mixed_precision=precision)
    search = _Search(origin, batch, card, precision, survey, common, say)
    rows = search.run(search.candidates(gpus), gpus, keep)
    rows += search.run(search.savers(rows, gpus), gpus, keep, rows)
    smallest = None
    if not any(r.fits for r in rows):
        offloaded = search.run(search.candidates(gpus, offload=True), gpus, keep, rows)
        rows += offloaded + search.run(search.savers(offloaded, gpus), gpus, keep, rows + offloaded)
    fitting = sorted((r for r in rows if r.fits), key=lambda r: r.seconds.total)
    if fitting:
        rows += search.run(search.coarser(fitting[0], gpus), gpus, keep, rows)
    else:
        smallest = search.smallest(gpus)
    ordered = sorted(rows, key=lambda r: (not r.fits, r.seconds.total))
    return Plan(origin.name, gpus, card, precision, tuple(ordered), smallest)


class _Search:
    """Simulates choices for one model."""

    def __init__(self, origin: Source, batch, card: Device, precision: str, survey: _Survey, common: dict, say):
        self.origin, self.batch, self.card, self.precision = origin, batch, card, precision
        self.flops, self.parameters, self.units = survey.flops, survey.parameters, survey.units
        self.common, self.say = common, say
        self._traffic: dict[tuple, Traffic] = {}
        self._activations: dict[float, int] = {}  # bytes, by the share of blocks that are recomputed

    def candidates(self, gpus: int, offload: bool = False) -> list[Choice]:
        node = self.card.node
        mesh = (gpus // node, node) if gpus > node and gpus % node == 0 else None
        out = []
        for strategy in STRATEGIES:
            hybrid = strategy.startswith("hybrid")
            if (hybrid and mesh is None) or (offload and strategy not in ("full", "hybrid")):
                continue
            for share in (0.0, 0.5, 1.0):
                out.append(Choice(strategy, share, offload, mesh if hybrid else None))
        return out

    def savers(self, rows: list[Row], gpus: int) -> list[Choice]:
        """Of simulated rows that did not fit, the same with less on the device, where that could be enough: activations
        could go to the host, or what is gathered and reduced at a time become small. The fastest few."""
        out = []
        for row in rows:
            if row.fits or row.reserved is None:
                continue
            over, choice = row.reserved - self.card.usable, row.choice
            # A recomputed block keeps its input where it is, so where all are, there is nothing to take to the host.
            offload = choice.recomputed < 1 and 0 < row.activations
            if offload and over <= row.activations:
                out.append(dataclasses.replace(choice, offload_activations=True))
            # Other strategies keep full parameters anyway.
            if self.units.finer is not None and choice.strategy in ("full", "hybrid"):
                if over <= row.in_flight:
                    out.append(dataclasses.replace(choice, units=self.units.finer))
                if offload and row.activations < over <= row.activations + row.in_flight:
                    out.append(dataclasses.replace(choice, units=self.units.finer, offload_activations=True))
        return sorted(out, key=lambda choice: self._seconds(choice, gpus).total)[:_SAVERS]

    def coarser(self, best: Row, gpus: int) -> list[Choice]:
        """The best settings with larger units, where these are predicted to be faster."""
        if best.choice.units != AUTO:
            return []
        others = [dataclasses.replace(best.choice, units=units) for units in self.units.coarser]
        return [c for c in others if self._seconds(c, gpus).total <= _WORTH * best.seconds.total]

    def run(self, choices: list[Choice], gpus: int, keep: int, known: list[Row] | None = None) -> list[Row]:
        """Simulates choices in order of predicted speed, but those that would be slower than `keep` that fit, among
        them `known`."""
        timed = sorted(((self._seconds(c, gpus), c) for c in choices), key=lambda pair: pair[0].total)
        rows: list[Row] = []
        failed = [r.choice for r in known or () if not r.fits and r.live is not None]
        times = [r.seconds.total for r in known or () if r.fits]
        while timed:
            time, choice = timed.pop(0)
            sent = self._sent(choice, gpus)
            hopeless = self._hopeless(choice, failed)
            if hopeless:
                rows.append(Row(choice, False, time, sent, None, None, hopeless))
                continue
            if sum(t <= time.total for t in times) >= keep:
                break
            rows.append(self._simulate(choice, gpus, time, sent))
            if rows[-1].fits:
                times.append(time.total)
            elif rows[-1].live is not None:
                failed.append(choice)
                least = dataclasses.replace(choice, strategy="full", mesh=None)
                timed.sort(key=lambda pair: pair[1] != least)  # first; the others stay in order
        return rows

    def _hopeless(self, choice: Choice, failed: list[Choice]) -> str:
        """Why a choice surely does not fit, if so, without simulating it."""
        worse = next((f for f in failed if f.needs_no_more_than(choice)), None)
        if worse is not None:
            return f"takes at least what {worse} does"
        whole = self.parameters * (2 if self.precision != "fp32" else 4)
        if choice.strategy not in ("full", "hybrid") and whole > self.card.usable:
            return f"full parameters alone take {size(whole)}"
        return ""

    def _simulate(self, choice: Choice, gpus: int, time: Seconds, sent: Traffic) -> Row:
        self.say(f"simulating {choice} on {gpus} ranks")
        try:
            report = self._estimate(choice, gpus)
        except ConfigError as e:
            if not choice.recomputed:
                raise
            return Row(choice, False, time, sent, None, None, str(e).partition(". ")[0])  # no blocks to checkpoint, say
        live, reserved = report.training_peak, report.extra["reserved_bytes"]
        fits = reserved <= self.card.usable
        phase = max((p for p in report.phases if p != "init"), key=lambda p: report.phases[p].total)
        held = report.phases[phase].categories
        most = sorted(held.items(), key=lambda x: -x[1])[:2]
        why = f"peak in {phase}: " + ", ".join(f"{c} {size(n)}" for c, n in most)
        if not fits:
            why = f"{size(reserved - self.card.usable)} over; {why}"
        activations = report.phases["forward"].categories.get(ACTIVATIONS, 0)
        if not choice.offload_activations:
            self._activations[choice.recomputed] = activations
        in_flight = held.get(FULL, 0) + held.get(REDUCTION, 0)
        return Row(choice, fits, time, sent, live, reserved, why, activations, in_flight)

    def _estimate(self, choice: Choice, gpus: int) -> Report:
        model = self.origin.config if self.origin.config is not None else self.origin.make
        options = {**self.common, **choice.options()}
        return estimate(model, self.batch, world_size=gpus, deferred_init=True, **options)

    def _seconds(self, choice: Choice, gpus: int) -> Seconds:
        low = self.precision != "fp32"
        return seconds(self._sent(choice, gpus), self.flops, choice.recomputed, low, self.card)

    def _sent(self, choice: Choice, gpus: int) -> Traffic:
        key = (choice.strategy, choice.offload, choice.mesh, choice.units, gpus)
        if key not in self._traffic:
            sends = dataclasses.replace(choice, recomputed=0.0, offload_activations=False)
            options = {**sends.options(), "mixed_precision": self.precision}
            mesh = options.pop("device_mesh", None)
            with _pretence(self.origin.name, gpus) as (watch, _):
                options = _checked({**options, "process_group": groups(mesh)})
                self._traffic[key] = traffic(_build(watch.ledger, self.origin, options, True, None, None))
        sent = self._traffic[key]
        if choice.offload_activations:  # there and back; known from the same without offload
            sent = dataclasses.replace(sent, activations=2.0 * self._activations.get(choice.recomputed, 0))
        return sent

    def smallest(self, gpus: int) -> tuple[int, Choice] | None:
        """The fewest GPUs, in whole machines, on which the most frugal settings fit."""
        kinds = [AUTO] if self.units.finer is None else [AUTO, self.units.finer]
        for offload in (False, True):
            for units in kinds:
                choice = Choice("full", 1.0, offload, units=units)
                if self._simulate(choice, gpus, *self._cost(choice, gpus)).live is None:  # nothing to checkpoint
                    choice = dataclasses.replace(choice, recomputed=0.0, offload_activations=True)
                found = self._fewest(choice, gpus)
                if found is not None:
                    return found, choice
        return None

    def _fewest(self, choice: Choice, gpus: int) -> int | None:
        """Doubles the number of machines until the choice fits, then halves the interval."""
        node = self.card.node
        low, high = gpus, max(2 * gpus, node)
        if not self._fits(choice, _LARGEST):  # one simulation, before many
            return None
        while not self._fits(choice, high):
            low, high = high, 2 * high
            if high > _LARGEST:
                return None
        while high - low > node:
            middle = (low + high) // 2 // node * node
            if middle <= low:
                break
            low, high = (low, middle) if self._fits(choice, middle) else (middle, high)
        return high

    def _fits(self, choice: Choice, gpus: int) -> bool:
        return self._simulate(choice, gpus, *self._cost(choice, gpus)).fits

    def _cost(self, choice: Choice, gpus: int) -> tuple[Seconds, Traffic]:
        return self._seconds(choice, gpus), self._sent(choice, gpus)


@contextlib.contextmanager
def _pretence(name: str, gpus: int) -> Iterator[tuple[Watch, Any]]:
    watch = Watch(Ledger(), {_VALUE: _zero})
    with world(gpus), _sentences(name), no_memory() as mode, watch:
        yield watch, mode


@dataclasses.dataclass(frozen=True)
class _Survey:
    """flops: of one forward, by torch's counter. parameters: in all. units: what they can be."""

    flops: float
    parameters: int
    units: Granularity


def _survey(origin: Source, batch: Any, loss_fn) -> _Survey:
    from torch.utils.flop_counter import FlopCounterMode

    with _pretence(origin.name, 1) as (watch, mode):
        watch.ledger.open = False
        model = origin.make()
        watch.answers[_VALUE] = padding.answer
        counter = FlopCounterMode(display=False)
        with padding.nothing_masked(mode), counter, torch.no_grad():
            (loss_fn or default_loss)(model, _batch(origin, batch))
        parameters = sum(p.numel() for p in model.parameters())
        return _Survey(float(counter.get_total_flops()), parameters, granularity(model))
