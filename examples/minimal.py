"""Sharded training in some twenty lines: a small transformer learns to predict the next byte of argparse's source.

    torchrun --standalone --nproc-per-node 2 examples/minimal.py
    python examples/minimal.py                                      # one rank

Everything but `init_process_group` and `auto_wrap` is as on one device.
"""

import argparse
import inspect
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import shardkit


class Model(nn.Module):
    def __init__(self, width: int = 128, context: int = 64):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.body(x, mask=mask, is_causal=True))


alone = {} if "WORLD_SIZE" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)  # without torchrun
dist.init_process_group("gloo", **alone)
torch.manual_seed(0)  # the same weights on all ranks
model = shardkit.auto_wrap(Model())  # each rank now holds its part of every layer
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)

text = torch.tensor(list(inspect.getsource(argparse).encode()))
torch.manual_seed(dist.get_rank())  # but other data on each
for step in range(1, 101):
    starts = torch.randint(len(text) - 65, (8, 1))
    batch = text[starts + torch.arange(65)]
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f} nats/byte")
dist.destroy_process_group()
