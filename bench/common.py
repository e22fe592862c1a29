"""What the benchmarks share: the model, one way to wrap it per implementation, bytes sent, and ranks.

Every script runs as `python bench/NAME.py`, which starts its own ranks, and under `torchrun` as it is. Ranks use
NCCL and one GPU each where there are GPUs, gloo on the CPU elsewhere.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))  # measures this checkout, installed or not

CPU_SIZES = (2, 4)


# ---------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):  # (batch, seq, dim), twice
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, an untied head. 27.4 M parameters with the default sizes."""

    def __init__(self, dim: int, layers: int, vocab: int, heads: int, seq: int):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):  # (batch, seq) -> (batch, seq, vocab)
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    for name, default in dict(dim=512, layers=6, vocab=8192, heads=8, seq=128, batch=2).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    units = "blocks: every block, and the root with the rest; fine: the embedding and the head as well"
    parser.add_argument("--units", choices=("blocks", "fine"), default="blocks", help=units)


def build(args, device) -> Transformer:
    torch.manual_seed(0)  # the same weights on every rank and for every implementation
    return Transformer(args.dim, args.layers, args.vocab, args.heads, args.seq).to(device)


def batch(args, device, step: int) -> torch.Tensor:
    """Tokens of one step on this rank. The same batches come round again, so that the loss falls."""
    generator = torch.Generator().manual_seed(1000 * (step % 4) + dist.get_rank())
    return torch.randint(0, args.vocab, (args.batch, args.seq), generator=generator).to(device)


def loss_of(model, tokens) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def unit_modules(model: Transformer, units: str) -> list[nn.Module]:
    return list(model.blocks) + ([model.embed, model.head] if units == "fine" else [])


# ---------------------------------------------------------------------------------- one function per implementation


def _local(model, units, device, reshard):
    return model  # no communication: what is left is computing, with the optimizer's whole work on every rank


def _ddp(model, units, device, reshard):
    return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _fsdp1(model, units, device, reshard):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    chosen = set(units)  # it never reshards its root after forward, whatever `reshard` is
    # On the CPU it raises without a device_id.
    return FullyShardedDataParallel(
        model, auto_wrap_policy=CustomPolicy(lambda m: m in chosen), device_id=device, use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if reshard is False else ShardingStrategy.FULL_SHARD,
    )  # fmt: skip


def _fsdp2(model, units, device, reshard):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in units:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def _shardkit(model, units, device, reshard, strategy="full"):
    import shardkit

    chosen = set(units)
    options = {} if reshard is None or strategy != "full" else {"reshard_after_forward": reshard}
    return shardkit.auto_wrap(model, policy=lambda m: m in chosen, sharding_strategy=strategy, **options)


def _oss(model, units, device, reshard):
    """ZeRO-1 as fairscale has it: DDP, and an optimizer that keeps whole parameters' states on one rank each."""
    from fairscale.optim import OSS

    model = _ddp(model, units, device, reshard)
    model.sharded_optimizer = OSS(model.parameters(), torch.optim.AdamW, **ADAMW)
    return model


def _fairscale(model, units, device, reshard):
    """ZeRO-2 as fairscale has it. Its reduce buffer is off: with it, gradients are wrong after zero_grad()."""
    from fairscale.nn import ShardedDataParallel
    from fairscale.optim import OSS

    return ShardedDataParallel(model, OSS(model.parameters(), torch.optim.AdamW, **ADAMW), reduce_buffer_size=0)


def _import_deepspeed():
    """Without a GPU it must be told that it runs on the CPU, before it is imported."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by the names that torch now deprecates, hundreds of times a step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed

    return deepspeed


def _deepspeed(model, units, device, reshard, stage):
    """ZeRO in float32 with our AdamW, without the clipping that is its default.

    Its buckets hold a unit; by default they are larger than the whole model. Gradients stay where autograd puts them
    until they are reduced, which is where its peak is lowest. Stage 3 shards small weights too, and gathers all again
    in backward unless `reshard` is False; by default it keeps a model of this size until it was used.
    """
    deepspeed = _import_deepspeed()
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    unit = max(sum(p.numel() for p in module.parameters()) for module in units)
    zero = dict(stage=stage, reduce_bucket_size=unit, allgather_bucket_size=unit, contiguous_gradients=False)
    if stage == 3:
        kept = int(1e9) if reshard is False else 0
        zero.update(
            stage3_max_live_parameters=kept, stage3_max_reuse_distance=kept, stage3_prefetch_bucket_size=unit,
            stage3_param_persistence_threshold=0,
        )  # fmt: skip
    config = dict(
        train_micro_batch_size_per_gpu=1, gradient_clipping=0.0, zero_optimization=zero,
        zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False,
    )  # fmt: skip
    linear = F.linear
    optim = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = deepspeed.initialize(model=model, optimizer=optim, config=config)[0]
    # Stage 3 replaces it for the whole process, for good. It may have its own, and the others theirs.
    replaced, F.linear, forward = F.linear, linear, engine.forward

    def forward_with_its_own(*inputs):
        F.linear = replaced
        try:
            return forward(*inputs)
        finally:
            F.linear = linear

    engine.forward = forward_with_its_own
    return engine


class _EngineOptimizer:
    """DeepSpeed's engine owns the step, and clears gradients in it."""

    def __init__(self, engine):
        self.step = engine.step

    def zero_grad(self) -> None:
        pass


def _keeping(wrapper, model, units, device, reshard):
    return wrapper(model, units, device, False)


ADAMW = dict(lr=3e-4, foreach=True)
WRAPPERS = {
    "local": _local, "ddp": _ddp, "fsdp1": _fsdp1, "fsdp2": _fsdp2, "shardkit": _shardkit,
    "oss": _oss, "fairscale": _fairscale, "zero1": partial(_shardkit, strategy="zero1"),
    "zero2": partial(_shardkit, strategy="zero2"), "grad_op": partial(_shardkit, strategy="grad_op"),
    **{f"deepspeed{stage}": partial(_deepspeed, stage=stage) for stage in (1, 2, 3)},
    "fsdp1_grad_op": partial(_keeping, _fsdp1), "fsdp2_grad_op": partial(_keeping, _fsdp2),
    "deepspeed3_grad_op": partial(_keeping, partial(_deepspeed, stage=3)),
}  # fmt: skip
# What shards the same: ours, and those it is measured against.
PEERS = {
    "zero1": ("oss", "deepspeed1"),
    "zero2": ("fairscale", "deepspeed2"),
    "shardkit": ("fsdp1", "fsdp2", "deepspeed3"),
    "grad_op": ("fsdp1_grad_op", "fsdp2_grad_op", "deepspeed3_grad_op"),
}
IMPLS = ("ddp", *(impl for ours in ("zero1", "zero2", "shardkit") for impl in (*PEERS[ours], ours)))


def optimizer(impl: str, model) -> torch.optim.Optimizer:
    """AdamW for what `wrap` returned; some own theirs, because they shard it rather than the parameters."""
    if impl.startswith("deepspeed"):
        return _EngineOptimizer(model)
    if impl == "oss":
        return model.sharded_optimizer
    if impl == "fairscale":
        return model._sharded_optimizers[0]
    return torch.optim.AdamW(model.parameters(), **ADAMW)


def wrap(impl: str, model, units: list[nn.Module], device, reshard: bool | None = None):
    """`model`, trained by `impl` on all ranks with the modules `units` and the root as units.

    reshard: drop full parameters after forward; None leaves it to the implementation (all of them do so, FSDP1 and
    FSDP2 not for the root).
    """
    return WRAPPERS[impl](model, units, device, reshard)


def available(impls) -> tuple[list[str], dict[str, str]]:
    """Which of `impls` can be imported, and why the others are skipped."""
    good, skipped = [], {}
    for impl in impls:
        try:
            if impl in ("fairscale", "oss"):
                import fairscale  # noqa: F401
            elif impl.startswith("deepspeed"):
                _import_deepspeed()
            elif impl in ("shardkit", "grad_op", "zero1", "zero2"):
                import shardkit

                shardkit.auto_wrap  # noqa: B018 - a package under construction imports but wraps nothing
            elif impl.startswith("fsdp"):
                import torch.distributed.fsdp  # noqa: F401
            good.append(impl)
        except Exception as e:  # whatever a peer's installation fails with must not stop the others
            skipped[impl] = f"{type(e).__name__}: {e}"
    return good, skipped


# ------------------------------------------------------------------------------------------------------ bytes sent


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank must send for the collectives inside, by any caller, Python or C++.

    Every one reaches the dispatcher as an operator. What counts is what a bandwidth-optimal algorithm sends for a full
    tensor of S bytes on N ranks: S(N-1)/N, twice that for an all-reduce, S for a point-to-point send.
    """

    def __init__(self):
        super().__init__()
        self.sent = 0.0
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1]
        if func.namespace not in ("c10d", "_c10d_functional") or any(k in name for k in ("wait", "barrier", "recv")):
            return out
        sides = [*args, out] if func.namespace != "c10d" else args  # c10d's own operators write into an argument
        full = max((_nbytes(a) for a in sides), default=0)
        n = next((g.size() for g in map(_as_group, args) if g is not None), dist.get_world_size())
        kind = 2 if "all_reduce" in name or "allreduce" in name else 1
        self.sent += full if name.startswith("send") else kind * full * (n - 1) / n
        self.calls += 1
        return out


def _nbytes(x) -> int:
    if isinstance(x, torch.Tensor):
        return x.numel() * x.element_size()
    return sum(map(_nbytes, x)) if isinstance(x, (list, tuple)) else 0


def _as_group(x):
    if isinstance(x, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(x)
        except (RuntimeError, TypeError):  # a ReduceOp
            return None
    return None


# ----------------------------------------------------------------------------------------------------------- ranks


def launch(worker, args, sizes: list[int] | None) -> list[dict]:
    """Runs `worker(args, device)` on ranks, once per world size, and returns what rank 0 returned each time.

    Under torchrun: once, on the ranks that are there; an empty list on every rank but the first.
    sizes None: all GPUs, or 2 and then 4 CPU ranks.
    """
    if "RANK" in os.environ:
        result = _rank_main(worker, args, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return [] if result is None else [result]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; before the server starts, it passes it on
    multiprocessing.set_forkserver_preload(["torch"])  # ranks start in a second instead of half a minute
    results = []
    for world in sizes or ([torch.cuda.device_count()] if torch.cuda.is_available() else CPU_SIZES):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_child, (worker, args, world, folder), nprocs=world, start_method="forkserver")
            results.append(json.loads(Path(folder, "result.json").read_text()))
    return results


def launch_each(worker, args, sizes: list[int] | None) -> list[dict]:
    """As `launch`, but each implementation in ranks of its own, one after another. Under torchrun they share them."""
    if "RANK" in os.environ:
        return launch(worker, args, sizes)
    merged: list[dict] = []
    for impl in args.impl:
        results = launch(worker, argparse.Namespace(**vars(args) | {"impl": [impl]}), sizes)
        merged = merged or [result | {"rows": [], "skipped": {}} for result in results]
        for into, result in zip(merged, results):
            into["rows"] += result["rows"]
            into["skipped"] |= result["skipped"]
    return merged


def _child(rank, worker, args, world, folder):
    result = _rank_main(worker, args, rank, world, f"file://{folder}/store")
    if result is not None:
        Path(folder, "result.json").write_text(json.dumps(result))


def _rank_main(worker, args, rank, world, init_method):
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)
    try:
        result = worker(args, device)
        return result if rank == 0 else None
    finally:
        dist.destroy_process_group()
