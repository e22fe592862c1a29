"""Peak bytes of live tensor memory per rank and phase of a step, beside what an ideal implementation would need.

    python bench/peak_memory.py                      # 2 and 4 CPU ranks, or all GPUs
    torchrun --nproc-per-node 8 bench/peak_memory.py

On the CPU the figures come from the profiler's record of every allocation, from before the model is built: exact bytes,
except for copies that gloo's own threads make. On a GPU they come from the caching allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time

import common
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("forward", "backward", "optimizer")


class CpuMeter:
    """Live bytes on the CPU, from the profiler. Blocks that were allocated before `start` are not counted."""

    def start(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.start()

    def phase(self, name: str):
        return record_function(f"phase:{name}")

    def stop(self) -> dict[str, dict[str, int]]:
        """Per phase, of its last occurrence: bytes at its start, at its peak and at its end."""
        self._profile.stop()
        spans, events = {}, []
        nodes = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            if node.tag == torch._C._profiler._EventType.Allocation:
                # The allocator's own total, which also knows of blocks that another thread freed.
                events.append((node.start_time_ns, node.extra_fields.total_allocated, node.extra_fields.alloc_size))
            elif node.name.startswith("phase:"):
                span = (node.start_time_ns, node.end_time_ns)
                spans[node.name[6:]] = max(span, spans.get(node.name[6:], span))
        events.sort()
        base = events[0][1] - events[0][2]  # left over: what is freed while nobody profiles is never subtracted
        events = [(t, total - base) for t, total, _ in events]
        out = {}
        for name, (start, end) in spans.items():
            at_start = next((total for t, total in reversed(events) if t < start), 0)
            inside = [total for t, total in events if start <= t <= end]
            out[name] = dict(start=at_start, peak=max([at_start, *inside]), end=inside[-1] if inside else at_start)
        return out


class CudaMeter:
    def start(self) -> None:
        gc.collect()
        self._base = torch.cuda.memory_allocated()
        self._phases: dict[str, dict[str, int]] = {}

    @contextlib.contextmanager
    def phase(self, name: str):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated() - self._base
        yield
        torch.cuda.synchronize()
        peak, end = torch.cuda.max_memory_allocated() - self._base, torch.cuda.memory_allocated() - self._base
        self._phases[name] = dict(start=start, peak=peak, end=end)

    def stop(self) -> dict[str, dict[str, int]]:
        return self._phases


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


def measure(impl: str, args, device) -> dict:
    gc.collect()
    meter = CudaMeter() if device.type == "cuda" else CpuMeter()
    meter.start()
    model = common.build(args, device)
    model = common.wrap(impl, model, common.unit_modules(model, args.units), device, reshard=True)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=not args.fused, fused=args.fused)
    tokens = [common.batch(args, device, step) for step in range(args.steps)]
    for step in range(args.steps):  # the last one counts
        with meter.phase("forward"):
            loss = common.loss_of(model, tokens[step])
        with meter.phase("backward"):
            loss.backward()
        with meter.phase("optimizer"):
            optim.step()
        optim.zero_grad()
        value = loss.item()
        del loss
    return dict(impl=impl, loss=value, phases=meter.stop())


def activations(args, device) -> int:
    """Bytes that the unwrapped model keeps for backward."""
    meter = CudaMeter() if device.type == "cuda" else CpuMeter()
    model, tokens = common.build(args, device), common.batch(args, device, 0)
    meter.start()
    with meter.phase("forward"):
        loss = common.loss_of(model, tokens)
    span = meter.stop()["forward"]
    del loss
    return span["end"] - span["start"]


def ideal(args, device) -> dict[str, int]:
    """The least that full sharding needs at the start of the last block's backward: 12 bytes per parameter (itself and
    two optimizer states, in float32) over the ranks, what backward saved, the root's parameters and the head's
    gradient, and one block's parameters and gradients."""
    model = common.build(args, torch.device("meta"))

    def size(module):
        return sum(4 * p.numel() for p in module.parameters())

    total, block, head = size(model), size(model.blocks[0]), size(model.head)
    root = total - sum(map(size, model.blocks))
    if args.units == "fine":  # the embedding is a unit and not needed, the head is one and done with
        root, head = root - size(model.embed) - head, head
    return dict(sharded=3 * total // dist.get_world_size(), activations=activations(args, device), root=root + head,
                block=2 * block)  # fmt: skip


def worker(args, device) -> dict:
    impls, skipped = common.available(args.impl)
    with settled_collectives(args.settle if device.type == "cpu" else 0):
        rows = [measure(impl, args, device) for impl in impls]
    for row in rows:
        everyone = [None] * dist.get_world_size()
        peak = max(row["phases"][p]["peak"] for p in PHASES)
        dist.all_gather_object(everyone, peak)
        row.update(peak=max(everyone), peak_by_rank=everyone)
    return dict(world=dist.get_world_size(), rows=rows, ideal=ideal(args, device), skipped=skipped)


def show(result: dict) -> str:
    best = sum(result["ideal"].values())
    lines = [
        [row["impl"], *(f"{row['phases'][p]['peak'] / 1e6:.1f}" for p in PHASES), f"{row['peak'] / 1e6:.1f}",
         f"{row['peak'] / best:.3f}"]
        for row in result["rows"]
    ]  # fmt: skip
    lines.append(["ideal", "", "", "", f"{best / 1e6:.1f}", "1.000"])
    parts = " + ".join(f"{k} {v / 1e6:.1f}" for k, v in result["ideal"].items())
    table = common.table(["", *PHASES, "peak, any rank", "/ ideal"], lines)
    return f"{result['world']} ranks, peak MB (1e6 bytes) of live tensors per rank, by phase:\n\n{table}\n\nideal = {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, nargs="+", help="world sizes to run, one after another (not under torchrun)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fused", action="store_true", help="fused AdamW instead of foreach, which needs 4P/N more")
    parser.add_argument("--settle", type=float, default=2.0, help="ms of sleep after each wait on the CPU")
    common.add_model_options(parser)
    common.add_output_options(parser)
    args = parser.parse_args()
    results = common.launch(worker, args, args.nproc)
    if results:
        common.report("peak_memory", args, results, show)


if __name__ == "__main__":
    main()
