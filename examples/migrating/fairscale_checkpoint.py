"""Saving and resuming under fairscale: each rank its shards, put together offline; the optimizer state gathered."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn

# was: from fairscale.nn import FullyShardedDataParallel as FSDP
from shardkit.integrations.fairscale import FullyShardedDataParallel as FSDP

WIDTH = 24


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def build():
    return nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(WIDTH, 4))


def batch(rank, step, device):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def start(seed, device):
    torch.manual_seed(seed)
    model = build().to(device)
    for i in range(3):
        model[i] = FSDP(model[i], compute_device=device)
    model = FSDP(model, compute_device=device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def steps(model, optimizer, rank, numbers, device):
    losses = []
    for step in numbers:
        loss = (model(batch(rank, step, device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(rank, world, folder, device):
    model, optimizer = start(0, device)
    losses = steps(model, optimizer, rank, range(4), device)

    torch.save({"weights": model.local_state_dict(), "meta": model.local_metadata_dict()}, f"{folder}/shard{rank}.pt")
    optimizer_state = model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        torch.save(optimizer_state, f"{folder}/optimizer.pt")
    dist.barrier()
    if rank == 0:  # offline: this needs no process group
        shards = [torch.load(f"{folder}/shard{r}.pt", weights_only=False) for r in range(world)]
        whole = FSDP.consolidate_shard_weights([s["weights"] for s in shards], [s["meta"] for s in shards])
        torch.save(whole, f"{folder}/model.pt")
    dist.barrier()

    model, optimizer = start(1, device)  # other weights, until the saved ones are loaded
    model.load_state_dict(torch.load(f"{folder}/model.pt"))
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(torch.load(f"{folder}/optimizer.pt")))
    return losses + steps(model, optimizer, rank, range(4, 8), device)


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    print(train(dist.get_rank(), dist.get_world_size(), folder[0], device))
    dist.destroy_process_group()
