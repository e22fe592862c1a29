"""Checkpoints of FSDP2 and FSDP1 load into shardkit, and shardkit's into FSDP2."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import shardkit
from tests.harness import ranks, run_ranks
from tests.ranks.checkpoint_models import Block, assert_same, loss_of, step, whole


class Plain(nn.Module):
    """What FSDP2 can shard: no scalars, nothing empty."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 11)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed=0):
    torch.manual_seed(seed)
    return Plain()


def make_optim(model):
    decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def fsdp2(seed):
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build(seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    return model, make_optim(model)


def fsdp1(seed):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    warnings.simplefilter("ignore")
    policy = ModuleWrapPolicy({Block})
    model = FSDP(build(seed), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
    return model, make_optim(model)


def ours(seed, units=(Block,)):
    model = shardkit.auto_wrap(build(seed), policy=set(units))
    return model, make_optim(model)


def reference(seeds):
    """The same steps in one process, which sees every rank's batch."""
    model = build(0)
    optim = make_optim(model)
    for seed in seeds:
        optim.zero_grad()
        loss_of(model, seed).backward()
        optim.step()
    return model.state_dict()


def assert_close(got, want):
    # Gradients are averaged over ranks that all have the same batch: rounding of the sum, and Adam's division by it.
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def _their_save(rank, world, folder, kind, flat):
    model, optim = {"fsdp2": fsdp2, "fsdp1": fsdp1}[kind](0)
    step(model, optim, 1)
    state, optim_state = get_state_dict(model, optim, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=folder)


def _our_load(rank, world, folder, save=None):
    model, optim = ours(3, (nn.Linear,))
    shardkit.load_checkpoint(folder, model, optim)
    assert_close(shardkit.full_state_dict(model), reference([1]))
    assert [g["weight_decay"] for g in optim.param_groups] == [0.01, 0.0]
    step(model, optim, 2)
    assert_close(shardkit.full_state_dict(model), reference([1, 2]))
    if save is not None:
        shardkit.save_checkpoint(save, model, optim)


def _fsdp2_load(rank, world, folder, flat):
    model, optim = fsdp2(5)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, optim_state = get_state_dict(model, optim, options=options)
    loaded = {"model": state, "optim": optim_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"], options=options
    )
    step(model, optim, 3)
    got = {k: v.full_tensor() for k, v in model.state_dict().items()}
    assert_close(got, reference([1, 2, 3]))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_an_fsdp2_checkpoint_continues_in_shardkit_and_goes_back(flat, tmp_path):
    run_ranks(_their_save, 2, tmp_path / "a", "fsdp2", flat)
    run_ranks(_our_load, 4, tmp_path / "a", tmp_path / "b")
    run_ranks(_fsdp2_load, 2, tmp_path / "b", False)


def test_an_fsdp1_checkpoint_continues_in_shardkit(tmp_path):
    # The nested form of FSDP1 on the CPU does not save (ranks disagree about the keys); the flat one does.
    run_ranks(_their_save, 2, tmp_path / "a", "fsdp1", True)
    run_ranks(_our_load, 4, tmp_path / "a")


@ranks(2)
def test_fsdp1_full_state_loads_into_shardkit(rank, world):
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    theirs, optim = fsdp1(0)
    step(theirs, optim, 1)
    # With offload_to_cpu, its default, FSDP1 on the CPU returns one moment in place of the other (torch 2.13).
    how = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(theirs, StateDictType.FULL_STATE_DICT, *how):
        state, optim_state = theirs.state_dict(), FSDP.optim_state_dict(theirs, optim)
    model, our_optim = ours(4)
    shardkit.load_full_state_dict(model, state)
    shardkit.load_full_optim_state_dict(model, our_optim, optim_state)
    step(model, our_optim, 2)
    assert_close(shardkit.full_state_dict(model), reference([1, 2]))


@ranks(2)
def test_a_plain_dcp_checkpoint_without_top_level_keys_loads(rank, world, tmp_path):
    dcp.save(build(0).state_dict(), checkpoint_id=tmp_path)
    model, optim = ours(1)
    shardkit.load_checkpoint(tmp_path, model)
    assert_same(whole(model), {f"model.{k}": v for k, v in build(0).state_dict().items()})
    with pytest.raises(shardkit.ConfigError, match="holds no optimizer state"):
        shardkit.load_checkpoint(tmp_path, model, optim)


@ranks(2)
def test_optimizer_state_by_number_is_refused(rank, world, tmp_path):
    plain = build(0)
    optim = make_optim(plain)
    step(plain, optim, 1)
    dcp.save({"model": plain.state_dict(), "optim": optim.state_dict()}, checkpoint_id=tmp_path)
    model, our_optim = ours(1)
    with pytest.raises(shardkit.ConfigError, match="by number"):
        shardkit.load_checkpoint(tmp_path, model, our_optim)
