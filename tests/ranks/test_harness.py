"""The harness's own promises: what it runs, what it reports, and that one bad test does not spoil the next."""

import os
import random
import time

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, fake_world, ranks, run_ranks


@ranks(2, 4)
def test_a_sum_over_all_ranks_is_right(rank, world):
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    assert dist.get_world_size() == world
    assert value.item() == world * (world + 1) / 2


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_parameters_reach_every_rank(rank, world, dtype, shape):
    value = torch.ones(shape, dtype=dtype)
    dist.all_reduce(value)
    assert torch.equal(value, torch.full(shape, world, dtype=dtype))


@ranks(2)
def test_tmp_path_is_the_same_folder_on_all_ranks(rank, world, tmp_path):
    (tmp_path / f"{rank}").write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _describe(rank, world, word, *, scale):
    value = torch.full((2,), rank * scale)
    return {"tensor": value, "word": word, "threads": torch.get_num_threads(), "pid": os.getpid()}


def test_values_come_back_in_rank_order_from_kept_processes():
    first = run_ranks(_describe, 2, "hi", scale=3.0)
    second = run_ranks(_describe, 2, "hi", scale=3.0)
    assert [value["tensor"].tolist() for value in first] == [[0.0, 0.0], [3.0, 3.0]]
    assert {(value["word"], value["threads"]) for value in first} == {("hi", 1)}
    assert [value["pid"] for value in first] == [value["pid"] for value in second]
    fresh = run_ranks(_describe, 2, "hi", scale=3.0, fresh=True)
    assert not {value["pid"] for value in fresh} & {value["pid"] for value in first}


def _draw(rank, world):
    os.environ["LEFT_BEHIND"] = "1"
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def _environment(rank, world):
    return {name: os.environ.get(name) for name in ("LEFT_BEHIND", "RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}


def test_every_call_starts_from_the_same_seeds_and_environment():
    assert len(set(run_ranks(_draw, 2) + run_ranks(_draw, 2))) == 1
    assert run_ranks(_environment, 2)[1] == {
        "LEFT_BEHIND": None, "RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _first_rank_waits(rank, world):
    if rank == 1:
        raise ValueError("rank 1 is to blame")
    dist.all_reduce(torch.ones(1))


def test_a_failure_shows_every_traceback_and_the_cause_first():
    with pytest.raises(RankFailure) as info:
        run_ranks(_first_rank_waits, 2)
    text = str(info.value)
    assert text.index("ValueError: rank 1 is to blame") < text.index("as a consequence of another rank's end")
    assert text.count("in _first_rank_waits") == 2
    run_ranks(_describe, 2, "the next test works", scale=1.0)


def _hang(rank, world):
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))


def test_a_hang_is_reported_within_its_limit_with_stacks():
    run_ranks(_describe, 2, "warm up", scale=1.0)
    start = time.monotonic()
    with pytest.raises(RankFailure, match="time limit exceeded") as info:
        run_ranks(_hang, 2, timeout=1)
    assert time.monotonic() - start < 10
    assert str(info.value).count("in _hang") == 2
    run_ranks(_describe, 2, "the next test works", scale=1.0)


def _die(rank, world):
    if rank == 0:
        os._exit(3)
    dist.barrier()


def _one_collective_too_many(rank, world):
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def _skip(rank, world):
    if rank == 0:
        pytest.skip("not today")
    dist.barrier()


def test_a_dead_rank_an_unmatched_collective_and_a_skip_are_told_apart(monkeypatch):
    monkeypatch.setattr("tests.harness.CHECK_LIMIT", 1.0)
    with pytest.raises(RankFailure, match="the process died, exit code 3"):
        run_ranks(_die, 2)
    with pytest.raises(RankFailure, match="did every rank run the same collectives"):
        run_ranks(_one_collective_too_many, 2)
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_ranks(_skip, 2)
    run_ranks(_describe, 2, "the next test works", scale=1.0)


def test_bodies_that_cannot_travel_are_refused():
    with pytest.raises(TypeError, match="top of its module"):
        run_ranks(lambda rank, world: None, 2)
    with pytest.raises(TypeError, match="rank, world"):
        ranks(2)(lambda world: None)


def test_a_fake_world_leaves_no_group_behind():
    for world in (2, 1024):
        with fake_world(world, rank=1):
            dist.all_reduce(torch.ones(1))
            assert (dist.get_rank(), dist.get_world_size()) == (1, world)
    assert not dist.is_initialized()
