"""Low-rank adapters on a frozen model under FSDP1: frozen and trainable parameters in one unit, saved apart."""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn

# was: from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
# was: from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from shardkit.integrations.torch_fsdp import FullStateDictConfig, StateDictType, lambda_auto_wrap_policy
from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP

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
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Layer))
    model = FSDP(build().to(device), auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(6):
        loss = (model(batch(rank, step, device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    config = FullStateDictConfig(offload_to_cpu=device.type != "cpu", rank0_only=True)  # on a CPU, FSDP1 crashes
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
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
