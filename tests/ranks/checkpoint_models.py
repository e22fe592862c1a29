"""Models, steps and comparisons that the checkpoint tests share."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import shardkit


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d + 1)
        self.down = nn.Linear(2 * d + 1, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


class Net(nn.Module):
    """Odd sizes, so that ranks' pieces end within rows; a scalar and an empty parameter, a buffer, a tied weight."""

    def __init__(self, d=5):
        super().__init__()
        self.emb = nn.Embedding(11, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, 11, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.cube = nn.Parameter(torch.randn(3, 2, 7))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        self.count += 1
        return self.head(x * self.scale) + self.cube.sum() + self.nothing.sum()


def build(seed=0):
    torch.manual_seed(seed)
    return Net()


def wrap(seed=0, units=(Block,), **options):
    return shardkit.auto_wrap(build(seed), policy=set(units) or None, **options)


def batch(seed):
    return torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed):
    ids = batch(seed)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def step(model, optim, seed):
    optim.zero_grad()
    loss = loss_of(model, seed)
    loss.backward()
    optim.step()
    return loss.detach()


def whole(model, optim=None):
    """Everything there is, as one dictionary of whole values."""
    out = {f"model.{k}": v for k, v in shardkit.full_state_dict(model).items()}
    if optim is not None:
        state = shardkit.full_optim_state_dict(model, optim)
        out |= {f"{n}.{k}": v for n, s in state["state"].items() for k, v in s.items()}
        out["groups"] = state["param_groups"]
    return out


def assert_same(got, want):
    """Bitwise, for everything."""
    assert set(got) == set(want), (sorted(set(got) ^ set(want)))
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            assert got[key].dtype == value.dtype, (key, got[key].dtype, value.dtype)
            assert torch.equal(got[key], value), f"{key}: {got[key]} != {value}"
        else:
            assert got[key] == value, f"{key}: {got[key]} != {value}"
