"""Step time, CPU time and bytes sent of every implementation, side by side in one run.

    python bench/step_time.py                       # 2 and 4 CPU ranks, or all GPUs
    torchrun --nproc-per-node 8 bench/step_time.py  # the ranks that are there

All implementations live in the same processes, with the same weights and batches, and take turns: a few steps each,
round after round, so that whatever else the machine does hits all of them. The minimum over rounds is what an
implementation costs; the median says how noisy the machine was. They then share one heap as well, and who grew it for
whom shows in page faults; `--separate` gives each its own processes instead of its turn.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import common
import report
import torch
import torch.distributed as dist


class Contestant:
    """One implementation with its model and optimizer."""

    def __init__(self, impl: str, args, device):
        self.impl, self.args, self.device = impl, args, device
        model = common.build(args, device)
        self.model = common.wrap(impl, model, common.unit_modules(model, args.units), device)
        self.optim = common.optimizer(impl, self.model)
        self.steps = 0
        self.wall: list[float] = []  # ms per step, the slowest rank, by round
        self.cpu: list[float] = []  # ms per step, mean over the ranks, by round
        self.loss = float("nan")

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = common.loss_of(self.model, common.batch(self.args, self.device, self.steps))
            loss.backward()
            self.optim.step()
            self.optim.zero_grad()
            self.steps += 1
        self.loss = loss.detach()  # read after the clock has stopped

    def timed(self, steps: int) -> None:
        gc.collect()  # nobody pays for another's garbage
        _synchronize(self.device)
        wall, cpu = time.perf_counter(), time.process_time()  # process_time adds up all threads, gloo's among them
        self.train(steps)
        _synchronize(self.device, barrier=False)
        spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, spent.tolist())
        self.wall.append(max(w for w, _ in everyone) * 1e3 / steps)
        self.cpu.append(sum(c for _, c in everyone) / len(everyone) * 1e3 / steps)

    def result(self) -> dict:
        with common.SentBytes() as counter:  # one more step, because counting takes time
            self.train(1)
        mean = self.loss.double().clone()
        dist.all_reduce(mean)
        return dict(
            impl=self.impl, wall_ms=self.wall, cpu_ms=self.cpu, wall_min=min(self.wall), cpu_min=min(self.cpu),
            wall_median=statistics.median(self.wall), cpu_median=statistics.median(self.cpu),
            sent_bytes=counter.sent, collectives=counter.calls, loss=mean.item() / dist.get_world_size(),
        )  # fmt: skip


def _synchronize(device, barrier=True) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if barrier:
        dist.barrier()


def worker(args, device) -> dict:
    impls, skipped = common.available(args.impl)
    field = [Contestant(impl, args, device) for impl in impls]
    for one in field:
        one.train(3)  # orders are recorded, buckets rebuilt, buffers and optimizer states made
    for r in range(args.rounds):
        for one in field[r % len(field) :] + field[: r % len(field)]:  # nobody always follows the same neighbour
            one.timed(args.steps)
    return dict(
        world=dist.get_world_size(), backend=dist.get_backend(), steps=3 + args.rounds * args.steps,
        parameters=sum(p.numel() for p in common.build(args, torch.device("meta")).parameters()),
        rows=[one.result() for one in field], skipped=skipped,
    )  # fmt: skip


def show(result: dict) -> str:
    if not result["rows"]:
        return f"{result['world']} ranks: nothing to measure"
    rows = {row["impl"]: row for row in result["rows"]}

    def ratio(row, of, key):
        return f"{row[key] / rows[of][key]:.2f}" if of in rows else "-"

    lines = [
        [
            row["impl"], f"{row['wall_min']:.1f}", f"{row['wall_median']:.1f}", ratio(row, "ddp", "wall_min"),
            f"{row['cpu_min']:.1f}", f"{row['cpu_median']:.1f}", ratio(row, "fsdp2", "cpu_min"),
            f"{row['sent_bytes'] / 1e6:.1f}", row["collectives"], f"{row['loss']:.7f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    text = report.table(
        ["", "wall ms", "median", "/ ddp", "CPU ms", "median", "/ fsdp2", "MB sent", "calls", "loss"], lines
    )
    text += report.losses(result["rows"])
    for key, what in (("cpu_min", "CPU ms"), ("wall_min", "wall ms")):
        text += report.against_peers({impl: row[key] for impl, row in rows.items()}, what)
    size = f"{result['parameters'] / 1e6:.1f} M parameters"
    head = f"{result['world']} ranks, {result['backend']}, {size}, per step and rank"
    return f"{head}; loss after {result['steps'] + 1} steps:\n\n{text}"


def plot(results: list[dict]):
    panels = [
        (f"{r['world']} ranks, {what}", {row["impl"]: row[key] for row in r["rows"]})
        for r in results
        for what, key in (("CPU", "cpu_min"), ("wall", "wall_min"))
    ]
    return report.bars(panels, "ms per step, the lowest round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, nargs="+", help="world sizes, one after another")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each implementation in a round")
    separate = "ranks of its own for each implementation, one after another (not under torchrun)"
    parser.add_argument("--separate", action="store_true", help=separate)
    common.add_model_options(parser)
    report.add_options(parser)
    args = parser.parse_args()
    results = (common.launch_each if args.separate else common.launch)(worker, args, args.nproc)
    if results:
        report.write("step_time", args, results, show, plot)


if __name__ == "__main__":
    main()
