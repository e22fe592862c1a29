"""Host overhead per unit: what an implementation adds to a unit's forward and backward besides moving data.

    python bench/overhead.py

One process, the fake backend with 8 ranks (collectives return at once and move nothing), 24 units of a few 8x8
parameters, on the CPU. The unwrapped model's figures are subtracted and the rest divided by the number of units.
CPU time is the minimum over many repeats; Python bytecodes and operator calls repeat exactly, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import common
import report
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

WORLD = 8
UNWRAPPED = "unwrapped"
# Their work follows buckets of gradients and the optimizer's step, not the model's modules.
NO_UNITS = ("local", "ddp", "oss", "fairscale", "deepspeed1", "deepspeed2")


class Unit(nn.Module):
    """A chain of small matrix products, one per parameter: as little work of its own as there can be."""

    def __init__(self, parameters: int):
        super().__init__()
        self.names = [f"w{i}" for i in range(parameters)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.eye(8)))

    def forward(self, x):
        for name in self.names:
            x = x @ getattr(self, name)
        return x


class Stack(nn.Module):
    def __init__(self, units: int, parameters: int):
        super().__init__()
        self.units = nn.ModuleList(Unit(parameters) for _ in range(units))

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return x


class Operators(TorchDispatchMode):
    """Counts the operator calls that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Bytecodes:
    """Counts the Python instructions that this thread executes inside."""

    def __init__(self):
        self.calls = 0

    def _trace(self, frame, event, arg):
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.calls += 1
        return self._trace

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


class Subject:
    def __init__(self, impl: str, args, parameters: int):
        model = Stack(args.layers, parameters)
        units = list(model.units)
        self.impl = impl
        self.model = model if impl == UNWRAPPED else common.wrap(impl, model, units, torch.device("cpu"))
        self.x = torch.ones(8, 8)
        for _ in range(4):  # orders are recorded, buffers made
            self.backward(self.forward())

    def forward(self):
        return self.model(self.x).sum()

    def backward(self, loss) -> None:
        loss.backward()

    def clear(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def seconds(self, steps: int) -> float:
        """CPU time of one forward and backward."""
        total = 0.0
        for _ in range(steps):
            self.clear()
            start = time.process_time()
            self.backward(self.forward())
            total += time.process_time() - start
        return total / steps

    def count(self, counter) -> tuple[int, int]:
        """What `counter()` counts in (forward, backward)."""
        self.clear()
        with counter() as forward:
            loss = self.forward()
        with counter() as backward:
            self.backward(loss)
        return forward.calls, backward.calls


def measure(args, impls: list[str], parameters: int) -> list[dict]:
    subjects = [Subject(impl, args, parameters) for impl in [UNWRAPPED, *impls]]
    spent: dict[str, list[float]] = {s.impl: [] for s in subjects}
    gc.collect()
    for _ in range(args.repeats):  # in turns, so that a noisy minute hits everybody
        for subject in subjects:
            spent[subject.impl].append(subject.seconds(args.steps))
    counts = {s.impl: (*s.count(Bytecodes), *s.count(Operators)) for s in subjects}
    for subject in subjects:
        again = (*subject.count(Bytecodes), *subject.count(Operators))
        assert again == counts[subject.impl], f"{subject.impl}: counts changed from {counts[subject.impl]} to {again}"
    base, base_counts = spent[UNWRAPPED], counts[UNWRAPPED]
    rows = []
    for impl in impls:
        extra = [(a - b) / args.layers for a, b in zip(counts[impl], base_counts)]
        rows.append(dict(
            impl=impl, parameters=parameters,
            us=(min(spent[impl]) - min(base)) / args.layers * 1e6,
            us_median=(statistics.median(spent[impl]) - statistics.median(base)) / args.layers * 1e6,
            bytecodes_forward=extra[0], bytecodes_backward=extra[1],
            operators_forward=extra[2], operators_backward=extra[3],
        ))  # fmt: skip
    return rows


def run(args) -> dict:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    impls, skipped = common.available(i for i in args.impl if i not in NO_UNITS)
    skipped |= {impl: "it has no units" for impl in args.impl if impl in NO_UNITS}
    rows = [row for parameters in args.parameters for row in measure(args, impls, parameters)]
    dist.destroy_process_group()
    return dict(world=WORLD, rows=rows, skipped=skipped)


def show(result: dict) -> str:
    fsdp2 = {r["parameters"]: r for r in result["rows"] if r["impl"] == "fsdp2"}
    lines = []
    for r in result["rows"]:
        other = fsdp2.get(r["parameters"])
        code = r["bytecodes_forward"] + r["bytecodes_backward"]
        code2 = other and other["bytecodes_forward"] + other["bytecodes_backward"]
        lines.append([
            r["impl"], r["parameters"], f"{r['us']:.0f}", f"{r['us_median']:.0f}",
            f"{r['us'] / other['us']:.2f}" if other else "-",
            f"{r['bytecodes_forward']:.0f} + {r['bytecodes_backward']:.0f}", f"{code / code2:.2f}" if other else "-",
            f"{r['operators_forward']:.1f} + {r['operators_backward']:.1f}",
        ])  # fmt: skip
    peers = "".join(report.against_peers(values, f"us, {n} parameters") for n, values in _by_size(result))
    header = ["", "parameters", "us", "median", "/ fsdp2", "bytecodes fwd + bwd", "/ fsdp2", "operators fwd + bwd"]
    return "Per unit, beyond the unwrapped model:\n\n" + report.table(header, lines) + peers


def _by_size(result: dict) -> list[tuple[int, dict[str, float]]]:
    rows = result["rows"]
    return [
        (n, {r["impl"]: r["us"] for r in rows if r["parameters"] == n}) for n in sorted({r["parameters"] for r in rows})
    ]


def plot(results: list[dict]):
    panels = [(f"{n} parameters a unit", values) for n, values in _by_size(results[0])]
    return report.bars(panels, "CPU us per unit, forward and backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[2, 9, 40], help="parameters per unit")
    parser.add_argument("--layers", type=int, default=24, help="units")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2, help="steps in one repeat")
    report.add_options(parser, (*common.PEERS["shardkit"], "shardkit"))
    args = parser.parse_args()
    report.write("overhead", args, [run(args)], show, plot)


if __name__ == "__main__":
    main()
