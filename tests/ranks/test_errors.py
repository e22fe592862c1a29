"""What cannot work is said on every rank, with where and what to do; nobody hangs."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from shardkit import ConfigError, OrderError, PlanMismatchError, ShardkitError, StateError
from tests.harness import ranks, run_ranks
from tests.oracle import (
    Block,
    Net,
    Twins,
    data,
    full_params,
    mesh,
    params,
    raises,
    same_on_all_ranks,
    seeded,
    square_loss,
)


def _error(kind, body, *words):
    error = raises(kind, body)
    missing = [w for w in words if w not in str(error)]
    assert not missing, f"{missing} not in {error}"
    assert same_on_all_ranks(True)  # everybody is here
    return error


@ranks(2)
def test_wrapping_twice(rank, world):
    model = shardkit.auto_wrap(seeded(Net), policy={Block})
    _error(ConfigError, lambda: shardkit.auto_wrap(model), "already", "Net")
    _error(ConfigError, lambda: shardkit.FullyShardedDataParallel(model), "already", "Net")
    square_loss(model, rank, 0).backward()  # and goes on working


@ranks(2)
def test_wrapping_a_part_of_a_wrapped_model(rank, world):
    model = shardkit.auto_wrap(seeded(Net), policy={Block})
    for part in (model.blocks[0].up, model.blocks[0], model.head):
        _error(ConfigError, lambda part=part: shardkit.auto_wrap(part), "already")
    _error(ConfigError, lambda: shardkit.auto_wrap(nn.Sequential(model.head, nn.Linear(3, 3))), "already")
    square_loss(model, rank, 0).backward()


@ranks(2, 4)
@pytest.mark.parametrize("difference", ["shape", "dtype", "depth", "name", "frozen", "class", "strategy", "empty"])
def test_models_that_differ_between_ranks(rank, world, difference):
    last, model, options = rank == world - 1, seeded(Net), {}
    if difference == "shape" and last:
        model.blocks[1].up = nn.Linear(5, 12)
    elif difference == "dtype" and last:
        model.blocks[1].double()
    elif difference == "depth" and last:
        model.blocks.append(Block())
    elif difference == "name" and last:
        model.blocks[1].upper = model.blocks[1].__dict__["_modules"].pop("up")
    elif difference == "frozen" and last:
        model.head.bias.requires_grad_(False)
    elif difference == "class" and last:
        model.blocks[1] = type("Other", (Block,), {})()
    elif difference == "strategy":
        options["sharding_strategy"] = "grad_op" if last else "full"
    elif difference == "empty" and last:
        model = nn.Sequential()
    words = {"shape": ("blocks.1.up",), "dtype": ("float64",), "strategy": ("grad_op",)}
    _error(
        PlanMismatchError,
        lambda: shardkit.auto_wrap(model, policy={Block}, **options),
        f"{world - 1}",
        *words.get(difference, ()),
    )
    shardkit.auto_wrap(seeded(Net), policy={Block})(data(rank, 2, 5)).sum().backward()


@ranks(2)
def test_weights_that_differ_between_ranks(rank, world):
    for change in (lambda m: m.head.bias.data.add_(rank), lambda m: m.blocks[2].up.weight.data[0].mul_(1 + rank)):
        model = seeded(Net)
        change(model)
        _error(PlanMismatchError, lambda model=model: shardkit.auto_wrap(model, policy={Block}), "sync_module_states")
    model = seeded(Net)
    model.blocks[1].up.weight.data.copy_(
        model.blocks[1].up.weight.data.flip(0) if rank else model.blocks[1].up.weight.data
    )
    _error(PlanMismatchError, lambda: shardkit.auto_wrap(model, policy={Block}), "blocks.1.up.weight")


@ranks(2)
def test_after_a_refusal_the_model_is_as_it_was(rank, world):
    model, want = seeded(Net), params(seeded(Net))
    model.head.bias.data.add_(rank)
    raises(PlanMismatchError, lambda: shardkit.auto_wrap(model, policy={Block}))
    model.head.bias.data.sub_(rank)
    assert type(model) is Net and type(model.blocks[0]) is Block
    assert all(torch.allclose(p, want[n]) for n, p in model.named_parameters())
    twins = Twins(rank, world, Net, wrap=lambda _: shardkit.auto_wrap(seeded(Net), policy={Block}))
    twins.train(square_loss, 1)


@ranks(2)
def test_weights_that_differ_are_taken_from_the_first_rank_if_asked(rank, world):
    model = seeded(Net, seed=rank)
    shardkit.auto_wrap(model, policy={Block}, sync_module_states=True)
    assert all(torch.equal(p, params(seeded(Net, seed=0))[n]) for n, p in full_params(model).items())


@ranks(2)
def test_scripted_modules(rank, world):
    scripted = torch.jit.script(nn.Linear(5, 5))
    _error(ConfigError, lambda: shardkit.auto_wrap(scripted), "Script")
    holder = nn.Sequential(nn.Linear(5, 5), scripted)
    _error(ConfigError, lambda: shardkit.FullyShardedDataParallel(scripted), "Script")
    _error(ShardkitError, lambda: shardkit.auto_wrap(holder), "Script")


@ranks(2)
@pytest.mark.parametrize("options, words", [
    (dict(sharding_strategy="zero4"), ("zero4", "zero2")),
    (dict(shard_size=3), ("shard_size",)),
    (dict(reshard_after_forward=True, sharding_strategy="zero2"), ("reshard_after_forward", "zero2")),
    (dict(reshard_after_forward=3), ("reshard_after_forward",)),
    (dict(mixed_precision="bf16"), ("mixed_precision", "MixedPrecision")),
    (dict(cpu_offload=True, sharding_strategy="none"), ("cpu_offload",)),
    (dict(policy="blocks"), ("policy", "blocks")),
    (dict(policy=Block), ("policy", "Block")),
    (dict(policy={"Block"}), ("policy",)),
    (dict(policy=set()), ("policy", "empty")),
    (dict(ignored_modules=["head"]), ("ignored",)),
    (dict(process_group=[1, 2, 3]), ("process_group",)),
], ids=str)  # fmt: skip
def test_bad_options(rank, world, options, words):
    _error(ConfigError, lambda: shardkit.auto_wrap(seeded(Net), **options), *words)


@ranks(2)
def test_things_that_are_no_modules(rank, world):
    for thing in (None, nn.Linear, [nn.Linear(2, 2)], torch.ones(2), lambda x: x):
        _error(ConfigError, lambda thing=thing: shardkit.auto_wrap(thing), "nn.Module")
        _error(ConfigError, lambda thing=thing: shardkit.FullyShardedDataParallel(thing), "nn.Module")


@ranks(2)
def test_parameters_that_cannot_be_sharded(rank, world):
    lazy = nn.Sequential(nn.LazyLinear(3))
    _error(ConfigError, lambda: shardkit.auto_wrap(lazy), "0.weight", "lazy")
    sparse = nn.Linear(4, 4)
    sparse.weight = nn.Parameter(torch.eye(4).to_sparse())
    _error(ConfigError, lambda: shardkit.auto_wrap(sparse), "weight", "sparse")


@ranks(4)
def test_meshes_and_groups_that_do_not_fit(rank, world):
    _error(ConfigError, lambda: shardkit.auto_wrap(seeded(Net), device_mesh=mesh(2, 2, 1)), "3 dimensions")
    _error(
        ConfigError,
        lambda: shardkit.auto_wrap(seeded(Net), device_mesh=mesh(4), process_group=dist.group.WORLD),
        "both",
    )
    _error(
        ConfigError, lambda: shardkit.auto_wrap(seeded(Net), device_mesh=mesh(2, 2), sharding_strategy="none"), "none"
    )


@ranks(4)
def test_a_rank_outside_of_the_group(rank, world):
    group = _half()
    if rank < 2:
        shardkit.auto_wrap(seeded(Net), process_group=group)(data(rank, 2, 5)).sum().backward()
    else:
        raises(ConfigError, lambda: shardkit.auto_wrap(seeded(Net), process_group=group))


@functools.cache
def _half():
    return dist.new_group([0, 1])


def test_without_a_process_group():
    assert not dist.is_initialized()
    error = raises(ConfigError, lambda: shardkit.auto_wrap(seeded(Net)))
    assert "init_process_group" in str(error) and "torchrun" in str(error)


# ------------------------------------------------------------------------------------------------- at the wrong moment


@ranks(2)
def test_state_asked_for_during_a_forward(rank, world):
    model = shardkit.auto_wrap(seeded(Net), policy={Block})
    for ask in (
        model.state_dict,
        lambda: shardkit.full_state_dict(model),
        lambda: model.summon_full_params().__enter__(),
    ):
        handle = model.blocks[1].register_forward_hook(lambda *_, ask=ask: ask() and None)
        _error(StateError, lambda: model(data(rank, 2, 5)), "forward")
        handle.remove()
        model(data(rank, 2, 5)).sum().backward()


@ranks(2)
def test_state_of_a_model_that_is_not_sharded(rank, world):
    _error(StateError, lambda: shardkit.full_state_dict(seeded(Net)), "auto_wrap")
    model, other = shardkit.auto_wrap(seeded(Net)), seeded(Net)
    optim = torch.optim.SGD(other.parameters(), 0.1)
    _error(ConfigError, lambda: shardkit.full_optim_state_dict(model, optim), "model")


@ranks(2)
def test_a_backward_inside_summon_full_params(rank, world):
    model = shardkit.auto_wrap(seeded(Net), policy={Block})

    def body():
        with model.summon_full_params():
            model(data(rank, 2, 5)).sum().backward()

    _error(StateError, body, "backward")
    square_loss(model, rank, 0).backward()


@ranks(2)
def test_loading_of_a_state_that_does_not_fit(rank, world):
    model = shardkit.auto_wrap(seeded(Net), policy={Block})
    state = shardkit.full_state_dict(model)
    wrong = {**state, "head.weight": torch.zeros(4, 5)}
    _error(RuntimeError, lambda: shardkit.load_full_state_dict(model, wrong), "head.weight")
    missing = {k: v for k, v in state.items() if k != "head.bias"}
    _error(RuntimeError, lambda: shardkit.load_full_state_dict(model, missing), "head.bias")
    _error(RuntimeError, lambda: shardkit.load_full_state_dict(model, {**state, "more": torch.ones(1)}), "more")
    keys = shardkit.load_full_state_dict(model, {**missing, "more": torch.ones(1)}, strict=False)
    assert keys.missing_keys == ["head.bias"] and keys.unexpected_keys == ["more"]


@ranks(2)
def test_pickling_a_sharded_model(rank, world):
    import pickle

    _error(StateError, lambda: pickle.dumps(shardkit.auto_wrap(seeded(Net))), "full_state_dict")


# -------------------------------------------------------------------------------------------- ranks that go apart


def _apart(rank, world, how):
    """Returns the error that each rank got; the ranks are discarded afterwards."""
    model = shardkit.auto_wrap(seeded(Net), policy={Block})
    try:
        for _ in range(3):  # learnt by heart
            square_loss(model, rank, 0).backward()
        if how == "one forward more":
            for _ in range(2 if rank else 1):
                y = square_loss(model, rank, 1)
            y.backward()
        elif how == "no backward":
            y = square_loss(model, rank, 1)
            if rank == 0:
                y.backward()
            square_loss(model, rank, 2)
        elif how == "evaluation":
            if rank == 0:
                with torch.no_grad():
                    model(data(0, 2, 5))
            square_loss(model, rank, 1).backward()
        elif how == "forward raises":
            if rank == 0:
                model.blocks[1].register_forward_hook(_raise)
            try:
                square_loss(model, rank, 1).backward()
            except ZeroDivisionError:
                square_loss(model, rank, 1)
        elif how == "backward raises":
            y = square_loss(model, rank, 1)
            if rank == 0:
                model.blocks[1].register_full_backward_hook(_raise)
            try:
                y.backward()
                square_loss(model, rank, 1).backward()
            except ZeroDivisionError:
                square_loss(model, rank, 1)
    except ShardkitError as error:
        return type(error).__name__, str(error)
    return None


def _raise(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("how", ["one forward more", "no backward", "evaluation", "forward raises", "backward raises"])
def test_ranks_in_different_steps_are_told_so(how, world):
    answers = run_ranks(_apart, world, how, timeout=20, fresh=True)
    for name, text in answers:
        assert name == OrderError.__name__ and "rank 0" in text and "rank 1" in text
