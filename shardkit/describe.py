"""`describe(model)`: what was made of a model, as data and as a table."""

from __future__ import annotations

import dataclasses

import torch.nn as nn

from .checkpoint.full import steps_of
from .runtime.flat_param import FlatParam
from .runtime.step import Step
from .runtime.unit import Unit


@dataclasses.dataclass(frozen=True)
class UnitRow:
    """One unit. Counts are elements, sizes bytes per rank."""

    name: str
    module: str
    parameters: int
    """Elements of the parameters it owns."""
    trainable: int
    dtypes: str
    """Master dtype, and compute dtype where it differs."""
    padding: int
    """Elements of all ranks' slices that belong to no parameter."""
    shard_bytes: int
    """The local shards, in the master dtype."""
    full_bytes: int
    """The gathered buffers, in the compute dtype: what the unit adds while it computes."""
    sent_bytes: int
    """What a rank sends for it in one training step, with bandwidth-optimal collectives."""
    borrows: tuple[str, ...]
    """Parameters of other units that it gathers as well."""


@dataclasses.dataclass(frozen=True)
class Description:
    """`rows`, one per unit in the order of the module tree; `str()` gives a table."""

    strategy: str
    shard_ranks: int
    replicas: int
    rows: tuple[UnitRow, ...]

    def __str__(self) -> str:
        head = ("unit", "module", "parameters", "trainable", "dtype", "pad elements", "shard", "full", "sent/step")
        body = [
            (r.name or "(root)", r.module, f"{r.parameters:,}", f"{r.trainable:,}", r.dtypes)
            + (f"{r.padding:,}", *(_size(n) for n in (r.shard_bytes, r.full_bytes, r.sent_bytes)))
            for r in self.rows
        ]
        total = [sum(getattr(r, field) for r in self.rows) for field in ("parameters", "trainable", "padding")]
        sizes = [_size(sum(getattr(r, f) for r in self.rows)) for f in ("shard_bytes", "full_bytes", "sent_bytes")]
        body.append(("total", "", f"{total[0]:,}", f"{total[1]:,}", "", f"{total[2]:,}", *sizes))
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
        lines = [f"strategy {self.strategy}: {self.shard_ranks} shards x {self.replicas} replicas"]
        for row in [head, *body]:
            cells = [row[i].ljust(w) if i in (0, 1, 4) else row[i].rjust(w) for i, w in enumerate(widths)]
            lines.append("  ".join(cells).rstrip())
        lines += [f"{r.name or '(root)'} borrows {', '.join(r.borrows)}" for r in self.rows if r.borrows]
        return "\n".join(lines)


def describe(model: nn.Module) -> Description:
    """A table of the units of a sharded model: parameters, dtypes, padding, bytes per rank, bytes sent per step.

    Reads this rank's plan; no communication. Raises StateError for a model that is not sharded.
    """
    steps = steps_of(model)
    step = steps[0]
    return Description(
        strategy=step.options.sharding_strategy,
        shard_ranks=step.mesh.shard.size,
        replicas=step.mesh.replicate.size,
        rows=tuple(_row(s, unit) for s in steps for unit in s.units),
    )


def _row(step: Step, unit: Unit) -> UnitRow:
    flats = unit.flats
    dtypes = dict.fromkeys(
        _short(f.shard.dtype) + ("" if f.compute_dtype == f.shard.dtype else f" as {_short(f.compute_dtype)}")
        for f in flats
    )
    return UnitRow(
        name=unit.name,
        module=type(unit.module).__name__,
        parameters=sum(f.layout.used for f in flats),
        trainable=sum(f.numel_of(i) for f in flats for i, p in enumerate(f.params) if p.requires_grad),
        dtypes=", ".join(dtypes),
        padding=sum(f.layout.padding for f in flats),
        shard_bytes=sum(f.shard.numel() * f.shard.element_size() for f in flats),
        full_bytes=sum(f.layout.numel * f.compute_dtype.itemsize for f in flats),
        sent_bytes=sum(_sent(step, unit, f) for f in flats),
        borrows=tuple(e.flat.names[e.index] for e in unit.entries if e.flat not in flats),
    )


def _sent(step: Step, unit: Unit, flat: FlatParam) -> int:
    """Bytes a rank sends for one flat parameter in a step: gathers, the reduction, and the sum across replicas."""
    n, m = flat.mesh.shard.size, flat.mesh.replicate.size
    full = flat.layout.numel * flat.compute_dtype.itemsize
    gathers = 1
    for user in flat.users:
        gathers += step.options.drop_after_forward and flat.needed_in_backward and user is not step.units[0]
        gathers += user is not unit and step.options.drop_after_forward  # a borrower gathers in its own forward
    trained = any(p.requires_grad for p in flat.params)
    reduced = flat.layout.numel * flat.reduce_dtype.itemsize if trained else 0
    return round((gathers * full + reduced) * (n - 1) / n + 2 * reduced / n * (m - 1) / m)


def _short(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
