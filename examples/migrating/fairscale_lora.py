"""Low-rank adapters on a frozen model under fairscale: each layer a unit by policy, adapters saved apart."""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn

# was: from fairscale.nn import FullyShardedDataParallel as FSDP, auto_wrap, default_auto_wrap_policy, enable_wrap
from shardkit.integrations.fairscale import FullyShardedDataParallel as FSDP
from shardkit.integrations.fairscale import auto_wrap, default_auto_wrap_policy, enable_wrap

WIDTH, RANK = 32, 4


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank correction, which begins at zero."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), Adapted(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


def build():
    model = nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(WIDTH, 4))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".down." in name or ".up." in name)
    return model


def batch(rank, step, device):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def train(rank, world, folder, device):
    torch.manual_seed(0)
    # Frozen and trainable parameters of a unit need flatten_parameters=False in fairscale.
    with enable_wrap(wrapper_cls=FSDP, flatten_parameters=False, compute_device=device):
        policy = functools.partial(default_auto_wrap_policy, min_num_params=1000, force_leaf_modules={Layer})
        model = FSDP(auto_wrap(build().to(device), policy), flatten_parameters=False, compute_device=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(6):
        with model.no_sync():
            (model(batch(rank, 2 * step, device)) ** 2).mean().backward()
        loss = (model(batch(rank, 2 * step + 1, device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict()
    if rank == 0 and folder is not None:
        torch.save({k: v for k, v in state.items() if ".down." in k or ".up." in k}, f"{folder}/adapters.pt")
    return losses


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    print(train(dist.get_rank(), dist.get_world_size(), None, device))
    dist.destroy_process_group()
