"""Peak bytes of live tensor memory per rank and phase of a step, beside what an ideal implementation would need.

    python bench/peak_memory.py                      # 2 and 4 CPU ranks, or all GPUs
    torchrun --nproc-per-node 8 bench/peak_memory.py

On the CPU the figures come from the profiler's record of every allocation: exact bytes, without what gloo's own threads
allocate. On a GPU they come from the caching allocator. Each implementation has ranks of its own, so that what one
leaves behind is not freed under another; under torchrun they follow each other in the same ranks, and a line says where
that happened.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import gc
import time

import common
import report
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("forward", "backward", "optimizer")


class CpuMeter:
    """Live bytes on the CPU, from one profile over everything.

    The profile misses what other threads free, and gloo's may hold the last reference to a finished collective's
    tensor. Such a block counts until its address is given out again. So figures are never too small, and the smallest
    over the steps is the one to trust.
    """

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)

    def phase(self, name: str):
        return record_function(f"phase:{name}")

    def spans(self) -> dict[str, dict[str, int]]:
        """Per phase, where its peak was lowest (the first time aside): bytes at its start and at its peak."""
        phases, events = [], []
        nodes = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            if node.tag == torch._C._profiler._EventType.Allocation:
                events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
            elif node.name.startswith("phase:"):
                phases.append((node.start_time_ns, node.end_time_ns, node.name[6:]))
        times, totals = _live_bytes(sorted(events))
        found: dict[str, list[dict[str, int]]] = {}
        for start, end, name in sorted(phases):
            first, last = bisect.bisect_left(times, start), bisect.bisect_right(times, end)
            span = dict(start=totals[first], peak=max(totals[first : last + 1]))  # totals[i]: before event i
            found.setdefault(name, []).append(span)
        return {name: min(spans[1:] or spans, key=lambda s: s["peak"]) for name, spans in found.items()}


def _live_bytes(events: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    """Times of the events (time, address, size; below zero it frees), and the live bytes before each and at last."""
    live: dict[int, int] = {}
    addresses: list[int] = []
    times, totals = [], [0]
    for time_ns, address, size in events:
        total = totals[-1]
        if size < 0:
            if address in live:
                total -= live.pop(address)
                addresses.remove(address)
        else:
            at = bisect.bisect_left(addresses, address)
            if at and addresses[at - 1] + live[addresses[at - 1]] > address:
                at -= 1
            while at < len(addresses) and addresses[at] < address + size:  # freed unseen
                total -= live.pop(addresses.pop(at))
            addresses.insert(at, address)
            live[address] = size
            total += size
        times.append(time_ns)
        totals.append(total)
    return times, totals


class CudaMeter:
    """The same from the caching allocator."""

    def __enter__(self):
        self._spans: dict[str, dict[str, int]] = {}
        return self

    def __exit__(self, *error):
        pass

    @contextlib.contextmanager
    def phase(self, name: str):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        yield
        torch.cuda.synchronize()
        self._spans[name] = dict(start=start, peak=torch.cuda.max_memory_allocated())

    def spans(self) -> dict[str, dict[str, int]]:
        """Per phase, the last time: bytes at its start and at its peak."""
        return self._spans


@contextlib.contextmanager
def settled_collectives(milliseconds: float):
    """Gloo's threads let go of a finished collective's tensors a little late, so that peaks differ between runs by a
    unit. A short sleep after each wait lets them."""
    work = torch._C._distributed_c10d.Work
    wait = work.wait

    def wait_and_settle(self, *args, **kwargs):
        out = wait(self, *args, **kwargs)
        time.sleep(milliseconds / 1e3)
        return out

    work.wait = wait_and_settle
    try:
        yield
    finally:
        work.wait = wait


def train(impl: str, args, device, meter) -> float:
    model = common.build(args, device)
    model = common.wrap(impl, model, common.unit_modules(model, args.units), device, reshard=True)
    optim = common.optimizer(impl, model)
    tokens = [common.batch(args, device, step) for step in range(args.steps)]
    for step in range(args.steps):
        with meter.phase(f"{impl}/forward"):
            loss = common.loss_of(model, tokens[step])
        with meter.phase(f"{impl}/backward"):
            loss.backward()
        with meter.phase(f"{impl}/optimizer"):
            optim.step()
        optim.zero_grad()
        value = loss.item()
        del loss
    return value


def mark(meter, name: str) -> None:
    """Notes what is alive now."""
    gc.collect()
    with meter.phase(name):
        pass


def unwrapped(args, device, meter) -> None:
    """Marks the moments when the last block of the unwrapped model gets a gradient."""
    model, tokens = common.build(args, device), common.batch(args, device, 0)
    mark(meter, "unwrapped/before")

    def arrived(p):
        with meter.phase(f"unwrapped/gradient {id(p)}"):
            pass

    for p in model.blocks[-1].parameters():
        p.register_post_accumulate_grad_hook(arrived)
    common.loss_of(model, tokens).backward()


def ideal(args, spans) -> dict[str, int]:
    """The least that full sharding needs while the last block gets its gradients: 12 bytes per parameter (itself and
    two optimizer states, in float32) over the ranks, the activations that are alive then in the unwrapped model, the
    root's parameters and the head's gradient, and one block's parameters and gradients."""
    model = common.build(args, torch.device("meta"))

    def size(module):
        return sum(4 * p.numel() for p in module.parameters())

    total, block, head = size(model), size(model.blocks[0]), size(model.head)
    root = total - sum(map(size, model.blocks))
    live = max(span["start"] for name, span in spans.items() if name.startswith("unwrapped/gradient"))
    activations = live - spans["unwrapped/before"]["start"] - block - head
    if args.units == "fine":  # the embedding, which backward does not need, and the head, done with, are units
        root -= size(model.embed) + head
    return dict(sharded=3 * total // dist.get_world_size(), activations=activations, root=root + head, block=2 * block)


def worker(args, device) -> dict:
    impls, skipped = common.available(args.impl)
    common.ADAMW.update(foreach=not args.fused, fused=args.fused)
    losses = {}
    with CudaMeter() if device.type == "cuda" else CpuMeter() as meter:
        unwrapped(args, device, meter)
        with settled_collectives(args.settle if device.type == "cpu" else 0):
            for impl in impls:
                mark(meter, f"{impl}/before")
                losses[impl] = train(impl, args, device, meter)
                mark(meter, f"{impl}/after")
    spans, rows = meter.spans(), []
    for impl in impls:
        before = spans[f"{impl}/before"]["start"]
        peaks = {phase: spans[f"{impl}/{phase}"]["peak"] - before for phase in PHASES}
        everyone: list = [None] * dist.get_world_size()
        gone = max(0, before - spans[f"{impl}/after"]["start"])
        dist.all_gather_object(everyone, (peaks, gone, losses[impl]))
        by_rank = [max(peaks.values()) for peaks, _, _ in everyone]
        rows.append(dict(
            impl=impl, loss=sum(loss for _, _, loss in everyone) / len(everyone),
            phases={phase: max(peaks[phase] for peaks, _, _ in everyone) for phase in PHASES},
            peak=max(by_rank), peak_by_rank=by_rank, gone=max(gone for _, gone, _ in everyone),
        ))  # fmt: skip
    return dict(world=dist.get_world_size(), rows=rows, ideal=ideal(args, spans), skipped=skipped)


def show(result: dict) -> str:
    best = sum(result["ideal"].values())
    lines = [
        [row["impl"], *(f"{row['phases'][p] / 1e6:.1f}" for p in PHASES), f"{row['peak'] / 1e6:.1f}",
         f"{row['peak'] / best:.3f}", f"{row['loss']:.7f}"]
        for row in result["rows"]
    ]  # fmt: skip
    lines.append(["ideal", "", "", "", f"{best / 1e6:.1f}", "1.000", ""])
    parts = " + ".join(f"{k} {v / 1e6:.1f}" for k, v in result["ideal"].items())
    table = report.table(["", *PHASES, "peak", "/ ideal", "loss"], lines)
    head = f"{result['world']} ranks, peak MB (1e6 bytes) of live tensors, by phase, of the rank with most"
    peers = report.against_peers({row["impl"]: row["peak"] / 1e6 for row in result["rows"]}, "MB")
    for row in result["rows"]:
        if row["gone"] > 1e6:
            peers += f"\nWARNING: {row['gone'] / 1e6:.1f} MB that others had left were freed while {row['impl']} ran, "
            peers += "and its peak may be that much higher: run it alone"
    return f"{head}:\n\n{table}\n\nideal of full sharding = {parts}{peers}{report.losses(result['rows'])}"


def plot(results: list[dict]):
    panels = [(f"{r['world']} ranks", {row["impl"]: row["peak"] / 1e6 for row in r["rows"]}) for r in results]
    ideals = [("ideal of full sharding", sum(r["ideal"].values()) / 1e6) for r in results]
    return report.bars(panels, "peak MB of live tensors in a training step, the rank with most", ideals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, nargs="+", help="world sizes, one after another")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fused", action="store_true", help="fused AdamW instead of foreach, which needs 4P/N more")
    parser.add_argument("--settle", type=float, default=2.0, help="ms of sleep after each wait on the CPU")
    common.add_model_options(parser)
    report.add_options(parser, (*common.IMPLS, *common.PEERS["grad_op"], "grad_op"))
    args = parser.parse_args()
    results = common.launch_each(worker, args, args.nproc)
    if results:
        report.write("peak_memory", args, results, show, plot)


if __name__ == "__main__":
    main()
