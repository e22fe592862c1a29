"""Train a GPT of a few million parameters on real text, sharded over every rank.

The text is the standard library's own sources, which every machine with Python has; tokens are bytes. The loop is an
ordinary PyTorch loop: `shardkit.auto_wrap` is the only line that knows how many ranks there are. It also shows a
validation split, gradient clipping, checkpoint and resume, a time budget, a loss curve and sampling.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py                        # 1.5 minutes on 2 CPU cores
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --compare --steps 60   # beside unsharded training
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --resume --steps 600   # go on from the checkpoint
    python examples/train_gpt.py --strategy grad_op                                       # one rank works as well

On GPUs (NCCL) it computes in bfloat16 with float32 master weights; on CPUs (gloo) in float32. The checkpoint and the
loss curve go to `--out`. A batch is cut among the ranks, so the losses do not depend on how many there are.
"""

import argparse
import copy
import math
import os
import resource
import sysconfig
import time
import zlib
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import shardkit

VOCAB = 256  # bytes
STRATEGIES = ("full", "grad_op", "zero1", "zero2", "none", "hybrid")


class Block(nn.Module):
    """Pre-norm transformer block; (batch, time, dim) in and out. `auto_wrap` makes each of these a unit."""

    def __init__(self, dim: int):
        super().__init__()
        self.heads = max(1, dim // 64)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, dim / heads)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer over bytes, with learned positions and an output head of its own."""

    def __init__(self, layers: int, dim: int, seq: int):
        super().__init__()
        self.seq = seq
        self.token, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what blocks add to the residual stream starts smaller, the more of them there are
                std = 0.02 / math.sqrt(2 * layers) if name.endswith(("proj.weight", "down.weight")) else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (batch, time, 256); with `targets` (batch, time) the mean cross entropy in nats per byte instead."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()  # the softmax of 16-bit logits would be too coarse
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library() -> tuple[torch.Tensor, ...]:
    """Training and validation text, 1-D uint8, some 9 MB in all. About every tenth file is for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests and installed packages differ from machine to machine; encodings and pydoc_data are tables, not prose.
    skipped = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    packages = [path for path in root.iterdir() if (path / "__init__.py").is_file() and path.name not in skipped]
    files = [*root.glob("*.py"), *(file for package in packages for file in package.rglob("*.py"))]
    parts = bytearray(), bytearray()
    for file in sorted(files):
        name = file.relative_to(root).as_posix()
        if not skipped.intersection(name.split("/")):
            # By name, so that a file is on the same side with every version of Python.
            parts[zlib.crc32(name.encode()) % 10 == 0].extend(file.read_bytes())
    return tuple(torch.frombuffer(part, dtype=torch.uint8) for part in parts)


def windows(text: torch.Tensor, starts: torch.Tensor, seq: int, device, whole=False) -> tuple[torch.Tensor, ...]:
    """Inputs and targets, both (sequences, seq) int64: this rank's part of a batch that all ranks know, or all."""
    if not whole:
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
    batch = text[starts[:, None] + torch.arange(seq + 1)].long().to(device)
    return batch[:, :-1], batch[:, 1:]


def arguments() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=formatter)
    option = parser.add_argument
    option("--strategy", default="full", choices=STRATEGIES, help="what is sharded")
    option("--compare", action="store_true", help="rank 0 trains the same model unsharded as well; in float32")
    option("--steps", type=int, default=300, help="optimizer steps")
    option("--seconds", type=float, default=70, help="time budget of training, checked when a report is due")
    option("--batch", type=int, default=8, help="sequences a step, over all ranks; rounded up to a multiple of them")
    option("--seq", type=int, default=128, help="bytes in a sequence")
    option("--layers", type=int, default=4, help="transformer blocks")
    option("--dim", type=int, default=256, help="width, a multiple of 64")
    option("--lr", type=float, default=1e-3, help="highest learning rate of a cosine with warmup")
    option("--log-every", type=int, default=25, help="steps between reports")
    option("--save-every", type=int, default=100, help="steps between checkpoints; the end always makes one")
    option("--resume", action="store_true", help="go on from the checkpoint in --out")
    option("--out", type=Path, default=Path("runs/gpt"), help="folder of results")
    args = parser.parse_args()
    if args.compare and args.resume:
        parser.error("--compare starts both models from the same fresh weights; leave out --resume")
    return args


def start() -> torch.device:
    """Join the process group that torchrun describes, or make one of a single rank; returns this rank's device."""
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    return device


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warmup over 5 % of the steps, then a cosine down to a tenth."""
    cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
    return args.lr * min(cosine, 20 * (step + 1) / args.steps)


def train_step(model: nn.Module, optim: torch.optim.Optimizer, rate: float, inputs, targets) -> torch.Tensor:
    """One step of any model, sharded or not; the loss before it. Gradients stay until the next, for `memory`."""
    optim.param_groups[0]["lr"] = rate
    optim.zero_grad()
    loss = model(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the global norm, though each rank holds only a part
    optim.step()
    return loss.detach()


def mean_over_ranks(values: list[torch.Tensor]) -> list[float]:
    """Of each value. All ranks call it."""
    stacked = torch.stack(values)
    dist.all_reduce(stacked)
    return (stacked / dist.get_world_size()).tolist()


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over windows spread evenly over the text, the same ones every time. All ranks call it."""
    starts = torch.linspace(0, len(text) - args.seq - 1, 8 * args.batch).long()
    losses = mean_over_ranks([model(*windows(text, part, args.seq, device)) for part in starts.split(args.batch)])
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, device: torch.device) -> str:
    """All ranks call it, as every forward gathers weights; with one seed all of them draw the same bytes."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -model.seq :].to(device))[0, -1].cpu()
        chosen = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


def save(path: Path, model: nn.Module, optim: torch.optim.Optimizer, **progress) -> None:
    """All ranks call it; rank 0 writes. Killed at any moment, it leaves a whole checkpoint: the old or the new one."""
    weights = shardkit.full_state_dict(model, rank0_only=True)
    state = shardkit.full_optim_state_dict(model, optim, rank0_only=True)
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")  # in the same folder: replacing is atomic only within a file system
        torch.save({"model": weights, "optim": state, **progress}, temporary)
        os.replace(temporary, path)


def memory(model: nn.Module, optim: torch.optim.Optimizer, device: torch.device) -> str:
    """A line for each rank. All ranks call it."""
    held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [value for state in optim.state.values() for value in state.values() if torch.is_tensor(value)]
    mib = sum(tensor.nbytes for tensor in held) / 2**20
    if device.type == "cuda":
        kind, peak = "CUDA memory", torch.cuda.max_memory_allocated() / 2**20
    else:  # there is no allocator to ask, only the system, for the whole process; Linux counts in KiB
        kind, peak = "resident memory (torch included)", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    line = f"rank {dist.get_rank()}: parameters, gradients, optimizer state {mib:.1f} MiB; peak {kind} {peak:.0f} MiB"
    lines = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    return "\n".join(lines)


def plot(path: Path, history: dict, entropy: float, title: str) -> None:
    train = history["train"]
    means = [sum(train[i - 10 : i]) / 10 for i in range(10, len(train) + 1)]
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150)
    axes.plot(range(1, len(train) + 1), train, color="#9ecae1", linewidth=0.8, label="training, each step")
    axes.plot(range(10, len(train) + 1), means, color="#2171b5", linewidth=1.8, label="training, last 10 steps")
    axes.plot(*zip(*history["validation"]), color="#d94801", marker="o", markersize=4, label="validation")
    axes.axhline(entropy, color="#555555", linestyle="--", linewidth=1.2, label=f"unigram entropy, {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title, xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    args = arguments()
    device = start()
    rank = dist.get_rank()
    say = tqdm.write if rank == 0 else lambda line: None  # does not tear the progress bar
    args.batch += -args.batch % dist.get_world_size()
    args.out.mkdir(parents=True, exist_ok=True)
    train, validation = standard_library()
    shares = torch.bincount(validation.int()) / len(validation)
    entropy = torch.special.entr(shares).sum().item()  # what the best guess without context would cost on this text
    say(f"text: {len(train) / 1e6:.1f} MB to train on, {len(validation) / 1e6:.1f} MB to validate on")
    say(f"unigram entropy: {entropy:.3f} nats/byte, {entropy / math.log(2):.3f} bits/byte")
    torch.manual_seed(0)  # the same weights on all ranks
    model = GPT(args.layers, args.dim, args.seq).to(device)
    title = f"GPT, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, strategy {args.strategy}"
    say(f"{title}; world size {dist.get_world_size()}, {device.type}")
    reference = copy.deepcopy(model) if args.compare and rank == 0 else None
    reference_optim = torch.optim.AdamW(reference.parameters(), fused=True) if reference else None

    half = shardkit.MixedPrecision(param_dtype=torch.bfloat16) if device.type == "cuda" and not args.compare else None
    model = shardkit.auto_wrap(model, sharding_strategy=args.strategy, mixed_precision=half)
    optim = torch.optim.AdamW(model.parameters(), fused=True)
    say(str(shardkit.describe(model)))
    generator = torch.Generator().manual_seed(0)  # draws the batches, alike on all ranks; nothing else is random
    step, history = 0, {"train": [], "validation": []}
    if args.resume:
        state = torch.load(args.out / "checkpoint.pt", map_location="cpu", mmap=True)
        shardkit.load_full_state_dict(model, state["model"])
        shardkit.load_full_optim_state_dict(model, optim, state["optim"])
        generator.set_state(state["generator"])  # the data go on where they stopped
        step, history = state["step"], state["history"]
        say(f"resumed after step {step}")

    bar = tqdm(total=args.steps, initial=step, unit="step", disable=rank != 0, dynamic_ncols=True, mininterval=1)
    begin = clock = time.perf_counter()
    losses, expected, worst, stop = [], [], 0.0, step >= args.steps
    while not stop:
        starts = torch.randint(len(train) - args.seq, (args.batch,), generator=generator)
        rate = learning_rate(step, args)
        losses.append(train_step(model, optim, rate, *windows(train, starts, args.seq, device)))
        if reference:  # the whole batch, on this rank alone
            batch = windows(train, starts, args.seq, device, whole=True)
            expected.append(train_step(reference, reference_optim, rate, *batch).item())
        step += 1
        bar.update()
        keep, stop = step % args.save_every == 0, step == args.steps
        if not (keep or stop or step % args.log_every == 0):
            continue  # most steps do not wait for the device
        recent = mean_over_ranks(losses)
        speed = len(losses) * args.batch * args.seq / (time.perf_counter() - clock)
        bar.set_postfix(loss=f"{recent[-1]:.3f}", tokens_per_s=f"{speed:,.0f}")
        if expected:
            worst = max(worst, *(abs(a - b) for a, b in zip(recent, expected)))
            say(f"step {step}: loss sharded {recent[-1]:.7f}, unsharded {expected[-1]:.7f}, most apart {worst:.1e}")
        losses, expected, history["train"] = [], [], history["train"] + recent
        loss = evaluate(model, validation, args, device)
        history["validation"].append((step, loss))
        say(f"step {step}: training loss {recent[-1]:.3f}, validation loss {loss:.3f}, {speed:,.0f} tokens/s")
        late = torch.tensor(float(time.perf_counter() - begin > args.seconds), device=device)
        dist.broadcast(late, 0)  # rank 0's clock decides: ranks that disagreed would wait for each other for ever
        stop = stop or bool(late)
        if keep or stop:
            save(args.out / "checkpoint.pt", model, optim, step=step, history=history, generator=generator.get_state())
        clock = time.perf_counter()  # speed is that of training alone
    bar.close()

    say(memory(model, optim, device))
    say(f"sample:\n{sample(model, b'def ', 200, device)}\n")
    if rank == 0:
        plot(args.out / "loss.png", history, entropy, title)
    say(f"{time.perf_counter() - begin:.0f} s for training, checkpoints and sample; results are in {args.out}")
    if args.compare:
        say(f"sharded and unsharded losses differ by at most {worst:.1e} in {step} steps")
    say(f"validation loss {history['validation'][-1][1]:.3f} nats/byte against unigram entropy {entropy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
