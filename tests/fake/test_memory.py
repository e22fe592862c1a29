"""Full parameters live while their unit computes and no longer: weak references to the gathered buffers' storages."""

import gc
import weakref

import pytest
import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardkit
from tests.harness import fake_world
from tests.oracle import Block, Net, seeded

WORLDS = [2, 8, 64]


class Watch:
    """Which units' gathered buffers are alive: every buffer that a gather made, by weak reference."""

    def __init__(self, model):
        self.made = []
        for unit in model._shardkit_step.units:
            for flat in unit.flats:
                flat.gather = self._spy(flat, unit.name or "(root)")

    def _spy(self, flat, name):
        original = type(flat).gather

        def gather():
            original(flat)
            self.made.append((name, StorageWeakRef(flat.buffer.untyped_storage())))

        return gather

    def alive(self):
        """The storage is asked, not the tensor: full parameters are aliases that share it and nothing else."""
        return {name for name, ref in self.made if not ref.expired()}


def _model(**options):
    model = shardkit.auto_wrap(seeded(lambda: Net(d=16, blocks=5)), policy={Block}, **options)
    return model, Watch(model)


def _names(*numbers):
    return {f"blocks.{i}" for i in numbers}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("prefetch", [True, False])
def test_only_the_running_unit_and_the_next_are_whole_in_forward(world, prefetch):
    with fake_world(world):
        model, watch = _model(forward_prefetch=prefetch, backward_prefetch=prefetch)
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
        seen = []
        for i, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, i=i: seen.append((i, watch.alive() - {"(root)"})))
        model(torch.randn(4, 16)).sum().backward()
        for i, alive in seen:
            assert alive <= _names(i, i + 1) and f"blocks.{i}" in alive
            assert prefetch or alive == _names(i)


@pytest.mark.parametrize("world", WORLDS)
def test_only_the_running_unit_and_the_one_before_are_whole_in_backward(world):
    with fake_world(world):
        model, watch = _model()
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
        seen = []
        for i, block in enumerate(model.blocks):
            block.down.register_full_backward_pre_hook(lambda *_, i=i: seen.append((i, watch.alive() - {"(root)"})))
        model(torch.randn(4, 16)).sum().backward()
        assert [i for i, _ in seen] == [4, 3, 2, 1, 0]
        for i, alive in seen:
            assert alive <= _names(i, i - 1) and f"blocks.{i}" in alive


@pytest.mark.parametrize("strategy, kept", [("full", False), ("grad_op", False)])
@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_whole_between_steps(world, strategy, kept):
    with fake_world(world):
        model, watch = _model(sharding_strategy=strategy)
        optim = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 16)).sum().backward()
            assert not watch.alive() and not model._shardkit_step.storages
            optim.step()
            optim.zero_grad()
            with torch.no_grad():
                model.eval()(torch.randn(4, 16))
                model.train()
            assert not watch.alive() - {"(root)"}


@pytest.mark.parametrize("strategy", ["full", "grad_op"])
def test_between_forward_and_backward_stays_what_the_strategy_says(strategy):
    with fake_world(8):
        model, watch = _model(sharding_strategy=strategy)
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
        y = model(torch.randn(4, 16)).sum()
        everything = {"(root)", *_names(*range(5))}
        assert watch.alive() == (everything if strategy == "grad_op" else {"(root)", "blocks.4"}) or (
            strategy == "full" and watch.alive() <= {"(root)", "blocks.4"}
        )
        y.backward()
        assert not watch.alive()


def test_frozen_units_drop_their_parameters_in_backward():
    with fake_world(8):
        model = seeded(lambda: Net(d=16, blocks=5))
        model.requires_grad_(False)
        model.inp.requires_grad_(True)
        shardkit.auto_wrap(model, policy={Block})
        watch = Watch(model)
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()
            assert not watch.alive()


def test_an_exception_leaves_nothing_whole_once_the_model_runs_again():
    with fake_world(8):
        model, watch = _model()
        handle = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(4, 16))
        handle.remove()
        model(torch.randn(4, 16)).sum().backward()
        assert not watch.alive()


def test_a_dropped_model_is_freed():
    with fake_world(8):
        model = shardkit.auto_wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), policy={nn.Linear})
        model(torch.randn(2, 64)).sum().backward()
        shards = [weakref.ref(f.shard) for f in model._shardkit_step.flats]
        del model
        gc.collect()
        assert not any(s() is not None for s in shards)
