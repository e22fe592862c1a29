"""torch's own state-dict functions on a sharded model: right, or refused with a sentence."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import shardkit
from tests.harness import ranks
from tests.ranks.checkpoint_models import Net, assert_same, build, step, whole, wrap

FULL = StateDictOptions(full_state_dict=True)


def trained(seed=0, **options):
    model = wrap(seed, **options)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optim, 1)
    return model, optim


@ranks(2)
def test_a_full_model_state_is_whole(rank, world):
    model = wrap(0)
    got = get_model_state_dict(model, options=FULL)
    assert not any(isinstance(v, shardkit.LocalShard) for v in got.values())
    assert_same(got, shardkit.full_state_dict(model))
    got = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(got) == (rank == 0)
    if rank == 0:
        assert_same(got, build(0).state_dict())
    other = wrap(1, units=(nn.Linear,))
    set_model_state_dict(other, build(0).state_dict(), options=FULL)
    assert_same(whole(other), whole(model))
    last = wrap(2)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(last, build(0).state_dict() if rank == 0 else {}, options=from_first)
    assert_same(whole(last), whole(model))


@ranks(2)
def test_a_full_model_state_is_whole_inside_a_module_that_is_not_sharded(rank, world):
    outer = nn.Sequential(nn.Linear(2, 2), wrap(0))
    got = get_model_state_dict(outer, options=FULL)
    assert_same({k[2:]: v for k, v in got.items() if k.startswith("1.")}, build(0).state_dict())


@ranks(2)
def test_a_sharded_model_state_is_pieces_that_know_it(rank, world):
    model = wrap(0)
    for options in (None, StateDictOptions(cpu_offload=True)):
        got = get_model_state_dict(model, options=options)
        names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        assert {k for k, v in got.items() if isinstance(v, shardkit.LocalShard)} == names
        other = wrap(1)
        set_model_state_dict(other, got)
        assert_same(whole(other), whole(model))


@pytest.mark.parametrize("flat", [False, True])
@ranks(2)
def test_a_full_optimizer_state_is_whole(rank, world, flat):
    model, optim = trained()
    want = shardkit.full_optim_state_dict(model, optim)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    got = get_optimizer_state_dict(model, optim, options=options)
    for name, values in want["state"].items():
        for key, value in values.items():
            assert torch.equal(got[f"state.{name}.{key}"] if flat else got["state"][name][key], value), (name, key)
    with pytest.raises(shardkit.StateError, match="load_full_optim_state_dict"):
        set_optimizer_state_dict(model, optim, got, options=options)


@pytest.mark.parametrize("flat", [False, True])
@ranks(2)
def test_torchs_recipe_saves_and_loads_a_sharded_model_and_its_optimizer(rank, world, flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optim = trained()
    state, optim_state = get_state_dict(model, optim, options=options)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=tmp_path / "a")
    other, other_optim = trained(1, units=(nn.Linear,))
    state, optim_state = get_state_dict(other, other_optim, options=options)
    loaded = {"model": state, "optim": optim_state}
    dcp.load(loaded, checkpoint_id=tmp_path / "a")
    set_state_dict(
        other, other_optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"], options=options
    )
    assert_same(whole(other, other_optim), whole(model, optim))
    step(model, optim, 2)
    step(other, other_optim, 2)
    assert_same(whole(other, other_optim), whole(model, optim))
    last, last_optim = wrap(3, units=()), None
    last_optim = torch.optim.Adam(last.parameters())
    shardkit.load_checkpoint(tmp_path / "a", last, last_optim)  # and shardkit reads what torch wrote


@ranks(2)
def test_an_optimizer_over_more_than_the_sharded_module_is_refused(rank, world):
    outer = nn.Sequential(nn.Linear(2, 2), wrap(0))
    optim = torch.optim.SGD(outer.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(shardkit.StateError, match="got a Sequential of which only a part is sharded"):
        get_optimizer_state_dict(outer, optim)


@ranks(2)
def test_everybody_else_still_gets_pieces(rank, world):
    model = wrap(0)
    assert isinstance(model, Net)
    assert isinstance(model.state_dict()["emb.weight"], shardkit.LocalShard)
    assert [n for n, _ in model.named_parameters(recurse=False)] == ["scale", "nothing", "cube"]
