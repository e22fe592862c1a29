"""State dicts, optimizer states and wrap helpers of fairscale's FullyShardedDataParallel."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from shardkit.integrations.fairscale import (
    ConfigAutoWrap,
    auto_wrap,
    checkpoint_wrapper,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
    wrap,
)
from shardkit.integrations.fairscale import FullyShardedDataParallel as FSDP
from tests.harness import ranks, run_ranks
from tests.oracle import LM, Block, Net, Twins, adam, compare, lm_loss, params, raises, seeded, sgd, square_loss


def nested(model, **options):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(block, **options)
    return FSDP(model, **options)


class WithBuffers(LM):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids):
        return super().forward(ids) + self.norm(torch.ones(3, 4)).mean()


def trained(rank, world, build=LM, optim=adam, loss=lm_loss):
    return Twins(rank, world, build, wrap=nested, optim=optim).train(loss, 2)


# --------------------------------------------------------------------------------------------------- 18, 19: weights


@ranks(2)
def test_state_dicts_are_whole_and_load_back(rank, world):
    """18, 19: before and after forward, twice; save, train, load, save gives the same; keys of the unwrapped model."""
    fresh = nested(seeded(WithBuffers))
    compare("fresh", dict(fresh.state_dict()), dict(seeded(WithBuffers).state_dict()), rtol=0)
    twins = trained(rank, world, WithBuffers)
    first, second = twins.model.state_dict(), twins.model.state_dict()
    compare("twice", dict(first), dict(second), rtol=0)
    compare("trained", {k: v for k, v in first.items() if "norm" not in k}, {
        k: v for k, v in twins.ref.state_dict().items() if "norm" not in k}, 1e-5)  # fmt: skip
    twins.train(lm_loss, 1)
    assert not torch.equal(twins.model.state_dict()["emb.weight"], first["emb.weight"])
    with no_pre_load_state_dict_hook():
        twins.model.load_state_dict(first)
    compare("loaded", dict(twins.model.state_dict()), dict(first), rtol=0)


@ranks(2)
def test_local_state_dicts_load_back_on_their_rank_and_are_plain(rank, world, tmp_path):
    twins = trained(rank, world)
    state = twins.model.local_state_dict()
    assert all(type(v) is torch.Tensor for v in state.values())
    torch.save(state, tmp_path / f"{rank}.pt")
    twins.train(lm_loss, 1)
    assert any(not torch.equal(v, state[k]) for k, v in twins.model.local_state_dict().items())
    twins.model.load_local_state_dict(torch.load(tmp_path / f"{rank}.pt"))
    compare("local", dict(twins.model.local_state_dict()), dict(state), rtol=0)
    other = torch.load(tmp_path / f"{1 - rank}.pt")
    raises(shardkit.CheckpointError, twins.model.load_local_state_dict, other)


def save_shards(rank, world, folder, build, loss):
    twins = Twins(rank, world, build, wrap=nested, optim=adam).train(loss, 2)
    shard = {"weights": twins.model.local_state_dict(), "meta": twins.model.local_metadata_dict()}
    torch.save(shard, f"{folder}/{rank}.pt")
    return dict(twins.model.state_dict())


@pytest.mark.parametrize("build, loss", [(WithBuffers, lm_loss), (Net, square_loss)])
@pytest.mark.parametrize("world", [2, 4])
def test_shards_are_consolidated_offline(tmp_path, build, loss, world):
    """28: tied weights and buffers too (fairscale: KeyError). Partial shards with strict=False."""
    whole = run_ranks(save_shards, world, str(tmp_path), build, loss)[0]
    shards = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    weights, meta = [s["weights"] for s in shards], [s["meta"] for s in shards]
    full = FSDP.consolidate_shard_weights(weights, meta)
    compare("consolidated", full, whole, rtol=0)
    seeded(build, 3).load_state_dict(full)
    bare = FSDP.consolidate_shard_weights(weights, meta, with_module_buffers=False)
    assert set(bare) == {n for n, _ in build().named_parameters(remove_duplicate=False)}
    partial = [{k: v for k, v in w.items() if "head" not in k} for w in weights]
    raises(shardkit.CheckpointError, FSDP.consolidate_shard_weights, partial, meta)
    some = FSDP.consolidate_shard_weights(partial, meta, strict=False)
    compare("partial", some, {k: v for k, v in whole.items() if "head" not in k}, rtol=0)
    lost = [weights[0], *({} for _ in weights[1:])]
    raises(shardkit.CheckpointError, FSDP.consolidate_shard_weights, lost, meta)
    raises(ValueError, FSDP.consolidate_shard_weights, weights[:1], meta)
    theirs = [{"param_metadata": [{"fsdp_path": "", "params": {}}], "buffer_names": []}] * world
    assert "shardkit convert" in str(raises(shardkit.CheckpointError, FSDP.consolidate_shard_weights, weights, theirs))


# --------------------------------------------------------------------------------------------- 29: optimizer states


def in_groups(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW([{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.03}], lr=0.01)


@ranks(2)
def test_gathered_optimizer_states_are_a_single_processs(rank, world):
    """On rank 0, in the unwrapped optimizer's numbers. fairscale: one group only, and exp_avg == exp_avg_sq on CPUs."""
    for optim in (adam, in_groups, sgd, functools.partial(torch.optim.SGD, lr=0.1)):
        twins = trained(rank, world, optim=optim)
        state = twins.model.gather_full_optim_state_dict(twins.optim)
        assert (state is None) == (rank != 0)
        if rank == 0:
            want = twins.ref_optim.state_dict()
            assert set(state["state"]) == set(want["state"]) and state["param_groups"] == want["param_groups"]
            for i, values in want["state"].items():
                compare(f"state {i}", state["state"][i], values, 1e-5)
                if "exp_avg" in values:
                    assert not torch.equal(state["state"][i]["exp_avg"], state["state"][i]["exp_avg_sq"])
            optim(twins.ref.parameters()).load_state_dict(state)


@ranks(2)
def test_optimizer_states_reshard_to_what_they_were(rank, world):
    """Also with unused parameters in the middle, and keys of the user's own are kept."""

    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.middle, self.last = nn.Linear(2, 2), nn.Linear(3, 3)

        def forward(self, x):
            return self.last(super().forward(x))

    twins = trained(rank, world, Unused, loss=square_loss)
    twins.optim.register_state_dict_post_hook(lambda o, state: {**state, "loss_scale": 3.0})
    before = copy.deepcopy(twins.optim.state_dict())
    box = [twins.model.gather_full_optim_state_dict(twins.optim)]
    dist.broadcast_object_list(box)
    assert box[0]["loss_scale"] == 3.0
    whole = copy.deepcopy(box[0])
    shard = twins.model.get_shard_from_optim_state_dict(box[0])
    assert shard.pop("loss_scale") == 3.0
    assert repr(whole) == repr(box[0])  # what was passed is not changed
    for i, values in before["state"].items():
        compare(f"state {i}", shard["state"][i], values, rtol=0)
    twins.optim.load_state_dict(shard)
    plain = twins.ref_optim.state_dict()  # from a run without shardkit, whose numbers are those of the parameters
    twins.optim.load_state_dict(twins.model.get_shard_from_optim_state_dict(plain))
    twins.train(square_loss, 2, rtol=1e-5)


def save_optim(rank, world, folder):
    twins = trained(rank, world, optim=in_groups)
    state = twins.model.gather_full_optim_state_dict(twins.optim)
    weights = twins.model.state_dict()
    if rank == 0:
        torch.save((weights, state), f"{folder}/c.pt")


def resume_optim(rank, world, folder):
    weights, state = torch.load(f"{folder}/c.pt")
    model = nested(seeded(LM, 4))
    model.load_state_dict(weights)
    optim = in_groups(model.parameters())
    optim.load_state_dict(model.get_shard_from_optim_state_dict(state))
    again = model.gather_full_optim_state_dict(optim)
    if rank == 0:
        for i, values in state["state"].items():
            compare(f"state {i}", again["state"][i], values, rtol=0)


def test_optimizer_states_load_on_another_number_of_ranks(tmp_path):
    run_ranks(save_optim, 4, str(tmp_path))
    run_ranks(resume_optim, 2, str(tmp_path))


@ranks(2)
def test_no_broadcast_optim_state_keeps_a_units_state_on_its_rank(rank, world):
    def build(m):
        FSDP(m.blocks[0], no_broadcast_optim_state=True)
        return FSDP(m)

    twins = Twins(rank, world, Net, wrap=build, optim=adam).train(square_loss, 2)
    before = copy.deepcopy(twins.optim.state_dict())
    box = [twins.model.gather_full_optim_state_dict(twins.optim)]
    dist.broadcast_object_list(box)
    names = [n for n, _ in twins.ref.named_parameters()]
    assert {names[i] for i in box[0]["uncollected_local_ids"]} == {n for n in names if n.startswith("blocks.0.")}
    assert not set(box[0]["uncollected_local_ids"]) & set(box[0]["state"])
    shard = twins.model.get_shard_from_optim_state_dict(box[0])
    for i, values in before["state"].items():
        compare(f"state {i}", shard["state"][i], values, rtol=0)


# -------------------------------------------------------------------------------------------------- 30: wrap helpers


def count(model):
    return {name for name, m in model.named_modules() if isinstance(m, FSDP)}


@ranks(2)
def test_wrap_takes_arguments_from_context_tag_and_call(rank, world):
    assert not count(wrap(nn.Linear(5, 5))) and not count(auto_wrap(nn.Linear(5, 5)))
    layer = nn.Linear(5, 5)
    layer.wrapper_config = {"bucket_cap_mb": 0, "reshard_after_forward": False}
    with enable_wrap(wrapper_cls=FSDP, verbose=True, bucket_cap_mb=25):
        wrapped = wrap(layer, reshard_after_forward=True)
        with enable_wrap(wrapper_cls=checkpoint_wrapper):  # fairscale: NotImplementedError
            assert wrap(nn.Linear(2, 2)) and not count(wrap(nn.Linear(2, 2)))
        assert ConfigAutoWrap.in_autowrap_context
    assert not ConfigAutoWrap.in_autowrap_context
    text = repr(wrapped)
    assert "verbose=True" in text and "bucket_cap_mb=0" in text and "reshard_after_forward=True" in text
    raises(shardkit.ConfigError, ConfigAutoWrap)
    context = ConfigAutoWrap(wrapper_cls=FSDP)
    for _ in range(2):  # fairscale: the second time it has no wrapper_cls
        with context:
            assert count(wrap(nn.Linear(2, 2))) == {""}
    with pytest.raises(ZeroDivisionError), context:
        1 / 0  # noqa: B018
    assert not ConfigAutoWrap.in_autowrap_context


@ranks(2)
def test_auto_wrap_takes_what_the_policy_takes(rank, world):
    def policy(n, **options):
        return functools.partial(default_auto_wrap_policy, min_num_params=n, **options)

    def made(rule, build=Net):
        with enable_wrap(wrapper_cls=FSDP):
            return count(auto_wrap(seeded(build), rule))

    assert made(None) == set()  # fewer than 1e8
    assert made(policy(120)) == {f"blocks.{i}" for i in range(3)}
    assert {"inp", "blocks.0.up"} <= made(policy(1)) and not {"", "blocks", "blocks.0"} & made(policy(1))
    assert made(policy(120, skip_params_check_for_root=True)) == {"", *(f"blocks.{i}" for i in range(3))}
    assert made(policy(60, exclude_wrap_modules={nn.Linear, nn.ModuleList})) == {f"blocks.{i}" for i in range(3)}
    leafy = made(policy(50, force_leaf_modules={Block}))
    assert not any(name.startswith("blocks.0.") for name in leafy)
    encoder = made(policy(1), lambda: nn.TransformerEncoderLayer(4, 2, 8))
    assert "linear1" in encoder and not any(name.startswith("self_attn") for name in encoder)

    def tagged():
        model = Net()
        model.blocks[1].wrapper_config = {"reshard_after_forward": False}
        return model

    assert made(config_auto_wrap_policy, tagged) == {"blocks.1"}
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FSDP):
        model = auto_wrap(tagged())
        raises(shardkit.StateError, auto_wrap, model)
        assert get_fsdp_instances(model) == [model.blocks[1]]


@ranks(2)
def test_an_automatically_wrapped_model_trains(rank, world):
    def build(model):
        policy = functools.partial(default_auto_wrap_policy, min_num_params=60)
        with enable_wrap(policy, wrapper_cls=FSDP, flatten_parameters=False):
            return wrap(auto_wrap(model))

    twins = Twins(rank, world, Net, wrap=build).train(square_loss, 3)
    assert {"", "blocks.0.up"} <= count(twins.model)
    empty = nn.Sequential(FSDP(nn.Linear(2, 2)))
    assert len(get_fsdp_instances(FSDP(empty), skip_empty=True)) == 1
    compare("weights", dict(twins.model.state_dict()), params(twins.ref), 1e-5)


@ranks(2)
def test_other_wrapper_classes_replace_the_children(rank, world):
    class Doubling(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return 2 * self.inner(x)

    with enable_wrap(wrapper_cls=Doubling):
        model = auto_wrap(Net(), lambda module, recurse, **kw: recurse or isinstance(module, Block))
    assert all(isinstance(block, Doubling) for block in model.blocks)
