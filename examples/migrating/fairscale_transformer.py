"""A transformer under fairscale: wrapped while it is built, float16 computation with loss scaling, checkpointing."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

# was: from fairscale.nn import FullyShardedDataParallel as FSDP, checkpoint_wrapper, enable_wrap, wrap
# was: from fairscale.optim.grad_scaler import ShardedGradScaler
from shardkit.integrations.fairscale import FullyShardedDataParallel as FSDP
from shardkit.integrations.fairscale import ShardedGradScaler, checkpoint_wrapper, enable_wrap, wrap

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(wrap(checkpoint_wrapper(Block().to(device))) for _ in range(3)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids)))


def batch(rank, step, device):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator).to(device)


def train(rank, world, folder, device):
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FSDP, mixed_precision=True, fp32_reduce_scatter=True, compute_device=device):
        model = wrap(Transformer(device).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = ShardedGradScaler(init_scale=2.0**10)
    losses = []
    for step in range(8):
        ids = batch(rank, step % 2, device)
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    print(train(dist.get_rank(), dist.get_world_size(), None, device))
    dist.destroy_process_group()
