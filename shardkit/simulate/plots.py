"""Reports as pictures: memory over a step, stacked by category, and peaks of several reports. PNG, or one HTML page
that holds its pictures and tables."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .ledger import CATEGORIES

if TYPE_CHECKING:
    from .report import Report

_COLOURS = dict(zip(
    CATEGORIES,
    ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#9c6b4e", "#9498a0", "#ffc6d9", "#1b1b1b"),
))  # fmt: skip


_PICTURES = (".png", ".html", ".htm")


def _pyplot():
    try:
        import matplotlib
    except ImportError as e:
        raise ConfigError(f"plots need matplotlib ({e}). pip install 'shardkit[plots]', or ask for JSON.") from e
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def timeline(report: Report, limit: int | None = None):
    """A figure: bytes by category over the events of a run, stacked; phases as bands; `limit`: a line at these
    bytes."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(11, 5))
    rows = report.timeline
    times = [row["time"] for row in rows]
    used = [c for c in CATEGORIES if any(row["bytes"].get(c) for row in rows)]
    layers = [[row["bytes"].get(c, 0) / 1e9 for row in rows] for c in used]
    axes.stackplot(times, layers, labels=used, colors=[_COLOURS[c] for c in used], step="post", linewidth=0)
    before, free = None, times[0]  # free: where the next name of a phase has room
    for row in rows:
        if (row["phase"], row["step"]) != before:
            before = row["phase"], row["step"]
            axes.axvline(row["time"], color="#888", linewidth=0.5)
            at = max(row["time"], free)
            axes.text(at, 1.01, row["phase"], transform=axes.get_xaxis_transform(), fontsize=7, rotation=30)
            free = at + 0.025 * (times[-1] - times[0])
    if limit:
        axes.axhline(limit / 1e9, color="#c00", linewidth=1, linestyle="--", label="memory")
    axes.set(ylabel="GB alive on this rank", xlabel="allocations and frees", xlim=(times[0], times[-1]))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, reverse=True)
    figure.suptitle(
        f"{report.about.get('model')} on {report.about.get('world_size')} ranks, {report.source}", fontsize=10
    )
    figure.tight_layout()
    return figure


def against_world_size(reports: Sequence[Report], limit: int | None = None):
    """A figure: peak bytes by category against world size, stacked bars."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    ordered = sorted(reports, key=lambda r: r.about["world_size"])
    names = [str(r.about["world_size"]) for r in ordered]
    base = [0.0] * len(ordered)
    for c in CATEGORIES:
        heights = [r.categories.get(c, 0) / 1e9 for r in ordered]
        if any(heights):
            axes.bar(names, heights, bottom=base, label=c, color=_COLOURS[c])
            base = [a + b for a, b in zip(base, heights)]
    if limit:
        axes.axhline(limit / 1e9, color="#c00", linewidth=1, linestyle="--", label="memory")
    axes.set(xlabel="ranks", ylabel="GB at the peak of a rank")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, reverse=True)
    first = ordered[0]
    figure.suptitle(f"{first.about.get('model')}, {first.source}", fontsize=10)
    figure.tight_layout()
    return figure


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    _pyplot().close(figure)
    return buffer.getvalue()


def figures(reports: Sequence[Report], limit: int | None = None) -> list:
    """One timeline, or for reports of several world sizes first the comparison."""
    worlds = {r.about.get("world_size") for r in reports}
    first = [against_world_size(reports, limit)] if len(worlds) > 1 else []
    return first + [timeline(r, limit) for r in reports]


def save(reports: Sequence[Report], path: str | Path, limit: int | None = None) -> None:
    """Writes `path`: a `.png` of the first figure, or an `.html` page with all figures and tables, without links.

    Raises ConfigError for another ending, or where matplotlib is missing.
    """
    path = Path(path)
    check(path)
    if path.suffix == ".png":
        path.write_bytes(_png(figures(reports, limit)[0]))
    else:
        path.write_text(page(reports, limit), encoding="utf-8")


def check(path: str | Path) -> None:
    """Raises ConfigError where a report cannot be saved as `path`: another ending, or pictures without matplotlib."""
    if Path(path).suffix not in (".json", *_PICTURES):
        raise ConfigError(f"{path}: a report is saved as .json, .png or .html.")
    if Path(path).suffix in _PICTURES:
        _pyplot()


def page(reports: Sequence[Report], limit: int | None = None) -> str:
    """A complete HTML page with its pictures inside."""
    pictures = "\n".join(
        f'<img alt="memory" src="data:image/png;base64,{base64.b64encode(_png(figure)).decode()}">'
        for figure in figures(reports, limit)
    )
    texts = "\n".join(f"<pre>{html.escape(str(report))}</pre>" for report in reports)
    style = "body{font-family:sans-serif;max-width:75em;margin:2em auto}img{max-width:100%}pre{overflow-x:auto}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>shardkit: memory</title>'
        f"<style>{style}</style></head><body><h1>Memory of one rank</h1>{pictures}{texts}</body></html>\n"
    )
