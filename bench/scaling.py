"""Memory of one rank at any world size, found by running the engine on tensors without memory.

    python bench/scaling.py                       # all three parts
    python bench/scaling.py --part zero           # the memory table of the ZeRO paper, from the running engine
    python bench/scaling.py --part worlds         # one model on 8 to 4096 ranks
    python bench/scaling.py --part cost           # what simulating costs: Llama 7B on 64 ranks, 70B on 512

Needs neither a GPU nor more than a CPU core and a GB of memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import report as bench_report  # noqa: E402
import torch  # noqa: E402

# The paper's table 1 (arXiv 1910.02054), GB of model states: 2-byte weights and gradients, K = 12 bytes of optimizer.
# (billions of parameters, layers, width) of a transformer without its embedding, 12 layers x width^2.
SIZES = {7.5: (38, 4096), 128: (162, 8192 - 64), 1000: (128, 25600)}
PAPER = {
    ("P_os", 7.5): {4: 52.5, 16: 35.6, 64: 31.4}, ("P_os", 128): {64: 536}, ("P_os", 1000): {64: 4187, 1024: 4012},
    ("P_os+g", 7.5): {4: 41.2, 16: 21.6, 64: 16.6}, ("P_os+g", 128): {64: 284},
    ("P_os+g", 1000): {64: 2219, 1024: 2014},
    ("P_os+g+p", 7.5): {4: 30, 16: 7.5, 64: 1.9}, ("P_os+g+p", 128): {64: 32},
    ("P_os+g+p", 1000): {64: 250, 1024: 15.6},
}  # fmt: skip
# How each stage is run: its strategy, and micro-batches a step. P_os keeps whole gradients, which the engine does under
# no_sync() only; it reduces them during backward otherwise.
STAGES = {"P_os": ("zero1", 2), "P_os+g": ("zero2", 1), "P_os+g+p": ("full", 1)}


class Stack(torch.nn.Module):
    """The matrices of a transformer's blocks, one unit each: 12 width^2 parameters a layer."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Layer(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.out(self.qkv(x).chunk(3, -1)[2])
        return x + self.down(torch.relu(self.up(x)))


def zero_row(stage: str, billions: float, ranks: int, paper: float) -> dict:
    """One cell of the table: model states at the fullest moment of backward or step, and one unit's gathering apart."""
    import shardkit
    from shardkit.simulate.ledger import FULL, GRADIENTS, OPTIMIZER, PARAMETERS

    layers, width = SIZES[billions]
    strategy, accumulate = STAGES[stage]
    report = shardkit.estimate(
        lambda: Stack(layers, width), torch.zeros(1, 1, width), "adamw-fused", ranks, deferred_init=True,
        sharding_strategy=strategy, accumulate=accumulate, policy={Layer},
        mixed_precision=shardkit.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )  # fmt: skip
    parameters = report.extra["parameters"]
    scale = billions * 1e9 / parameters  # the shapes make 7.6 billion, say, of the paper's 7.5
    states = (PARAMETERS, GRADIENTS, OPTIMIZER, *([FULL] if strategy != "full" else []))

    # Of P_os, the last micro-batch's forward: all whole gradients are there, and none is reduced yet. Of the others,
    # the beginning of the optimizer's step, when all gradients are.
    held = report.phases["forward" if accumulate > 1 else "step"].categories
    engine = sum(held.get(c, 0) for c in states) * scale / 1e9
    fp32 = 2 * parameters * scale / ranks / 1e9 if stage == "P_os+g" else 0.0
    unit = 12 * width**2 * 2 / 1e9
    return dict(
        stage=stage, billions=billions, ranks=ranks, paper=paper, engine=engine, gradients_fp32=fp32,
        error=(engine - fp32 - paper) / paper, unit=unit, peak=report.training_peak * scale / 1e9,
        seconds=report.extra["seconds"],
    )  # fmt: skip


def zero_part(args) -> list[dict]:
    rows = []
    for (stage, billions), cells in PAPER.items():
        for ranks, paper in cells.items():
            if billions <= args.largest:
                rows.append(zero_row(stage, billions, ranks, paper))
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def worlds_part(args) -> list[dict]:
    import shardkit

    rows = []
    for ranks in args.worlds:
        report = shardkit.estimate(
            args.model,
            (1, args.seq),
            "adamw",
            ranks,
            deferred_init=True,
            mixed_precision="bf16",
            activation_checkpointing=True,
        )
        extra = report.extra
        rows.append(dict(
            ranks=ranks, peak=report.training_peak, reserved=extra["reserved_bytes"], sent=extra["sent_bytes"],
            categories=report.phases["backward"].categories, seconds=extra["seconds"],
        ))  # fmt: skip
        print({k: v for k, v in rows[-1].items() if k != "categories"}, file=sys.stderr, flush=True)
    return rows


COSTS = [("llama-7b", 64, 60), ("llama-70b", 512, 180)]  # model, ranks, seconds that are allowed


def cost(name: str, ranks: int, seq: int, results) -> None:
    """Runs in a process of its own, so that memory is its own."""
    import shardkit

    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    report = shardkit.estimate(name, (1, seq), "adamw", ranks, deferred_init=True, mixed_precision="bf16")
    results.put(dict(
        model=name, ranks=ranks, wall=time.perf_counter() - wall, cpu=time.process_time() - cpu,
        rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, peak=report.training_peak,
        parameters=report.extra["parameters"], operators=report.extra["operators"],
    ))  # fmt: skip


def cost_part(args) -> list[dict]:
    context, rows = multiprocessing.get_context("spawn"), []
    for name, ranks, allowed in COSTS:
        results = context.Queue()
        process = context.Process(target=cost, args=(name, ranks, args.seq, results))
        process.start()
        rows.append({**results.get(timeout=3600), "allowed": allowed})
        process.join()
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def show(result: dict) -> str:
    parts = []
    if result.get("zero"):
        rows = [
            [r["stage"], r["billions"], r["ranks"], f"{r['paper']:g}", f"{r['engine']:.2f}",
             f"{r['gradients_fp32']:.2f}", f"{100 * r['error']:+.2f}", f"{r['unit']:.2f}", f"{r['peak']:.2f}"]
            for r in result["zero"]
        ]  # fmt: skip
        head = ["stage", "10^9 parameters", "ranks", "paper GB", "engine GB", "float32 gradients", "error % without",
                "one unit GB", "peak GB"]  # fmt: skip
        parts.append(bench_report.table(head, rows))
    if result.get("worlds"):
        rows = [[r["ranks"], *(f"{r[k] / 1e9:.2f}" for k in ("peak", "reserved", "sent")), f"{r['seconds']:.0f}"]
                for r in result["worlds"]]  # fmt: skip
        parts.append(
            bench_report.table(["ranks", "peak GB", "reserved GB", "sent GB a step", "seconds to simulate"], rows)
        )
    if result.get("cost"):
        rows = [[r["model"], r["ranks"], f"{r['wall']:.0f}", f"{r['cpu']:.0f}", r["allowed"], f"{r['rss'] / 1e9:.2f}",
                 f"{r['peak'] / 1e9:.2f}"] for r in result["cost"]]  # fmt: skip
        parts.append(bench_report.table(["model", "ranks", "wall s", "CPU s", "allowed s", "RSS GB", "peak GB"], rows))
    return "\n\n".join(parts)


def plot(results: list[dict]):
    """The second part: what is alive at the fullest moment of backward, and the peak, against the number of ranks."""
    from matplotlib import pyplot

    from shardkit.simulate.plots import _COLOURS

    rows = [row for result in results for row in result.get("worlds", ())]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    names, base = [str(row["ranks"]) for row in rows], [0.0] * len(rows)
    for category, colour in _COLOURS.items():
        heights = [row["categories"].get(category, 0) / 1e9 for row in rows]
        if max(heights, default=0) > 0.01:
            axes.bar(names, heights, bottom=base, label=category, color=colour)
            base = [a + b for a, b in zip(base, heights)]
    axes.plot(names, [row["peak"] / 1e9 for row in rows], "k_", markersize=28, label="peak of a step")
    axes.set(xlabel="ranks", ylabel="GB alive on a rank in backward")
    axes.legend(fontsize=8, markerscale=0.5)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=("zero", "worlds", "cost"), default=["cost", "zero", "worlds"])
    parser.add_argument(
        "--largest", type=float, default=1000, help="leave out the table's larger models; 10^9 parameters"
    )
    parser.add_argument("--model", default="llama-7b", help="of --part worlds")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    bench_report.add_options(parser)
    args = parser.parse_args()
    parts = dict(zero=zero_part, worlds=worlds_part, cost=cost_part)
    bench_report.write("scaling", args, [{part: parts[part](args) for part in args.part}], show, plot)


if __name__ == "__main__":
    main()
