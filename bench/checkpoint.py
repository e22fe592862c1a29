"""Saving and loading a checkpoint, beside FSDP2 with torch.distributed.checkpoint, DeepSpeed and OSS, in one run.

    python bench/checkpoint.py                            # 2 and 4 CPU ranks, or all GPUs
    python bench/checkpoint.py --dim 1024 --nproc 2       # 1.1 GB with Adam's state

Model and AdamW state, written through to the disk by all. They take turns, round after round; each save gets a new
folder, as in a job that must not lose its last checkpoint, and the one before is removed outside the clock. `peak` is
what a rank's memory grows by while it saves or loads; `read` is what it asks of the file system (/proc/self/io).
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import common
import report
import torch
import torch.distributed as dist


def _fsdp2_save(path, model, optim):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=path)


def _fsdp2_load(path, model, optim):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    state, optim_state = get_state_dict(model, optim)
    loaded = {"model": state, "optim": optim_state}
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])


def _shardkit_save(path, model, optim):
    import shardkit

    shardkit.save_checkpoint(path, model, optim)


def _shardkit_load(path, model, optim):
    import shardkit

    shardkit.load_checkpoint(path, model, optim)


def _shardkit_async(path, model, optim):
    """How long training stands still; the rest is waited for outside the clock."""
    import shardkit

    _shardkit_async.handle = shardkit.async_save(path, model, optim)


def _deepspeed_save(path, engine, optim):
    """Every rank writes its part of the optimizer, with the weights as it keeps them for that; stages 1 and 2 have rank
    0 write the weights once more."""
    engine.save_checkpoint(str(path), tag="step")
    _write_through(path)


def _deepspeed_load(path, engine, optim):
    where, _ = engine.load_checkpoint(str(path), tag="step")
    if where is None:
        raise RuntimeError(f"DeepSpeed found nothing to load in {path}")


def _oss_save(path, model, optim):
    """There is no sharded checkpoint: rank 0 collects the optimizer's state and writes everything."""
    optim.consolidate_state_dict()
    if dist.get_rank() == 0:
        path.mkdir()
        torch.save({"model": model.module.state_dict(), "optim": optim.state_dict()}, path / "all.pt")
    dist.barrier()
    _write_through(path)


def _oss_load(path, model, optim):
    loaded = torch.load(path / "all.pt", map_location="cpu")
    model.module.load_state_dict(loaded["model"])
    optim.load_state_dict(loaded["optim"])


def _write_through(path) -> None:
    """For those that leave it to the system when their files reach the disk."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        descriptor = os.open(file, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    dist.barrier()


_OURS = {"save": _shardkit_save, "load": _shardkit_load, "async_save": _shardkit_async}
_DEEPSPEED = {"save": _deepspeed_save, "load": _deepspeed_load}
_OSS = {"save": _oss_save, "load": _oss_load}
ACTIONS = {
    "oss": _OSS, "deepspeed1": _DEEPSPEED, "zero1": _OURS, "fairscale": _OSS, "deepspeed2": _DEEPSPEED, "zero2": _OURS,
    "fsdp2": {"save": _fsdp2_save, "load": _fsdp2_load}, "deepspeed3": _DEEPSPEED, "shardkit": _OURS,
}  # fmt: skip


class Measured:
    """One action of one implementation: wall and CPU seconds by round, peak growth and bytes read of the worst rank.

    Of the peaks the largest round counts: memory that the heap kept from the round before does not show as growth.
    """

    def __init__(self):
        self.wall, self.cpu, self.peak, self.read = [], [], [], []

    def run(self, device, action, *args) -> None:
        gc.collect()
        dist.barrier()  # all write through to the disk: nobody leaves writing to the one after
        _reset_peak(device)
        before, read = _memory(device), _bytes_read()
        wall, cpu = time.perf_counter(), time.process_time()
        action(*args)
        if device.type == "cuda":
            torch.cuda.synchronize()
        mine = [time.perf_counter() - wall, time.process_time() - cpu, _peak(device) - before, _bytes_read() - read]
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for values, into in zip(zip(*everyone), (self.wall, self.cpu, self.peak, self.read)):
            into.append(max(values))

    def result(self) -> dict:
        return dict(
            wall=self.wall, wall_min=min(self.wall), wall_median=statistics.median(self.wall),
            cpu_min=min(self.cpu), peak=max(self.peak), read=min(self.read),
        )  # fmt: skip


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _reset_peak(device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark of resident memory
    except OSError:
        pass


def _memory(device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else _status("VmRSS")


def _peak(device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _bytes_read() -> int:
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0


def worker(args, device) -> dict:
    impls, skipped = common.available([i for i in args.impl if i in ACTIONS])
    field = {}
    for impl in impls:
        model = common.build(args, device)
        model = common.wrap(impl, model, common.unit_modules(model, args.units), device)
        optim = common.optimizer(impl, model)
        common.loss_of(model, common.batch(args, device, 0)).backward()
        optim.step()
        optim.zero_grad()
        field[impl] = model, optim, {name: Measured() for name in ACTIONS[impl]}
    holder = [tempfile.mkdtemp(prefix="bench-checkpoint-", dir=args.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(holder)
    folder = Path(holder[0])
    sizes = {}
    for n in range(args.rounds):
        for impl, (model, optim, measured) in field.items():
            path = folder / f"{impl}-{n}"
            for name, action in ACTIONS[impl].items():
                where = path.with_name(f"{path.name}-async") if name == "async_save" else path
                measured[name].run(device, action, where, model, optim)
                if name == "async_save":
                    _shardkit_async.handle.wait()
            sizes[impl] = sum(p.stat().st_size for p in path.rglob("*"))
            dist.barrier()
            if dist.get_rank() == 0:
                for old in folder.glob(f"{impl}-*"):
                    shutil.rmtree(old)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    rows = [
        dict(impl=impl, action=name, **one.result())
        for impl, (_, _, each) in field.items()
        for name, one in each.items()
    ]
    parameters = sum(p.numel() for p in common.build(args, torch.device("meta")).parameters())
    return dict(
        world=dist.get_world_size(), backend=dist.get_backend(), parameters=parameters, bytes=sizes, rows=rows,
        rounds=args.rounds, skipped=skipped,
    )  # fmt: skip


def show(result: dict) -> str:
    base = {row["action"]: row for row in result["rows"] if row["impl"] == "fsdp2"}

    def ratio(row):
        other = base.get(row["action"].removeprefix("async_"))
        return f"{row['wall_min'] / other['wall_min']:.2f}" if other else "-"

    lines = [
        [
            f"{row['impl']} {row['action']}", f"{row['wall_min']:.3f}", f"{row['wall_median']:.3f}", ratio(row),
            f"{row['cpu_min']:.3f}", f"{row['peak'] / 1e6:.1f}", f"{row['read'] / 1e6:.1f}",
        ]
        for row in sorted(result["rows"], key=lambda row: (row["action"].endswith("load"), row["action"], row["impl"]))
    ]  # fmt: skip
    text = report.table(["", "wall s", "median", "/ fsdp2", "CPU s", "peak MB", "read MB"], lines)
    sizes = ", ".join(f"{impl} {size / 1e6:.1f} MB" for impl, size in result["bytes"].items())
    head = f"{result['world']} ranks, {result['backend']}, {result['parameters'] / 1e6:.1f} M parameters with AdamW"
    for action, what in (("save", "save ms"), ("load", "load ms")):
        text += report.against_peers(_milliseconds(result, action), what)
    return f"{head}; {result['rounds']} rounds, the slowest rank. On disk: {sizes}.\n\n{text}"


def _milliseconds(result: dict, action: str) -> dict[str, float]:
    return {row["impl"]: 1e3 * row["wall_min"] for row in result["rows"] if row["action"] == action}


def plot(results: list[dict]):
    panels = [(f"{r['world']} ranks, {a}", _milliseconds(r, a)) for r in results for a in ("save", "load")]
    return report.bars(panels, "ms, the slowest rank, the fastest round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, nargs="+", help="world sizes, one after another")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; None: the system's folder for temporary files")
    common.add_model_options(parser)
    report.add_options(parser, ACTIONS)
    args = parser.parse_args()
    results = common.launch(worker, args, args.nproc)
    if results:
        report.write("checkpoint", args, results, show, plot)


if __name__ == "__main__":
    main()
