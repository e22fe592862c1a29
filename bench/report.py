"""Results of the benchmarks: a Markdown table or JSON, with the machine they were measured on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from common import IMPLS, ROOT, WRAPPERS


def machine() -> dict:
    """Where and when: enough to tell two result files apart."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), model)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(
        cpu=model, cores=os.cpu_count(), load=[round(x, 2) for x in os.getloadavg()], gpus=gpus,
        torch=torch.__version__, python=platform.python_version(), commit=_commit(),
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--impl", nargs="+", default=list(IMPLS), choices=list(WRAPPERS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--save", action="store_true", help="write the JSON to bench/results/ as well")


def write(name: str, args, results: list[dict], show) -> None:
    """Prints each result with `show(result) -> str`, or all of them as JSON; saves them when asked to."""
    where = machine()
    record = dict(benchmark=name, machine=where, arguments=vars(args), results=results)
    if args.json:
        print(json.dumps(record, indent=1))
    else:
        print(f"{name}: {where['date']}, commit {where['commit']}, torch {where['torch']}, python {where['python']},")
        print(f"{where['cores']} x {where['cpu']}, load {where['load'][0]}, GPUs: {where['gpus'] or 'none'}")
        for result in results:
            print("\n" + show(result))
            for impl, why in result.get("skipped", {}).items():
                print(f"{impl} was skipped ({why})")
    if args.save:
        day = where["date"].replace(" UTC", "").replace(" ", "-").replace(":", "")
        path = ROOT / "bench" / "results" / f"{name}-{day}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
