"""Sharded optimizer state and gradients under fairscale: OSS and ShardedDataParallel, saved by one rank, resumed."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn

# was: from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
# was: from fairscale.optim.oss import OSS
from shardkit.integrations.fairscale import OSS
from shardkit.integrations.fairscale import ShardedDataParallel as ShardedDDP

WIDTH = 24


def build():
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(rank, step, device):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def start(seed, device):
    torch.manual_seed(seed)
    model = build().to(device)
    optimizer = OSS(params=model.parameters(), optim=torch.optim.Adam, lr=1e-2)
    # fairscale is right without buckets only: with them, weights drift once zero_grad() sets gradients to None.
    return ShardedDDP(model, optimizer, reduce_buffer_size=0), optimizer


def steps(model, optimizer, rank, numbers, device):
    losses = []
    for step in numbers:
        optimizer.zero_grad()
        with model.no_sync():
            (model(batch(rank, 2 * step, device)) ** 2).mean().backward()
        loss = (model(batch(rank, 2 * step + 1, device)) ** 2).mean()
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank, world, folder, device):
    model, optimizer = start(0, device)
    losses = steps(model, optimizer, rank, range(4), device)
    optimizer.consolidate_state_dict(recipient_rank=0)
    if rank == 0:  # the others do not take part
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, f"{folder}/checkpoint.pt")
    dist.barrier()

    model, optimizer = start(1, device)  # other weights, until the saved ones are loaded
    saved = torch.load(f"{folder}/checkpoint.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return losses + steps(model, optimizer, rank, range(4, 8), device)


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    print(train(dist.get_rank(), dist.get_world_size(), folder[0], device))
    dist.destroy_process_group()
