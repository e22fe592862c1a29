"""`plan`: which settings fit on given GPUs, the fastest first, by simulating them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import ConfigError
from . import padding
from .devices import Device, device
from .estimate import _VALUE, _batch, _build, _checked, _sentences, _zero, estimate
from .ledger import Ledger
from .models import Source, source
from .observe import Watch
from .report import size, table
from .speed import Seconds, Traffic, seconds, traffic
from .training import Optimizer, default_loss
from .world import groups, no_memory, world

_LARGEST = 4096  # ranks, when looking for the smallest cluster that would do
# From the most memory to the least.
_STRATEGIES = ("none", "zero2", "grad_op", "hybrid_grad_op", "hybrid", "full")
_ACCELERATE = {
    "none": "NO_SHARD", "zero2": "SHARD_GRAD_OP", "grad_op": "SHARD_GRAD_OP", "full": "FULL_SHARD",
    "hybrid": "HYBRID_SHARD", "hybrid_grad_op": "HYBRID_SHARD_ZERO2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Choice:
    """One set of settings. recomputed: share of the blocks whose activations are computed again."""

    strategy: str
    recomputed: float = 0.0
    offload: bool = False
    mesh: tuple[int, int] | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `auto_wrap`; the mesh as sizes."""
        out: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.recomputed:
            out["activation_checkpointing"] = True if self.recomputed == 1 else self.recomputed
        if self.offload:
            out["cpu_offload"] = True
        if self.mesh is not None:
            out["device_mesh"] = self.mesh
        return out

    def needs_no_more_than(self, other: Choice) -> bool:
        """True where this one surely takes at most the other's memory."""
        if self.mesh != other.mesh and self.mesh is not None:
            return False
        less = _STRATEGIES.index(self.strategy) >= _STRATEGIES.index(other.strategy)
        return less and self.recomputed >= other.recomputed and self.offload >= other.offload

    def __str__(self) -> str:
        parts = [self.strategy + (f" {self.mesh[0]}x{self.mesh[1]}" if self.mesh else "")]
        if self.recomputed:
            parts.append("checkpoint all blocks" if self.recomputed == 1 else f"checkpoint {self.recomputed:.0%}")
        return ", ".join(parts + (["cpu offload"] if self.offload else []))


@dataclasses.dataclass(frozen=True)
class Row:
    """A choice and what became of it. live, reserved: bytes, None where it was not simulated. reason: why it fits or
    not."""

    choice: Choice
    fits: bool
    seconds: Seconds
    traffic: Traffic
    live: int | None
    reserved: int | None
    reason: str


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
                _time(r.seconds.messages + r.seconds.latency), _time(r.seconds.host),
                "" if r.live is None else size(r.live), "" if r.reserved is None else size(r.reserved), r.reason,
            ]
            for r in self.rows
        ]  # fmt: skip
        title = (
            f"{self.model} on {self.ranks} x {self.gpu.name} ({size(self.gpu.usable)} usable each), {self.precision}"
        )
        lines = [title, "", *table(head, body, left=(0, 1, 8)), ""]
        if self.best is not None:
            return "\n".join([*lines, f"fastest that fits: {self.best.choice}", "", self.call(), "", self.yaml()])
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
        choice = _chosen(self, row).choice
        options = choice.options()
        mesh = options.pop("device_mesh", None)
        args = [f"{k}={v!r}" for k, v in options.items()]
        if mesh is not None:
            args.insert(0, f'device_mesh=init_device_mesh("cuda", {mesh}, mesh_dim_names=("replicate", "shard"))')
        if self.precision in ("bf16", "fp16"):
            kind = {"bf16": "bfloat16", "fp16": "float16"}[self.precision]
            args.append(f"mixed_precision=shardkit.MixedPrecision(param_dtype=torch.{kind})")
        return f"model = shardkit.auto_wrap(model, {', '.join(args)})"

    def yaml(self, row: Row | None = None) -> str:
        """The configuration file of Accelerate for a row (None: the best)."""
        choice = _chosen(self, row).choice
        machines = max(1, self.ranks // self.gpu.node)
        notes = []
        if choice.strategy == "zero2":
            notes.append(
                "# Accelerate has no name for zero2, which keeps parameters between steps; this is the next one."
            )
        if 0 < choice.recomputed < 1:
            notes.append(f"# The plan recomputes {choice.recomputed:.0%} of the blocks; Accelerate knows all or none.")
        lines = [
            *notes,
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: FSDP",
            f"mixed_precision: {'no' if self.precision == 'fp32' else self.precision}",
            f"num_machines: {machines}",
            f"num_processes: {self.ranks}",
            "fsdp_config:",
            "  fsdp_version: 1",
            f"  fsdp_sharding_strategy: {_ACCELERATE[choice.strategy]}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_activation_checkpointing: {str(choice.recomputed > 0).lower()}",
            f"  fsdp_offload_params: {str(choice.offload).lower()}",
            "  fsdp_use_orig_params: true",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {**dataclasses.asdict(r), "step_seconds": r.seconds.total, "settings": str(r.choice)} for r in self.rows
        ]
        out = dict(
            model=self.model, ranks=self.ranks, gpu=dataclasses.asdict(self.gpu), precision=self.precision, rows=rows
        )
        if self.best is not None:
            return {**out, "fits": True, "call": self.call(), "yaml": self.yaml()}
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

    Candidates are all strategies, hybrids where there are several machines, with no, half and all blocks checkpointed,
    and offload of shards where nothing else fits. They are simulated in order of predicted speed (`speed.py`), until
    `keep` of them fit. One that surely takes more memory than one that did not fit is not simulated.

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
    flops = _flops(origin, batch, loss_fn)
    common = dict(optimizer=optimizer, loss_fn=loss_fn, mixed_precision=precision)
    search = _Search(origin, batch, card, precision, flops, common, say)
    rows = search.run(search.candidates(gpus), gpus, keep)
    smallest = None
    if not any(r.fits for r in rows):
        rows += search.run(search.candidates(gpus, offload=True), gpus, keep, rows)
    if not any(r.fits for r in rows):
        smallest = search.smallest(gpus)
    ordered = sorted(rows, key=lambda r: (not r.fits, r.seconds.total))
    return Plan(origin.name, gpus, card, precision, tuple(ordered), smallest)


class _Search:
    """Simulates choices for one model."""

    def __init__(self, origin: Source, batch, card: Device, precision: str, flops: float, common: dict, say):
        self.origin, self.batch, self.card, self.precision = origin, batch, card, precision
        self.flops, self.common, self.say = flops, common, say
        self._traffic: dict[tuple, Traffic] = {}

    def candidates(self, gpus: int, offload: bool = False) -> list[Choice]:
        node = self.card.node
        mesh = (gpus // node, node) if gpus > node and gpus % node == 0 else None
        out = []
        for strategy in _STRATEGIES:
            hybrid = strategy.startswith("hybrid")
            if (hybrid and mesh is None) or (offload and strategy not in ("full", "hybrid")):
                continue
            for share in (0.0, 0.5, 1.0):
                out.append(Choice(strategy, share, offload, mesh if hybrid else None))
        return out

    def run(self, choices: list[Choice], gpus: int, keep: int, known: list[Row] | None = None) -> list[Row]:
        timed = sorted(((self._seconds(c, gpus), c) for c in choices), key=lambda pair: pair[0].total)
        rows, failed = [], [r.choice for r in known or () if not r.fits and r.live is not None]
        for time, choice in timed:
            sent = self._sent(choice, gpus)
            worse = next((f for f in failed if f.needs_no_more_than(choice)), None)
            if worse is not None:
                rows.append(Row(choice, False, time, sent, None, None, f"takes at least what {worse} does"))
                continue
            if sum(r.fits for r in rows) >= keep:
                break
            rows.append(self._simulate(choice, gpus, time, sent))
            if not rows[-1].fits and rows[-1].live is not None:
                failed.append(choice)
        return rows

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
        most = sorted(report.phases[phase].categories.items(), key=lambda x: -x[1])[:2]
        why = f"peak in {phase}: " + ", ".join(f"{c} {size(n)}" for c, n in most)
        return Row(
            choice,
            fits,
            time,
            sent,
            live,
            reserved,
            why if fits else f"{size(reserved - self.card.usable)} over; {why}",
        )

    def _estimate(self, choice: Choice, gpus: int):
        model = self.origin.config if self.origin.config is not None else self.origin.make
        options = {**self.common, **choice.options()}
        return estimate(model, self.batch, world_size=gpus, deferred_init=True, **options)

    def _seconds(self, choice: Choice, gpus: int) -> Seconds:
        low = self.precision != "fp32"
        return seconds(self._sent(choice, gpus), self.flops, choice.recomputed, low, self.card)

    def _sent(self, choice: Choice, gpus: int) -> Traffic:
        key = (choice.strategy, choice.offload, choice.mesh, gpus)
        if key not in self._traffic:
            options = {k: v for k, v in choice.options().items() if k != "activation_checkpointing"}
            mesh = options.pop("device_mesh", None)
            with _pretence(self.origin.name, gpus) as watch:
                options = _checked({**options, "mixed_precision": self.precision, "process_group": groups(mesh)})
                self._traffic[key] = traffic(_build(watch.ledger, self.origin, options, True, None, None))
        return self._traffic[key]

    def smallest(self, gpus: int) -> tuple[int, Choice] | None:
        """The fewest GPUs, in whole machines, on which the most frugal settings fit."""
        for offload in (False, True):
            choice = Choice("full", 1.0, offload)
            if self._simulate(choice, gpus, *self._cost(choice, gpus)).live is None:  # nothing to checkpoint
                choice = Choice("full", 0.0, offload)
            found = self._fewest(choice, gpus)
            if found is not None:
                return found, choice
        return None

    def _fewest(self, choice: Choice, gpus: int) -> int | None:
        """Doubles the number of machines until the choice fits, then halves the interval."""
        node = self.card.node
        low, high = gpus, max(2 * gpus, node)
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
def _pretence(name: str, gpus: int) -> Iterator[Watch]:
    watch = Watch(Ledger(), {_VALUE: _zero})
    with world(gpus), _sentences(name), no_memory(), watch:
        yield watch


def _flops(origin: Source, batch: Any, loss_fn) -> float:
    """Floating-point operations of one forward, by torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with _pretence(origin.name, 1) as watch:
        watch.ledger.open = False
        model = origin.make()
        watch.answers[_VALUE] = padding.answer
        counter = FlopCounterMode(display=False)
        with padding.nothing_masked(), counter, torch.no_grad():
            (loss_fn or default_loss)(model, _batch(origin, batch))
    return float(counter.get_total_flops())
