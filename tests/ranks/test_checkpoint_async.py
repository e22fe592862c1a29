"""Saving while training goes on."""

import threading

import pytest
import torch

import shardkit
from shardkit.checkpoint import records
from tests.harness import ranks
from tests.ranks.checkpoint_models import assert_same, step, whole, wrap


class Gate:
    """Holds the writing thread until it is told to go on."""

    def __init__(self):
        self.event, self.write = threading.Event(), records.write_tensor

    def __enter__(self):
        def wait(*args):
            assert self.event.wait(20)
            return self.write(*args)

        records.write_tensor = wait
        return self

    def __exit__(self, *exc):
        self.event.set()
        records.write_tensor = self.write


@ranks(2)
def test_training_goes_on_and_the_checkpoint_is_of_the_moment_of_the_call(rank, world, tmp_path):
    model = wrap(0)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optim, 1)
    want = whole(model, optim)
    with Gate() as gate:
        handle = shardkit.async_save(tmp_path / "a", model, optim, step=1)
        for seed in (2, 3, 4):
            step(model, optim, seed)
        assert not handle.done() and not (tmp_path / "a").exists()
        gate.event.set()
        handle.wait()
    assert not torch.equal(whole(model)["model.emb.weight"], want["model.emb.weight"])
    assert shardkit.load_checkpoint(tmp_path / "a", model, optim) == {"step": 1}
    assert_same(whole(model, optim), want)


@ranks(2)
def test_a_second_save_waits_for_the_first_and_a_load_for_both(rank, world, tmp_path):
    model = wrap(0)
    for n in range(3):
        shardkit.async_save(tmp_path / f"s{n}", model, keep=2, n=n)
    assert shardkit.load_checkpoint(tmp_path, model) == {"n": 2}
    assert sorted(p.name for p in tmp_path.glob("s*")) == ["s1", "s2"]


@pytest.mark.parametrize("next_call", ["async_save", "save_checkpoint"])
@ranks(2)
def test_an_error_in_the_background_is_raised_by_the_next_save_on_every_rank(rank, world, next_call, tmp_path):
    model, write = wrap(0), records.write_tensor
    if rank == 1:
        def fail(*args):
            raise OSError(5, "Input/output error", "the disk")

        records.write_tensor = fail
    try:
        handle = shardkit.async_save(tmp_path / "a", model)
        while not handle.done():
            pass
    finally:
        records.write_tensor = write
    match = r"(?s)asynchronous save of .*/a.*Input/output error.*rank 1 of 2"
    with pytest.raises(shardkit.CheckpointError, match=match):
        getattr(shardkit, next_call)(tmp_path / "b", model)
    assert not (tmp_path / "a").exists()
    getattr(shardkit, next_call)(tmp_path / "b", model)  # an error is raised once
    shardkit.load_checkpoint(tmp_path / "b", model)
