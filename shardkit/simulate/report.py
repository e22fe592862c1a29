"""What a simulated or a measured run comes to: peak bytes by category, phase and unit, and a timeline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .ledger import CATEGORIES, PHASES, TEMPORARIES, Ledger, Visit

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes alive at one moment."""

    total: int
    categories: dict[str, int]
    """Bytes by category, in the order of `ledger.CATEGORIES`, without zeros."""
    units: dict[str, dict[str, int]]
    """The same by unit, the largest first; "" holds what belongs to none."""


@dataclasses.dataclass(frozen=True)
class Report:
    """`str()` gives a table. All sizes are bytes of one rank.

    source: "predicted" or "measured". about: what was run: model, world size, options, versions.
    phases: the fullest moment of each phase, over all steps. timeline: see `Ledger.timeline`.
    """

    source: str
    about: dict[str, Any]
    phases: dict[str, Moment]
    timeline: list[dict]
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Figures besides live bytes: what an allocator would reserve, bytes sent per step, seconds it took."""

    @property
    def peak_phase(self) -> str:
        return max((p for p in self.phases), key=lambda p: self.phases[p].total)

    @property
    def peak(self) -> int:
        """The most bytes that were alive at any time."""
        return self.phases[self.peak_phase].total

    @property
    def training_peak(self) -> int:
        """As `peak`, without the phase of building the model."""
        return max(moment.total for phase, moment in self.phases.items() if phase != "init")

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return self.phases[self.peak_phase].categories

    @property
    def units(self) -> dict[str, dict[str, int]]:
        """Bytes by unit and category at the peak."""
        return self.phases[self.peak_phase].units

    # ---------------------------------------------------------------------------------------------- in and out

    def to_dict(self) -> dict[str, Any]:
        return dict(version=VERSION, peak=self.peak, peak_phase=self.peak_phase, **dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that `to_dict` or `save` wrote. Raises ValueError for another version."""
        if data.get("version") != VERSION:
            raise ValueError(f"a report of version {data.get('version')!r}; this one reads {VERSION}.")
        phases = {name: Moment(**moment) for name, moment in data["phases"].items()}
        return cls(data["source"], data["about"], phases, data["timeline"], data["extra"])

    def save(self, path: str | Path) -> None:
        """Writes JSON, a PNG or a self-contained HTML page, by the name's ending."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            return
        from .plots import save

        save([self], path)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        return cls.from_dict(json.loads(Path(path).read_text()))

    # -------------------------------------------------------------------------------------------------- tables

    def __str__(self) -> str:
        phases = [p for p in PHASES if p in self.phases]
        used = [c for c in CATEGORIES if any(self.phases[p].categories.get(c) for p in phases)]
        rows = [[c, *(size(self.phases[p].categories.get(c, 0)) for p in phases)] for c in used]
        rows.append(["total", *(size(self.phases[p].total) for p in phases)])
        about = ", ".join(f"{k} {v}" for k, v in self.about.items() if v not in (None, "", {}))
        lines = [f"{self.source} peak {size(self.peak)} in {self.peak_phase} ({about})", ""]
        lines += table(["at the peak of", *phases], rows)
        lines += ["", f"largest units at the peak in {self.peak_phase}:"]
        units = [(name, sum(parts.values()), parts) for name, parts in self.units.items() if name][:8]
        lines += table(
            ["unit", "bytes", "of which"],
            [[name, size(total), ", ".join(f"{c} {size(n)}" for c, n in sorted(parts.items(), key=lambda x: -x[1])[:3])]
             for name, total, parts in units],
            left=(0, 2),
        )  # fmt: skip
        lines += [f"{name.replace('_', ' ')}: {_figure(name, value)}" for name, value in self.extra.items()]
        return "\n".join(lines)


def make(ledger: Ledger, source: str, about: dict[str, Any], extra: dict[str, Any] | None = None) -> Report:
    """The report of a closed ledger."""
    fullest: dict[str, Visit] = {}
    for visit in ledger.visits:
        if visit.phase not in fullest or visit.peak > fullest[visit.phase].peak:
            fullest[visit.phase] = visit
    phases = {name: moment(ledger, visit.peak_at, visit.within) for name, visit in fullest.items()}
    return Report(source, about, phases, ledger.timeline(), extra or {})


def moment(ledger: Ledger, time: int, within: int = 0) -> Moment:
    """What was alive at a moment; `within`: bytes inside an operator besides."""
    parts = ledger.breakdown(time)
    if within:
        parts["", TEMPORARIES] = parts.get(("", TEMPORARIES), 0) + within
    categories = {c: sum(n for (_, k), n in parts.items() if k == c) for c in CATEGORIES}
    units: dict[str, dict[str, int]] = {}
    for (unit, category), n in parts.items():
        units.setdefault(unit, {})[category] = n
    ordered = dict(sorted(units.items(), key=lambda item: -sum(item[1].values())))
    return Moment(sum(parts.values()), {c: n for c, n in categories.items() if n}, ordered)


def compare(predicted: Report, measured: Report) -> str:
    """Two reports side by side: a table of peaks by phase and category, with the relative error of the first."""
    rows = []
    for phase in PHASES:
        if phase in predicted.phases and phase in measured.phases:
            a, b = predicted.phases[phase], measured.phases[phase]
            rows.append([phase, size(a.total), size(b.total), _error(a.total, b.total)])
            for c in CATEGORIES:
                x, y = a.categories.get(c, 0), b.categories.get(c, 0)
                if x or y:
                    rows.append([f"  {c}", size(x), size(y), _error(x, y)])
    return "\n".join(table(["", predicted.source, measured.source, "error"], rows))


def _error(a: int, b: int) -> str:
    return f"{100 * (a - b) / b:+.2f} %" if b else "" if a == b else "new"


def table(head: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in [head, *rows]
    ]


def size(count: float) -> str:
    """Bytes for people: decimal units, as memory is sold; "0" stays short."""
    if not count:
        return "0"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return (
                f"{count:.0f} {unit}"
                if unit == "B"
                else f"{count:.3g} {unit}"
                if count < 100
                else f"{count:.0f} {unit}"
            )
        count /= 1000
    return f"{count:.3g} TB"


def _figure(name: str, value: Any) -> str:
    if name.endswith("bytes"):
        return size(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
