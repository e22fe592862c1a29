"""Results of the benchmarks: Markdown tables, JSON and pictures, with the machine they were measured on.

python bench/report.py --plot bench/results/FILE.json  # prints, and draws, what was saved before
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from common import IMPLS, PEERS, ROOT, WRAPPERS


def machine() -> dict:
    """Where and when: enough to tell two result files apart."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), model)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(
        cpu=model, cores=os.cpu_count(), load=[round(x, 2) for x in os.getloadavg()], gpus=gpus,
        torch=torch.__version__, python=platform.python_version(), versions=_versions(), commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


def _versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found = {}
    for name in ("fairscale", "deepspeed"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _commit() -> str | None:
    def git(*command):
        return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):  # no git here, or a release without a repository
        return None


def table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; the first column is left-aligned. Floats print with their own format: give strings."""
    cells = [header, *[[str(c) for c in row] for row in rows]]
    width = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row):
        first, *others = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, width)))
        return " | ".join(["| " + first, *others]) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(width)) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def against_peers(values: dict[str, float], what: str) -> str:
    """A table of ours beside the lowest of those that shard the same, which says where ours is above it."""
    rows = []
    for ours, peers in PEERS.items():
        theirs = {impl: values[impl] for impl in peers if impl in values}
        if ours in values and theirs:
            best = min(theirs, key=theirs.get)
            ratio = values[ours] / theirs[best]
            rows.append([
                ours, f"{values[ours]:.1f}", best, f"{theirs[best]:.1f}", f"{ratio:.3f}", "ABOVE" if ratio > 1 else "",
            ])  # fmt: skip
    return "\n\n" + table(["", what, "lowest peer", what, "ratio", ""], rows) if rows else ""


def losses(rows: list[dict]) -> str:
    """A warning for each that computed something else than the first; the unwrapped model has one rank's batches."""
    rows = [row for row in rows if row["impl"] != "local"]
    return "".join(
        f"\nWARNING: the loss of {row['impl']} differs from that of {rows[0]['impl']} by more than 1e-5"
        for row in rows
        if not abs(row["loss"] - rows[0]["loss"]) <= 1e-5 * abs(rows[0]["loss"])
    )


def bars(panels: list[tuple[str, dict[str, float]]], unit: str, lines: list[tuple[str, float]] | None = None):
    """A figure with one panel of horizontal bars per (title, value by implementation): ours in blue under those that
    shard the same. `lines`: a label and a value for each panel."""
    from matplotlib import pyplot

    groups = [(*PEERS[ours], ours) for ours in PEERS]
    named = {impl for group in groups for impl in group}
    rows = max(len(values) for _, values in panels)
    across = min(len(panels), 2 if len(panels) % 2 == 0 else 3)
    down = -(-len(panels) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(5.5 * across, 0.3 + down * (1.2 + 0.32 * rows)), squeeze=False
    )
    for i, (axes, (title, values)) in enumerate(zip(grid.flat, panels)):
        top, labels = 0.0, {}
        for group in [tuple(impl for impl in values if impl not in named), *groups]:
            for impl in group:
                if impl in values:
                    axes.barh(top, values[impl], color="#4269d0" if impl in PEERS else "#b4b9c0")
                    axes.text(values[impl], top, f" {values[impl]:.4g}", va="center", fontsize=8)
                    labels[top] = impl
                    top += 1
            top += 0.5 if any(impl in values for impl in group) else 0
        axes.set_yticks(list(labels), labels.values(), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(values.values()))
        axes.set_xlabel(unit)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if lines:
            axes.axvline(lines[i][1], color="#c00", linewidth=1, linestyle="--", label=lines[i][0])
            axes.legend(fontsize=8, loc="lower right")
    return figure


def add_options(parser: argparse.ArgumentParser, impls=IMPLS) -> None:
    parser.add_argument("--impl", nargs="+", default=list(impls), choices=list(WRAPPERS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--save", action="store_true", help="write the JSON to bench/results/ as well")
    parser.add_argument("--plot", action="store_true", help="draw bench/results/NAME-DATE.png; needs matplotlib")


def write(name: str, args, results: list[dict], show, plot=None) -> None:
    """Prints each result with `show(result) -> str`, or all of them as JSON; saves, and draws them with
    `plot(results) -> figure`, when asked to."""
    where = machine()
    record = dict(benchmark=name, machine=where, arguments=vars(args), results=results)
    if args.json:
        print(json.dumps(record, indent=1))
    else:
        _print(record, show)
    day = where["date"].replace(" UTC", "").replace(" ", "-").replace(":", "")
    path = ROOT / "bench" / "results" / f"{name}-{day}.json"
    path.parent.mkdir(exist_ok=True)
    if args.save:
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
    if args.plot:
        _draw(record, plot, path.with_suffix(".png"))


def _print(record: dict, show) -> None:
    where = record["machine"]
    versions = "".join(f", {name} {version}" for name, version in where.get("versions", {}).items())
    print(f"{record['benchmark']}: {where['date']}, commit {where['commit']}, torch {where['torch']}{versions},")
    print(f"python {where['python']}, {where['cores']} x {where['cpu']}, load {where['load'][0]}, ", end="")
    print(f"GPUs: {where['gpus'] or 'none'}")
    for result in record["results"]:
        print("\n" + show(result))
        for impl, why in result.get("skipped", {}).items():
            print(f"{impl} was skipped ({why})")


def _draw(record: dict, plot, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as e:
        print(f"no picture: {e}", file=sys.stderr)
        return
    if plot is None:
        print(f"no picture: {record['benchmark']} has none", file=sys.stderr)
        return
    matplotlib.use("agg")
    figure = plot(record["results"])
    where = record["machine"]
    gpus = f"{len(where['gpus'])} x {where['gpus'][0]}" if where["gpus"] else f"{where['cores']} x {where['cpu']}"
    figure.suptitle(f"{record['benchmark']}, {where['date']}, {gpus}, torch {where['torch']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path.resolve().relative_to(ROOT)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints saved results again.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plot", action="store_true", help="draw FILE.png")
    args = parser.parse_args()
    for path in args.files:
        record = json.loads(path.read_text())
        script = importlib.import_module(record["benchmark"])
        _print(record, script.show)
        if args.plot:
            _draw(record, getattr(script, "plot", None), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
