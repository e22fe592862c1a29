"""A transformer under FSDP1: blocks are units by policy, bfloat16 computation, activation checkpointing of blocks."""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

# was: from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP
# was: from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
# was: from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from shardkit.integrations.torch_fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    transformer_auto_wrap_policy,
)
from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP

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
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank, step, device):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator).to(device)


def train(rank, world, folder, device):
    torch.manual_seed(0)
    model = FSDP(
        Transformer().to(device),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(8):
        ids = batch(rank, step % 2, device)
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(-1, 1).flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    print(train(dist.get_rank(), dist.get_world_size(), None, device))
    dist.destroy_process_group()
