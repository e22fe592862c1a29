"""Saving and resuming under FSDP1: whole weights and optimizer state, written by the first rank."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn

# was: from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
# was: from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
# was: from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from shardkit.integrations.torch_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ModuleWrapPolicy,
    StateDictType,
)
from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP

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
    model = FSDP(build().to(device), auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def steps(model, optimizer, schedule, rank, numbers, device):
    losses = []
    for step in numbers:
        loss = (model(batch(rank, step, device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(model, optimizer, schedule, rank, device, path):
    config = FullStateDictConfig(offload_to_cpu=device.type != "cpu", rank0_only=True)  # on a CPU, FSDP1 crashes
    optimizer_config = FullOptimStateDictConfig(offload_to_cpu=device.type != "cpu", rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optimizer_config):
        weights, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state, "schedule": schedule.state_dict()}, path)
    dist.barrier()


def resume(model, optimizer, schedule, path):
    saved = torch.load(path)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
    schedule.load_state_dict(saved["schedule"])


def train(rank, world, folder, device):
    first = start(0, device)
    losses = steps(*first, rank, range(4), device)
    save(*first, rank, device, f"{folder}/checkpoint.pt")
    second = start(1, device)  # other weights, until the saved ones are loaded
    resume(*second, f"{folder}/checkpoint.pt")
    return losses + steps(*second, rank, range(4, 8), device)


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    print(train(dist.get_rank(), dist.get_world_size(), folder[0], device))
    dist.destroy_process_group()
