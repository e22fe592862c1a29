"""Parameters kept on neighbours between forward and backward, and ranks with different numbers of batches."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit
from tests.harness import ranks
from tests.oracle import data


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def assert_same(model, twin):
    for name, value in shardkit.full_state_dict(model).items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-6, atol=1e-7)


@ranks(4)
@pytest.mark.parametrize("near", [1, 2, 4])
def test_training_with_parameters_on_neighbours_equals_one_process(rank, world, near):
    twin = layers()
    model = shardkit.auto_wrap(copy.deepcopy(twin), policy={nn.Linear}, reshard_after_forward=near)
    optim, twin_optim = torch.optim.Adam(model.parameters(), 0.01), torch.optim.Adam(twin.parameters(), 0.01)
    for step in range(4):
        optim.zero_grad(), twin_optim.zero_grad()
        model(data(10 * step + rank, 3, 6)).square().mean().backward()
        for r in range(world):
            (twin(data(10 * step + r, 3, 6)).square().mean() / world).backward()
        optim.step(), twin_optim.step()
        with torch.no_grad():
            torch.testing.assert_close(model(data(5, 2, 6)), twin(data(5, 2, 6)), rtol=1e-5, atol=1e-6)
    assert_same(model, twin)


@ranks(4)
def test_a_number_of_neighbours_that_does_not_divide_the_group_is_refused(rank, world):
    with pytest.raises(
        shardkit.ConfigError, match=r"reshard_after_forward=3 does not divide the 4 ranks .* \[1, 2, 4\]"
    ):
        shardkit.auto_wrap(layers(), reshard_after_forward=3)


@ranks(2, 4)
@pytest.mark.parametrize("strategy", ["full", "grad_op", "zero2"])
def test_ranks_with_fewer_batches_serve_the_others_and_take_their_steps(rank, world, strategy):
    batches = [3, 5, 1, 2][:world]
    twin = layers()
    model = shardkit.auto_wrap(copy.deepcopy(twin), policy={nn.Linear}, sharding_strategy=strategy)
    optim, twin_optim = torch.optim.Adam(model.parameters(), 0.01), torch.optim.Adam(twin.parameters(), 0.01)
    for _epoch in range(2):
        with model.join():
            for step in range(batches[rank]):
                optim.zero_grad()
                model(data(10 * step + rank, 3, 6)).square().mean().backward()
                optim.step()
        for step in range(max(batches)):
            twin_optim.zero_grad()
            for r in range(world):
                if step < batches[r]:
                    (twin(data(10 * step + r, 3, 6)).square().mean() / world).backward()
            twin_optim.step()
    assert_same(model, twin)


@ranks(2)
def test_a_rank_without_any_batch_needs_to_be_told_the_optimizer(rank, world):
    twin = layers()
    model = shardkit.auto_wrap(copy.deepcopy(twin), policy={nn.Linear})
    optim, twin_optim = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    with model.join(optim):
        for step in range(2 if rank == 0 else 0):
            optim.zero_grad()
            model(data(step, 3, 6)).square().mean().backward()
            optim.step()
    for step in range(2):
        twin_optim.zero_grad()
        (twin(data(step, 3, 6)).square().mean() / world).backward()
        twin_optim.step()
    assert_same(model, twin)


@ranks(2)
def test_clipping_after_a_rank_ran_out_of_batches_is_refused_instead_of_hanging(rank, world):
    model = shardkit.auto_wrap(layers(), policy={nn.Linear})
    optim = torch.optim.SGD(model.parameters(), 0.1)

    def step(number):
        optim.zero_grad()
        model(data(number, 3, 6)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()

    with pytest.raises(shardkit.ShardkitError, match="run out of batches" if rank == 0 else "inside join"):
        with model.join():
            for number in range(3 if rank == 0 else 1):
                step(number)


class _Sent(TorchDispatchMode):
    """Bytes that this rank sends in broadcasts (the gathers of a small gloo group) and point to point."""

    def __init__(self):
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith(("c10d::broadcast_", "c10d::send")):
            tensor = args[0][0]
            if tensor.dtype == torch.float32:  # not the host messages of Order
                group = torch.distributed.ProcessGroup.unbox(args[1])
                share = (group.size() - 1) / group.size() if "broadcast" in name else 1
                self.bytes += tensor.numel() * 4 * share
        return func(*args, **(kwargs or {}))


@ranks(4)
@pytest.mark.parametrize("near", [True, 1, 2])
def test_backward_gathers_among_neighbours_only(rank, world, near):
    """In units of P: forward and reduction (N-1)/N each, backward (n-1)/n for all layers but the last, which stays."""
    model = shardkit.auto_wrap(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))),
        policy={nn.Linear}, reshard_after_forward=near, sync_module_states=True,
    )  # fmt: skip
    for _ in range(2):  # the first step does not know yet which layer is the last
        model(data(rank, 3, 64)).sum().backward()
    with _Sent() as sent:
        model(data(rank, 3, 64)).sum().backward()
    n = world if near is True else near
    expected = 2 * (world - 1) / world + (n - 1) / n * 3 / 4
    assert sent.bytes == pytest.approx(expected * 4 * 64 * 64 * 4, rel=1e-6)
