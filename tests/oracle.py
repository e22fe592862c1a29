"""The oracle of the engine's tests: the unwrapped model, trained in one process on what all ranks see.

    twins = Twins(rank, world, build, policy={Block})     # build() twice from the same seed; one of them is wrapped
    twins.train(loss, steps=5)                            # loss(model, rank, step): each rank's own; the twin takes
                                                          # the mean
    twins.check_weights()

The twin never communicates and shares no code with the engine, so a fault of the engine cannot correct itself.
The mean over ranks of the ranks' losses is the loss of the concatenated batch, where every rank has as many samples.

Tolerance: gradients and weights are float32 sums of the same terms in another order (over samples, then over ranks,
against all at once). Each term carries half an ulp, 6e-8 of the largest; sums of the few hundred terms here stay within
ten such ulps of it, so errors are measured against the largest element of a tensor, not against each (an element that
cancels to 1e-7 of its terms is noise in both runs), and RTOL is 1e-6. A tensor whose whole value is a cancellation (the
gradient of a key's bias in attention is zero in exact arithmetic) is measured against the largest gradient in the
model. Faults of sharding are of order one: a lost rank, a doubled use, a stale weight.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import shardkit

RTOL = 1e-6
CANCELLED = 0.1  # share of the model's largest element below which a tensor is measured against the model's
STRATEGIES = ("full", "grad_op", "zero1", "zero2", "none")
HYBRIDS = ("hybrid", "hybrid_grad_op")


# ------------------------------------------------------------------------------------------------------------ models


class Block(nn.Module):
    """A residual block of odd sizes, so that shards need padding and cut through rows."""

    def __init__(self, d=5, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d + 1), nn.Linear(2 * d + 1, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, d=5, blocks=3, out=3):
        super().__init__()
        self.inp, self.head = nn.Linear(d, d), nn.Linear(d, out)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LM(nn.Module):
    def __init__(self, vocab=11, d=5, blocks=2, tied=True):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# -------------------------------------------------------------------------------------------------------------- data


def data(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(seed, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def square_loss(model, rank, step):
    return (model(data(100 * step + rank, 4, 5)) ** 2).mean()


def lm_loss(model, rank, step, vocab=11):
    x = ids(100 * step + rank, vocab, 3, 4)
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build()


@functools.cache  # groups keep threads and sockets for as long as the rank lives
def mesh(*shape):
    return init_device_mesh("cpu", shape)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


# -------------------------------------------------------------------------------------------------------- comparisons


def compare(what, got, want, rtol=RTOL):
    """Dicts of tensors, equal up to `rtol` of the largest element of each (see the module docstring)."""
    assert set(got) == set(want), f"{what}: names differ: {sorted(set(got) ^ set(want))}"
    floats = [w for w in want.values() if w is not None and w.numel() and (w.is_floating_point() or w.is_complex())]
    largest = max((w.detach().abs().max().double().item() for w in floats), default=0.0)
    for name, w in want.items():
        g = got[name]
        assert (g is None) == (w is None), f"{what} {name}: got {g}, expected {w}"
        if w is None:
            continue
        assert g.shape == w.shape and g.dtype == w.dtype, f"{what} {name}: {g.shape} {g.dtype} != {w.shape} {w.dtype}"
        g, w = g.detach(), w.detach()
        if w.numel() == 0:
            continue
        if not (w.is_floating_point() or w.is_complex()):
            assert torch.equal(g, w), f"{what} {name}: {g} != {w}"
            continue
        wide = torch.complex128 if w.is_complex() else torch.float64
        error = (g.to(wide) - w.to(wide)).abs().max().item()
        scale = max(w.abs().max().item(), CANCELLED * largest)
        assert error <= rtol * scale, (
            f"{what} {name}: largest error {error:.3g}, "
            f"{error / max(scale, 1e-300):.3g} of the largest element {scale:.3g}"
        )


def full(value):
    """The whole of a LocalShard; a plain tensor is whole already. Collective."""
    if value is None:
        return None
    return value.full_tensor() if isinstance(value, shardkit.LocalShard) else value.detach()


def full_grads(model):
    return {name: full(p.grad) for name, p in model.named_parameters()}


def full_params(model):
    """Every parameter's whole value, from the local pieces in its state dict, not by the engine's own gathers."""
    state = model.state_dict()
    return {name: full(state[name]) for name, _ in model.named_parameters()}


def grads(model):
    return {
        n: None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad.detach().clone()
        for n, p in model.named_parameters()
    }


def params(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def raises(kind, body, *args):
    """The exception of `kind` that `body(*args)` raises."""
    try:
        body(*args)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


class Twins:
    """A sharded model and its unwrapped twin, trained side by side. See the module docstring."""

    def __init__(self, rank, world, build, *, wrap=None, optim=sgd, seed=0, policy="auto", **options):
        self.rank, self.world = rank, world
        self.ref = seeded(build, seed)
        model = seeded(build, seed)
        self.model = wrap(model) if wrap else shardkit.auto_wrap(model, policy=policy, **options)
        self.optim = optim([p for p in self.model.parameters() if _trainable(p)])
        self.ref_optim = optim([p for p in self.ref.parameters() if _trainable(p)])
        self.steps = 0

    def backward(self, loss, ref_loss=None):
        """Gradients of `loss(model, rank, step)` on both sides; the losses must agree."""
        mine = loss(self.model, self.rank, self.steps)
        mine.backward()
        self.ref_backward(ref_loss or loss, mine)

    def ref_backward(self, loss, mine=None):
        for r in range(self.world):
            value = loss(self.ref, r, self.steps)
            (value / self.world).backward()
            if r == self.rank and mine is not None:
                compare(f"step {self.steps}", {"loss": mine.detach()}, {"loss": value.detach()}, rtol=5 * RTOL)

    def zero(self, set_to_none=True):
        self.model.zero_grad(set_to_none=set_to_none)
        self.ref.zero_grad(set_to_none=set_to_none)

    def update(self):
        self.optim.step()
        self.ref_optim.step()
        self.steps += 1

    def train(self, loss, steps=5, *, ref_loss=None, rtol=RTOL):
        """`steps` optimizer steps; gradients compared at each."""
        for _ in range(steps):
            self.zero()
            self.backward(loss, ref_loss)
            self.check_grads(rtol)
            self.update()
        self.check_weights(rtol=5 * rtol)
        return self

    def check_grads(self, rtol=RTOL):
        """At the first step to `rtol`; later the weights that gradients are taken at differ by rounding already."""
        rtol *= 1 + min(self.steps, 4)
        compare(f"gradient at step {self.steps} of", full_grads(self.model), grads(self.ref), rtol)

    def check_weights(self, rtol=5 * RTOL):
        """rtol: errors of five steps add up at worst."""
        compare(f"weight after {self.steps} steps:", full_params(self.model), params(self.ref), rtol)

    def check_output(self, *args, rtol=5 * RTOL, **kwargs):
        with torch.no_grad():
            got, want = self.model(*args, **kwargs), self.ref(*args, **kwargs)
        compare(f"output after {self.steps} steps", {"output": got}, {"output": want}, rtol)


def _trainable(p):
    return p.is_floating_point() or p.is_complex()


def same_on_all_ranks(value):
    """Whether every rank holds an equal object (a float, say)."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(other == everyone[0] for other in everyone)
