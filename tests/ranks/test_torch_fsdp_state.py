"""FSDP1's state dicts, optimizer states and whole parameters are those of a single process."""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from shardkit.integrations.torch_fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ModuleWrapPolicy,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP
from tests.harness import ranks, run_ranks
from tests.oracle import Block, Net, Twins, adam, compare, data, grads, params, raises, seeded, sgd, square_loss

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
sharded = functools.partial(FSDP, auto_wrap_policy=ModuleWrapPolicy({Block}))


class WithBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))


def trained(rank, world, optim=adam, build=Net):
    return Twins(rank, world, build, wrap=sharded, optim=optim).train(square_loss, 2)


@ranks(2)
def test_the_state_dict_is_whole_unless_another_type_is_set(rank, world):
    twins = trained(rank, world, build=WithBuffer)
    model = twins.model
    want = {k: v.clone() for k, v in twins.ref.state_dict().items()}
    compare("default", dict(model.state_dict()), want, 1e-5)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        got = model.state_dict()
        assert list(got) == (list(want) if rank == 0 else [])
    for kind, config in ((SHARDED, ShardedStateDictConfig(True)), (StateDictType.LOCAL_STATE_DICT, None)):
        before = FSDP.set_state_dict_type(model, kind, config)
        assert before.state_dict_type is FULL and FSDP.get_state_dict_type(model).state_dict_type is kind
        pieces = model.state_dict()
        assert all(isinstance(pieces[n], shardkit.LocalShard) for n, _ in model.named_parameters())
        compare("pieces", {n: v.full_tensor() for n, v in pieces.items() if n != "scale"}, params(twins.ref), 1e-5)
        old = (before.state_dict_type, before.state_dict_config, before.optim_state_dict_config)
        FSDP.set_state_dict_type(model, *old)
    raises(shardkit.ConfigError, FSDP.set_state_dict_type, model, FULL, LocalStateDictConfig())


@ranks(2)
def test_torchs_own_state_dict_types_are_understood(rank, world):
    from torch.distributed import fsdp

    model = sharded(seeded(Net))
    config = fsdp.FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with FSDP.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, config):
        assert bool(model.state_dict()) == (rank == 0)
    with FSDP.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
        assert isinstance(model.state_dict()["inp.weight"], shardkit.LocalShard)


@ranks(2)
def test_a_state_dict_asked_of_a_module_around_units_is_whole_too(rank, world):
    around = nn.ModuleDict({"a": sharded(seeded(Net)), "b": nn.Linear(2, 2), "c": FSDP(nn.BatchNorm1d(4))})
    plain = nn.ModuleDict({"a": seeded(Net), "b": nn.Linear(2, 2), "c": nn.BatchNorm1d(4)})
    plain["b"].load_state_dict(around["b"].state_dict())
    got, want = around.state_dict(), plain.state_dict()
    compare("whole", dict(got), dict(want), rtol=0)
    assert set(got._metadata) == set(want._metadata) and got._metadata["c"] == {"version": 2}
    assert list(around["a"].blocks[0].state_dict(prefix="x.")) == [f"x.{n}" for n in plain["a"].blocks[0].state_dict()]
    around.load_state_dict(want)


@ranks(2)
def test_saving_and_loading_restores_the_weights_in_every_type(rank, world):
    for kind in (FULL, SHARDED, StateDictType.LOCAL_STATE_DICT):
        twins = trained(rank, world)
        with FSDP.state_dict_type(twins.model, kind):
            saved = {k: v.clone() for k, v in twins.model.state_dict().items()}
            twins.train(square_loss, 1)
            moved = [not torch.equal(v, saved[k]) for k, v in twins.model.state_dict().items() if saved[k].numel()]
            assert all(moved)
            twins.model.load_state_dict(saved)
            again = twins.model.state_dict()
        assert all(torch.equal(again[k], saved[k]) for k in saved)


@ranks(2)
def test_shardkits_and_torchs_checkpoints_take_the_model(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    twins = trained(rank, world)
    shardkit.save_checkpoint(tmp_path / "own", twins.model, twins.optim)
    with FSDP.state_dict_type(twins.model, SHARDED):
        dcp.save({"model": twins.model.state_dict()}, checkpoint_id=tmp_path / "torch")
    assert isinstance(get_model_state_dict(twins.model)["inp.weight"], shardkit.LocalShard)
    for folder in ("own", "torch"):
        fresh = sharded(seeded(Net, 1)) if folder == "torch" else sharded(seeded(Net, 2))
        if folder == "own":
            shardkit.load_checkpoint(tmp_path / folder, fresh, adam(fresh.parameters()))
        else:
            with FSDP.state_dict_type(fresh, SHARDED):
                state = {"model": fresh.state_dict()}
                dcp.load(state, checkpoint_id=tmp_path / folder)
                fresh.load_state_dict(state["model"])
        compare(folder, dict(fresh.state_dict()), params(twins.ref), 1e-5)


# ---------------------------------------------------------------------------------------------- optimizer states


def by_name(ref, optim):
    names = dict(zip(range(99), (n for n, _ in ref.named_parameters())))
    state = optim.state_dict()
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in state["param_groups"]]
    return {"state": {names[i]: v for i, v in state["state"].items()}, "param_groups": groups}


def check_state(got, want, rtol=1e-5):
    assert set(got["state"]) == set(want["state"])
    for name, values in want["state"].items():
        compare(f"state of {name}", got["state"][name], values, rtol)
    assert [g["params"] for g in got["param_groups"]] == [g["params"] for g in want["param_groups"]]
    assert [g["lr"] for g in got["param_groups"]] == [g["lr"] for g in want["param_groups"]]


def in_groups(parameters):
    parameters = list(parameters)
    return torch.optim.Adam([{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.03}], lr=0.01)


@ranks(2)
def test_the_full_optimizer_state_is_a_single_processs(rank, world):
    for optim in (adam, sgd, in_groups):
        twins = trained(rank, world, optim)
        want = by_name(twins.ref, twins.ref_optim)
        state = FSDP.full_optim_state_dict(twins.model, twins.optim)
        if rank == 0:
            check_state(state, want)
        else:
            assert state == {}
        check_state(FSDP.full_optim_state_dict(twins.model, twins.optim, rank0_only=False), want)
        check_state(FSDP.optim_state_dict(twins.model, twins.optim), want)
        check_state(FSDP.optim_state_dict(twins.model, twins.optim, twins.optim.state_dict()), want)
        config = FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(twins.model, FULL, optim_state_dict_config=config):
            assert bool(FSDP.optim_state_dict(twins.model, twins.optim)) == (rank == 0)


def resumed(rank, world, twins, load):
    """A fresh model and optimizer that get the twins' weights, and optimizer state by `load`, train on as they do."""
    state = twins.model.state_dict()
    model = sharded(seeded(Net, 5))
    model.load_state_dict(state)
    optim = in_groups(model.parameters())
    load(model, optim)
    twins.model, twins.optim = model, optim
    twins.train(square_loss, 2, rtol=1e-5)


@ranks(2)
def test_training_resumes_from_every_form_of_optimizer_state(rank, world):
    def direct(model, optim):
        FSDP.optim_state_dict_to_load(model, optim, FSDP.optim_state_dict(*source), load_directly=True)

    def to_load(model, optim):
        state = FSDP.optim_state_dict(*source)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model=model, optim=optim, optim_state_dict=state))

    def shard_full(model, optim):
        state = FSDP.full_optim_state_dict(*source, rank0_only=False)
        optim.load_state_dict(FSDP.shard_full_optim_state_dict(state, model, optim=optim))

    def scatter_full(model, optim):
        state = FSDP.full_optim_state_dict(*source) or None
        optim.load_state_dict(FSDP.scatter_full_optim_state_dict(state, model, optim=optim))

    def rank0_only(model, optim):
        config = FullOptimStateDictConfig(rank0_only=True)
        FSDP.set_state_dict_type(model, FULL, optim_state_dict_config=config)
        FSDP.set_state_dict_type(source[0], FULL, optim_state_dict_config=config)
        state = FSDP.optim_state_dict(*source)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state))

    def pieces(model, optim):
        state = FSDP.sharded_optim_state_dict(*source)
        assert isinstance(state["state"]["inp.weight"]["exp_avg"], shardkit.LocalShard)
        optim.load_state_dict(FSDP.flatten_sharded_optim_state_dict(state, model, optim))

    def pieces_by_type(model, optim):
        for m in (model, source[0]):
            FSDP.set_state_dict_type(m, SHARDED, optim_state_dict_config=ShardedOptimStateDictConfig(True))
        state = FSDP.optim_state_dict(*source)
        FSDP.set_state_dict_type(source[0], FULL)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state))

    for load in (direct, to_load, shard_full, scatter_full, rank0_only, pieces, pieces_by_type):
        twins = trained(rank, world, in_groups)
        source = twins.model, twins.optim
        resumed(rank, world, twins, load)


@ranks(2)
def test_the_sharded_optimizer_state_goes_through_torchs_checkpoints(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp

    twins = trained(rank, world, in_groups)
    dcp.save({"optim": FSDP.sharded_optim_state_dict(twins.model, twins.optim)}, checkpoint_id=tmp_path / "c")
    again = trained(rank, world, in_groups)
    state = {"optim": FSDP.sharded_optim_state_dict(again.model, again.optim)}
    for values in state["optim"]["state"].values():
        values["exp_avg"].zero_()
    dcp.load(state, checkpoint_id=tmp_path / "c")
    again.optim.load_state_dict(FSDP.optim_state_dict_to_load(again.model, again.optim, state["optim"]))
    again.train(square_loss, 2)


@ranks(2)
def test_rekeyed_states_load_into_plain_models_and_back(rank, world):
    twins = trained(rank, world)
    full = FSDP.full_optim_state_dict(twins.model, twins.optim, rank0_only=False)
    plain = seeded(Net)
    plain.load_state_dict(twins.model.state_dict())
    optim = adam(plain.parameters())
    for extra in ({}, {"optim": optim}, {"optim_input": list(plain.parameters())}):
        numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, **extra)
        assert set(numbered["state"]) == set(range(len(full["state"])))
        optim.load_state_dict(numbered)
    named = FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    check_state(named, by_name(twins.ref, twins.ref_optim))
    fresh = adam(twins.model.parameters())
    fresh.load_state_dict(FSDP.shard_full_optim_state_dict(named, twins.model))
    twins.optim = fresh
    twins.train(square_loss, 2)


def save_on(rank, world, folder):
    twins = trained(rank, world)
    state = FSDP.full_optim_state_dict(twins.model, twins.optim)
    weights = twins.model.state_dict()
    if rank == 0:
        torch.save({"model": weights, "optim": state}, f"{folder}/c.pt")


def load_on(rank, world, folder):
    saved = torch.load(f"{folder}/c.pt")
    model = sharded(seeded(Net, 3))
    model.load_state_dict(saved["model"])
    optim = adam(model.parameters())
    optim.load_state_dict(FSDP.shard_full_optim_state_dict(saved["optim"], model, optim=optim))
    got = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    for name, values in saved["optim"]["state"].items():
        compare(name, got["state"][name], values, rtol=0)
    compare("weights", dict(model.state_dict()), dict(saved["model"]), rtol=0)


def test_full_states_load_on_another_number_of_ranks(tmp_path):
    run_ranks(save_on, 2, str(tmp_path))
    run_ranks(load_on, 4, str(tmp_path))


# ----------------------------------------------------------------------------------------------- whole parameters


@ranks(2)
def test_summoned_parameters_are_whole_and_writes_stay(rank, world):
    twins = trained(rank, world)
    model, want = twins.model, params(twins.ref)
    with FSDP.summon_full_params(model):
        compare("whole", params(model), want, 1e-5)
        with torch.no_grad():
            model.inp.weight.fill_(2.0)
    assert model.state_dict()["inp.weight"].eq(2.0).all()
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert model.inp.weight.shape == (5, 5)
        model.inp.weight.data.fill_(3.0)
    assert model.state_dict()["inp.weight"].eq(2.0).all()
    with FSDP.summon_full_params(model, recurse=False):
        assert model.inp.weight.shape == (5, 5)
        assert sum(b.up.weight.numel() for b in model.blocks) < 3 * 55
    raises(shardkit.ConfigError, lambda: FSDP.summon_full_params(model, rank0_only=True).__enter__())


@ranks(2)
def test_summoned_gradients_are_whole_and_writes_stay(rank, world):
    twins = trained(rank, world)
    with twins.model.summon_full_params(with_grads=True):
        compare("gradient", grads(twins.model), grads(twins.ref), 1e-5)
        twins.model.inp.weight.grad.fill_(1.0)
    assert twins.model.inp.weight.grad.full_tensor().eq(1.0).all()
    assert twins.model.inp.weight.grad.shape == twins.model.inp.weight.shape


@ranks(2)
def test_an_exception_leaves_the_model_usable(rank, world):
    """In FSDP1 nothing works after an exception in forward."""
    twins = Twins(rank, world, Net, wrap=sharded)
    handle = twins.model.blocks[1].register_forward_hook(lambda *a: 1 / 0)
    raises(ZeroDivisionError, twins.model, data(0, 4, 5))
    handle.remove()
    twins.model.state_dict()
    twins.train(square_loss, 2)
    dist.barrier()
