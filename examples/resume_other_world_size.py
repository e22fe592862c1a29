"""A worker is killed midway, torchrun starts the ranks again, and then the training goes on on another number of ranks.

    python examples/resume_other_world_size.py                  # half a minute on 2 CPU cores

It runs these, one after another, and compares their losses with those of one process that nobody interrupted:

    torchrun --nproc-per-node 4 --max-restarts 1 ... --stop-at 12 --kill-at 8    # the last rank kills itself at step 8
    torchrun --nproc-per-node 2 ... --stop-at 20                                 # from the checkpoint of step 12

The loop does what a loop must for that: it starts from the newest complete checkpoint if there is one, saves every few
steps (in the background, keeping two), and makes the batch of a step depend on the step, not on the ranks.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import shardkit

BATCH = 12  # of all ranks together; 1, 2, 3, 4, 6 and 12 ranks can share it


def build() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50))


def make_optimizer(model: nn.Module):
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return optim, torch.optim.lr_scheduler.CosineAnnealingLR(optim, 40)


def batch(step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    """This rank's rows of the batch of a step, (BATCH / world, 16): counting sequences, with a random start."""
    start = torch.randint(0, 50, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return ((start + torch.arange(16)) % 50)[rank::world]


def train_step(model, optim, scheduler, tokens) -> torch.Tensor:
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    scheduler.step()
    return loss.detach()


def train_sharded(args) -> None:
    """What every rank of torchrun runs."""
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shardkit.auto_wrap(build(), policy={nn.TransformerEncoderLayer})
    optim, scheduler = make_optimizer(model)
    first, folder, handle = 0, Path(args.folder, "checkpoints"), None
    # Only this example's first attempt has nothing to load; all ranks see that, because nobody writes now.
    if (folder / "latest").exists():
        first = shardkit.load_checkpoint(folder, model, optim, scheduler=scheduler)["step"]
        if rank == 0:
            print(f"    {world} ranks go on from step {first}", flush=True)
    for step in range(first, args.stop_at):
        is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if step == args.kill_at and is_first_attempt and rank == world - 1:
            print(f"    rank {rank} of {world} dies before step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = train_step(model, optim, scheduler, batch(step, rank, world))
        dist.all_reduce(loss)
        if rank == 0:
            with open(Path(args.folder, "losses.jsonl"), "a") as file:
                print(json.dumps({"step": step, "loss": loss.item() / world, "ranks": world}), file=file)
        if (step + 1) % args.every == 0 or step + 1 == args.stop_at:
            name = f"step_{step + 1:04}"
            handle = shardkit.async_save(folder / name, model, optim, keep=2, step=step + 1, scheduler=scheduler)
    if handle is not None:
        handle.wait()
    dist.destroy_process_group()


def launch(ranks: int, args, *options: str) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1",
        __file__, f"--folder={args.folder}", f"--every={args.every}", *options,
    ]  # fmt: skip
    print(f"  {ranks} ranks: {' '.join(options)}", flush=True)
    # In the store that torchrun 2.13 shares with its ranks, restarted ones find the addresses of the dead.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def compare(args) -> None:
    """Runs everything and prints the two loss curves."""
    half = args.steps * 3 // 5
    launch(4, args, f"--stop-at={half}", f"--kill-at={args.steps * 2 // 5}")
    launch(2, args, f"--stop-at={args.steps}")
    lines = [json.loads(line) for line in Path(args.folder, "losses.jsonl").read_text().splitlines()]
    got = {line["step"]: line for line in lines}  # what was computed twice counts once, the later one

    model = build()
    optim, scheduler = make_optimizer(model)
    print("step  ranks  loss        uninterrupted, one process")
    worst = 0.0
    for step in range(args.steps):
        want = train_step(model, optim, scheduler, batch(step)).item()
        worst = max(worst, abs(got[step]["loss"] - want))
        print(f"{step:4}  {got[step]['ranks']:5}  {got[step]['loss']:.7f}  {want:.7f}")
    repeated = len(lines) - len(got)
    print(f"largest difference {worst:.1e}; {repeated} steps were computed twice, from the last checkpoint to the kill")
    # Gradients of the parts of a batch are added in another order, which changes the last bits; Adam carries them on.
    assert worst < 1e-4, "the resumed run is another one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--folder", help="for checkpoints and losses; None: a temporary one")
    parser.add_argument("--stop-at", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        train_sharded(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or folder
        compare(args)


if __name__ == "__main__":
    main()
