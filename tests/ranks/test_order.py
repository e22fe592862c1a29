"""Ranks may take different branches: the numbers are those of one process, and where they cannot be, an error says so.

Every expert's gradient is the mean over ranks of each rank's, zero for a rank that did not use it. Many steps, so that
sequences are learnt by heart and left again. The oracle: tests/oracle.py. (Ranks that run different numbers of steps:
tests/ranks/test_errors.py.)
"""

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from tests.harness import ranks
from tests.oracle import Block, Net, Twins, compare, data, full, mesh, square_loss

STRATEGIES = ["full", "zero2"]


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(5, width), nn.Linear(width, 5)

    def forward(self, x):
        return x + self.b(self.a(x).tanh())


class Experts(nn.Module):
    """Of unequal sizes; `route` lists those that this rank runs, in its order."""

    def __init__(self, count=4, reentrant=None):
        super().__init__()
        self.inp, self.out, self.reentrant = nn.Linear(5, 5), nn.Linear(5, 2), reentrant
        self.experts = nn.ModuleList(Expert(3 + 2 * i) for i in range(count))

    def forward(self, x, route=()):
        x = self.inp(x)
        for e in route:
            if self.reentrant is None:
                x = self.experts[e](x)
            else:
                x = checkpoint(self.experts[e], x, use_reentrant=self.reentrant)
        return self.out(x)


def _loss(routes):
    """routes(rank, step) -> the experts that it runs."""
    return lambda m, r, s: (m(data(100 * s + r, 4, 5), route=routes(r, s)) ** 2).mean()


ROUTES = {
    "one each": lambda r, s: [r % 4],
    "rotating": lambda r, s: [(r + s) % 4],
    "alternating": lambda r, s: [0, 1] if (r + s) % 2 else [1, 0],
    "different numbers": lambda r, s: list(range(r % 4 + 1)),
    "none on some": lambda r, s: [] if r == 0 else [0, 1, 2, 3],
    "reversed on one": lambda r, s: [3, 2, 1, 0] if r == 1 else [0, 1, 2, 3],
    "repeated": lambda r, s: [0, 0, 1] if r else [1, 0, 0, 2],
    "same, then apart, then same": lambda r, s: [0, 1, 2, 3] if s // 3 % 2 == 0 else [(r + s) % 4, 2],
    "apart at every fifth": lambda r, s: [r % 4] if s % 5 == 4 else [0, 1, 2],
    "changing together": lambda r, s: [s % 4, (s + 1) % 4],
    "random": lambda r, s: torch.randint(
        0, 4, (int(1 + (7 * s + 3 * r) % 4),), generator=torch.Generator().manual_seed(31 * s + r)
    ).tolist(),
}


@ranks(2, 4)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_run_different_experts(rank, world, strategy, route):
    """Unused experts keep None on all ranks or on none, as the twin's do."""
    Twins(rank, world, Experts, policy={Expert}, sharding_strategy=strategy).train(_loss(ROUTES[route]), 10)


@ranks(4)
@pytest.mark.parametrize("route", ["rotating", "different numbers", "random"])
@pytest.mark.parametrize("shape", [(2, 2)])
def test_ranks_that_run_different_experts_on_a_hybrid_mesh(rank, world, route, shape):
    options = dict(sharding_strategy="hybrid", device_mesh=mesh(*shape))
    Twins(rank, world, Experts, policy={Expert}, **options).train(_loss(ROUTES[route]), 6)


@ranks(2)
@pytest.mark.parametrize("route", ["rotating", "none on some", "random"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_different_experts_under_activation_checkpoints(rank, world, route, reentrant):
    for strategy in ("full", "grad_op"):
        twins = Twins(rank, world, lambda: Experts(reentrant=reentrant), policy={Expert}, sharding_strategy=strategy)
        twins.train(_loss(ROUTES[route]), 6)


@ranks(2, 4)
@pytest.mark.parametrize("route", ["rotating", "none on some", "random"])
@pytest.mark.parametrize("strategy", ["full", "zero2"])
def test_different_experts_with_accumulation(rank, world, route, strategy):
    twins = Twins(rank, world, Experts, policy={Expert}, sharding_strategy=strategy)
    loss = lambda m, r, s: _loss(ROUTES[route])(m, r, s) / 30  # noqa: E731
    for _ in range(6):
        twins.zero()
        with twins.model.no_sync():
            twins.backward(loss)
            twins.backward(lambda m, r, s: loss(m, r, s + 50))
        twins.backward(lambda m, r, s: loss(m, r, s + 90))
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tower_that_some_ranks_skip(rank, world, strategy):
    """Text and pictures: in every third step only the last rank has a picture, in others nobody, or all."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.text, self.out = Net(out=5), Net(out=5), nn.Linear(5, 2)

        def forward(self, x, picture=None):
            h = self.text(x)
            return self.out(h if picture is None else h + self.vision(picture))

    def loss(m, r, s):
        seen = (r == world - 1, False, True)[s % 3]
        return (m(data(100 * s + r, 4, 5), data(50 + s, 4, 5) if seen else None) ** 2).mean()

    Twins(rank, world, Towers, policy={Block}, sharding_strategy=strategy).train(loss, 9)


@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_that_only_the_backward_of_some_ranks_reaches(rank, world, strategy):
    """All ranks run all of the forward; what enters the loss differs."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = Block(), nn.ModuleList(Expert(3 + i) for i in range(3))

        def forward(self, x):
            h = self.trunk(x)
            return [head(h) for head in self.heads]

    def loss(m, r, s):
        outs = m(data(100 * s + r, 4, 5))
        return sum((outs[i] ** 2).mean() for i in ([r % 3], [0, 1, 2], [(r + s) % 3, 2])[s % 3])

    Twins(rank, world, Heads, policy={Block, Expert}, sharding_strategy=strategy).train(loss, 9)


@ranks(2, 4)
def test_forwards_of_submodules_that_differ_between_ranks(rank, world):
    """Each rank calls another submodule directly."""
    twins = Twins(rank, world, Net, policy={Block})
    twins.train(lambda m, r, s: (m.blocks[(r + s) % 3](data(100 * s + r, 4, 5)) ** 2).mean(), 6)


@ranks(2, 4)
def test_a_loss_that_no_parameter_reaches_on_one_rank(rank, world):
    """A rank without a valid sample returns zero times something, so that it still runs backward."""

    def loss(m, r, s):
        y = m(data(100 * s + r, 4, 5), route=[0, 1])
        return y.sum() * 0 if (r + s) % world == 0 else (y**2).mean()

    Twins(rank, world, Experts, policy={Expert}).train(loss, 6)


@ranks(2)
def test_two_roots_that_ranks_call_in_the_same_order_with_different_experts(rank, world):
    first = Twins(rank, world, Experts, policy={Expert})
    second = Twins(rank, world, lambda: Experts(3), policy={Expert}, seed=1)
    for _ in range(5):
        first.zero(), second.zero()
        for model, which in (((first.model, second.model), [rank]), ((first.ref, second.ref), range(world))):
            scale = 1 if len(which) == 1 else 1 / world
            for r in which:
                h = model[0](data(100 * first.steps + r, 4, 5), route=[(r + first.steps) % 4]) @ torch.ones(2, 5)
                ((model[1](h, route=[r % 3, 2]) ** 2).mean() * scale).backward()
        first.check_grads(rtol=3e-6), second.check_grads(rtol=3e-6)
        first.update(), second.update()


@ranks(2)
def test_evaluation_with_different_experts_and_different_numbers_of_them(rank, world):
    twins = Twins(rank, world, Experts, policy={Expert})
    for s in range(6):
        twins.check_output(data(rank, 2, 5), route=ROUTES["random"](rank, s))
        twins.train(_loss(ROUTES["rotating"]), 1)


@ranks(2, 4)
@pytest.mark.parametrize("route", ["rotating", "none on some"])
def test_the_gradient_of_captured_parameters_with_different_experts(rank, world, route):
    twins = Twins(rank, world, Experts, policy={Expert})
    for s in range(4):
        got = torch.autograd.grad(
            _loss(ROUTES[route])(twins.model, rank, s), [twins.model.inp.weight, twins.model.out.bias]
        )
        want = [0, 0]
        for r in range(world):
            g = torch.autograd.grad(_loss(ROUTES[route])(twins.ref, r, s), [twins.ref.inp.weight, twins.ref.out.bias])
            want = [w + x / world for w, x in zip(want, g)]
        compare("captured", {i: full(g) for i, g in enumerate(got)}, dict(enumerate(want)))
    twins.train(_loss(ROUTES[route]), 3)


@ranks(2, 4, timeout=15)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_fail_at_different_places_and_go_on(rank, world, where):
    twins = Twins(rank, world, Net, policy={Block})
    for step in range(5):
        twins.zero()
        if step % 2:
            block = twins.model.blocks[rank % 3]
            hook = block.register_forward_hook if where == "forward" else block.register_full_backward_hook
            handle = hook(_raise)
            try:
                square_loss(twins.model, rank, 77).backward()
            except ZeroDivisionError:
                handle.remove()
                continue
            raise AssertionError("no exception")
        twins.train(square_loss, 1)


def _raise(*_):
    raise ZeroDivisionError


@ranks(2)
def test_a_steady_loop_exchanges_messages_only_where_ranks_meet(rank, world):
    """By heart: one message at the end of each forward and each backward."""
    twins = Twins(rank, world, Net, policy={Block})
    twins.train(square_loss, 6)
    channel = twins.model._shardkit_step.mesh.channel
    before = channel.rounds
    twins.train(square_loss, 5)
    assert channel.rounds - before == 10


@ranks(2)
@pytest.mark.parametrize("strategy", ["grad_op", "zero1", "none"])
@pytest.mark.parametrize("route", ["rotating", "none on some", "random"])
def test_ranks_that_run_different_experts_under_the_other_strategies(rank, world, strategy, route):
    Twins(rank, world, Experts, policy={Expert}, sharding_strategy=strategy).train(_loss(ROUTES[route]), 8)
