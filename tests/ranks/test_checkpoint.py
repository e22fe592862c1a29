"""Distributed checkpoints: any number of ranks, mesh, strategy, wrapping and precision; torch's own dcp; extras."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from tests.harness import ranks, run_ranks
from tests.ranks.checkpoint_models import Block, assert_same, build, loss_of, step, whole, wrap

# ------------------------------------------------------------------------------------ torch.distributed.checkpoint


@ranks(2, 4)
def test_dcp_saves_and_loads_a_state_dict_as_it_is(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp

    model = wrap(0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "nested")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "flat")
    want = whole(model)
    other = wrap(1, units=(nn.Linear, nn.LayerNorm))  # other wrapping, other pieces
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "nested")
    other.load_state_dict(state["model"])
    assert_same(whole(other), want)
    last = wrap(2, units=())
    state = last.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "flat")
    last.load_state_dict(state)
    assert_same(whole(last), want)


@ranks(2)
def test_a_dcp_checkpoint_of_a_sharded_model_is_that_of_the_unwrapped_one(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": wrap(3).state_dict()}, checkpoint_id=tmp_path)
    plain = build(4)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, process_group=dist.new_group([rank], use_local_synchronization=True))
    assert_same(plain.state_dict(), build(3).state_dict())


@ranks(2)
def test_dcp_async_save_keeps_pieces_pieces(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp

    group = dist.new_group(backend="gloo")
    dcp.async_save({"model": wrap(0).state_dict()}, checkpoint_id=tmp_path, process_group=group).result()
    other = wrap(1, units=(nn.Linear,))
    shardkit.load_checkpoint(tmp_path, other)
    assert_same(whole(other), whole(wrap(0)))


@ranks(2)
def test_staging_that_would_save_one_piece_as_the_whole_is_refused(rank, world, tmp_path):
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    with pytest.raises(shardkit.StateError, match="shardkit.async_save"):
        BlockingAsyncStager().stage(wrap(0).state_dict())


# ------------------------------------------------------------------------------------------ save and load elsewhere


def _save(rank, world, folder, seed, steps, load=None, options=None):
    """Builds, perhaps loads, trains, saves; returns everything there is before the save and after the load."""
    torch.manual_seed(0)
    model = wrap(seed, **(options or {}))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    loaded = None
    if load is not None:
        shardkit.load_checkpoint(load, model, optim)
        loaded = whole(model, optim)
    for seed in steps:
        step(model, optim, seed)
    shardkit.save_checkpoint(folder, model, optim)
    return whole(model, optim), loaded


def test_reshard_from_4_to_2_to_3_ranks_is_bitwise_equal(tmp_path):
    four, _ = run_ranks(_save, 4, tmp_path / "four", 0, [1, 2])[0]
    linear = {"units": (nn.Linear,)}
    two, loaded = run_ranks(_save, 2, tmp_path / "two", 5, [3], load=tmp_path / "four", options=linear)[0]
    assert_same(loaded, four)
    _, loaded = run_ranks(_save, 3, tmp_path / "three", 6, [], load=tmp_path / "two", options={"units": ()})[0]
    assert_same(loaded, two)


@pytest.mark.parametrize("options", [
    {"sharding_strategy": "none"},
    {"sharding_strategy": "zero1"},
    {"sharding_strategy": "zero2"},
    {"sharding_strategy": "grad_op"},
    {"mixed_precision": shardkit.MixedPrecision(param_dtype=torch.bfloat16)},
    {"cpu_offload": True},
    {"hybrid": True},
], ids=lambda options: next(iter(options)) + "=" + str(next(iter(options.values())))[:8])  # fmt: skip
@ranks(4)
def test_a_checkpoint_loads_into_another_strategy_and_back(rank, world, options, tmp_path):
    if options.pop("hybrid", False):
        from torch.distributed.device_mesh import init_device_mesh

        options = {"sharding_strategy": "hybrid", "device_mesh": init_device_mesh("cpu", (2, 2))}
    model = wrap(0)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optim, 1)
    shardkit.save_checkpoint(tmp_path / "a", model, optim)
    other = wrap(1, **options)
    other_optim = torch.optim.Adam(other.parameters(), lr=0.5)
    shardkit.load_checkpoint(tmp_path / "a", other, other_optim)
    assert_same(whole(other, other_optim), whole(model, optim))
    shardkit.save_checkpoint(tmp_path / "b", other, other_optim)
    back = wrap(2)
    back_optim = torch.optim.Adam(back.parameters(), lr=0.25)
    shardkit.load_checkpoint(tmp_path / "b", back, back_optim)
    assert_same(whole(back, back_optim), whole(model, optim))


@ranks(2)
def test_replicas_share_the_writing(rank, world, tmp_path):
    model = wrap(0, sharding_strategy="none")
    shardkit.save_checkpoint(tmp_path / "a", model)
    sizes = [(tmp_path / "a" / f"__{r}_0.distcp").stat().st_size for r in range(world)]
    assert min(sizes) > 0.3 * sum(sizes), sizes


@ranks(2)
def test_a_float32_checkpoint_loads_into_a_bfloat16_model(rank, world, tmp_path):
    model = wrap(0)
    shardkit.save_checkpoint(tmp_path / "a", model)
    precision = shardkit.MixedPrecision(master_dtype=torch.bfloat16)
    low = shardkit.auto_wrap(build(1).bfloat16(), policy={Block}, mixed_precision=precision)
    shardkit.load_checkpoint(tmp_path / "a", low)
    want = {k: v.bfloat16() if v.is_floating_point() else v for k, v in whole(model).items()}
    assert_same(whole(low), want)


@ranks(2)
def test_resume_continues_bitwise_as_without_the_interruption(rank, world, tmp_path):
    model = wrap(0)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = [step(model, optim, s) for s in (1, 2)]
    shardkit.save_checkpoint(tmp_path / "a", model, optim)
    losses += [step(model, optim, s) for s in (3, 4)]
    again = wrap(9)
    again_optim = torch.optim.AdamW(again.parameters(), lr=7.0)
    shardkit.load_checkpoint(tmp_path / "a", again, again_optim)
    assert not again_optim.param_groups[0]["lr"] == 7.0
    assert [step(again, again_optim, s) for s in (3, 4)] == losses[2:]
    assert_same(whole(again, again_optim), whole(model, optim))


# ------------------------------------------------------------------------------------------------------ optimizers


def _groups(model):
    named = list(model.named_parameters())
    decay = [p for n, p in named if n.endswith("weight")]
    rest = [p for n, p in named if not n.endswith("weight")]
    return decay, rest


@ranks(2)
def test_groups_are_matched_by_their_parameters_and_keep_every_option(rank, world, tmp_path):
    model = wrap(0)
    decay, rest = _groups(model)
    optim = torch.optim.AdamW([{"params": decay, "lr": 0.1, "weight_decay": 0.3}, {"params": rest, "lr": 0.01}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda e: 0.5**e)
    step(model, optim, 1)
    scheduler.step()
    shardkit.save_checkpoint(tmp_path / "a", model, optim, scheduler=scheduler)
    other = wrap(1, units=(nn.Linear,))
    decay, rest = _groups(other)
    other_optim = torch.optim.AdamW([{"params": rest}, {"params": decay}], lr=9.0)  # the other way round
    extra = shardkit.load_checkpoint(tmp_path / "a", other, other_optim)
    assert [g["lr"] for g in other_optim.param_groups] == [0.005, 0.05]
    assert [g["initial_lr"] for g in other_optim.param_groups] == [0.01, 0.1]
    assert [g["weight_decay"] for g in other_optim.param_groups] == [0.01, 0.3]
    assert extra["scheduler"]["last_epoch"] == 1
    mixed = torch.optim.AdamW(other.parameters())
    with pytest.raises(shardkit.ConfigError, match="2 saved groups"):
        shardkit.load_checkpoint(tmp_path / "a", other, mixed)


@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.SGD(ps, lr=0.1),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.01), amsgrad=True),
    lambda ps: torch.optim.NAdam(ps, lr=0.01),  # 0-dim tensors: step and mu_product
    lambda ps: torch.optim.ASGD(ps, lr=0.01),
    lambda ps: torch.optim.Rprop(ps, lr=0.01),
    lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    lambda ps: torch.optim.Adam([p for p in ps if p.dim() == 1], lr=0.01),  # a subset
], ids=["sgd", "momentum", "amsgrad", "nadam", "asgd", "rprop", "adagrad", "subset"])  # fmt: skip
def test_an_optimizer_round_trips_through_another_number_of_ranks(make, tmp_path, request):
    name = request.node.callspec.id
    first = run_ranks(_optimizer_saved, 4, tmp_path, name)[0]
    second = run_ranks(_optimizer_loaded, 2, tmp_path, name)[0]
    assert_same(second, first)


def _make(name, params):
    marks = test_an_optimizer_round_trips_through_another_number_of_ranks.pytestmark
    mark = next(m for m in marks if m.name == "parametrize")
    return mark.args[1][mark.kwargs["ids"].index(name)](list(params))


def _optimizer_saved(rank, world, folder, name):
    model = wrap(0)
    optim = _make(name, model.parameters())
    for seed in (1, 2):
        step(model, optim, seed)
    shardkit.save_checkpoint(folder / "a", model, optim)
    return whole(model, optim)


def _optimizer_loaded(rank, world, folder, name):
    model = wrap(1, units=(nn.Linear,))
    optim = _make(name, model.parameters())
    shardkit.load_checkpoint(folder / "a", model, optim)
    out = whole(model, optim)
    step(model, optim, 3)  # what was loaded can be stepped with
    return out


class Factored(torch.optim.Optimizer):
    """Keeps something that is neither of the parameter's shape nor a scalar."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("rows", torch.full((3,), float(dist.get_rank())))


def _odd_state(rank, world, folder, save):
    model = wrap(0)
    optim = Factored(model.parameters())
    if save:
        optim.step()
        shardkit.save_checkpoint(folder / "a", model, optim)
    elif world == 2:
        shardkit.load_checkpoint(folder / "a", model, optim)
        p = max(model.parameters(), key=lambda p: p.numel())
        assert optim.state[p]["rows"].tolist() == [rank] * 3
    else:
        with pytest.raises(shardkit.ConfigError, match="saved on 2 ranks"):
            shardkit.load_checkpoint(folder / "a", model, optim)


def test_state_that_belongs_to_one_piece_returns_to_it_and_is_refused_elsewhere(tmp_path):
    run_ranks(_odd_state, 2, tmp_path, True)
    run_ranks(_odd_state, 2, tmp_path, False)
    run_ranks(_odd_state, 4, tmp_path, False)


# ---------------------------------------------------------------------------------------------------------- extras


def _extras_saved(rank, world, folder):
    model = wrap(0)
    average = {k: v.clone().mul_(2) for k, v in model.state_dict().items()}  # clones of LocalShards are LocalShards
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    extra = {"position": {"epoch": 2, "batch": 17}, "rng": torch.get_rng_state(), "mine": rank, "scaler": scaler}
    shardkit.save_checkpoint(folder / "a", model, step=31, ema={"decay": 0.9, "weights": average}, **extra)
    return {k: v * 2 for k, v in shardkit.full_state_dict(model).items()}


def _extras_loaded(rank, world, folder):
    model = wrap(1, units=(nn.Linear,))
    scaler = torch.amp.GradScaler("cpu")
    extra = shardkit.load_checkpoint(folder / "a", model, scaler=scaler)
    assert extra["position"] == {"epoch": 2, "batch": 17} and extra["step"] == 31 and extra["ema"]["decay"] == 0.9
    assert extra["mine"] == (rank if rank < 2 else 0)
    assert extra["rng"].dtype == torch.uint8
    assert scaler.get_scale() == 64.0
    with pytest.raises(shardkit.ConfigError, match="no 'sampler'"):
        shardkit.load_checkpoint(folder / "a", model, sampler=scaler)
    weights = extra["ema"]["weights"]
    return {k: v.full_tensor() if isinstance(v, shardkit.LocalShard) else v for k, v in weights.items()}


def test_extras_return_and_an_average_of_the_weights_is_resharded(tmp_path):
    want = run_ranks(_extras_saved, 2, tmp_path)[0]
    assert_same(run_ranks(_extras_loaded, 3, tmp_path)[2], want)


def _random_saved(rank, world, folder):
    model = wrap(0)
    torch.manual_seed(rank)
    shardkit.save_checkpoint(folder / "a", model, rng=shardkit.RandomState())
    return torch.rand(3).tolist()


def _random_loaded(rank, world, folder):
    model = wrap(1)
    torch.manual_seed(99)
    shardkit.load_checkpoint(folder / "a", model, rng=shardkit.RandomState())
    return torch.rand(3).tolist()


def test_random_numbers_go_on_where_they_were_and_new_ranks_draw_others(tmp_path):
    want = run_ranks(_random_saved, 2, tmp_path)
    got = run_ranks(_random_loaded, 4, tmp_path)
    assert got[:2] == want
    assert len({tuple(numbers) for numbers in got}) == 4


@ranks(2)
def test_an_extra_that_one_rank_forgot_is_an_error_on_all(rank, world, tmp_path):
    model = wrap(0)
    with pytest.raises(shardkit.ConfigError, match="scheduler"):
        shardkit.save_checkpoint(tmp_path / "a", model, **({"scheduler": 1} if rank == 0 else {}))
    assert not (tmp_path / "a").exists()


@ranks(2)
def test_another_model_is_refused_with_the_names(rank, world, tmp_path):
    shardkit.save_checkpoint(tmp_path / "a", wrap(0))
    other = build(0)
    other.more = nn.Linear(2, 2)
    del other.cube
    other = shardkit.auto_wrap(other, policy={Block})
    with pytest.raises(shardkit.ConfigError, match=r"(?s)more.bias, more.weight.*model.cube"):
        shardkit.load_checkpoint(tmp_path / "a", other)
    shardkit.load_checkpoint(tmp_path / "a", other, strict=False)


@ranks(2)
def test_a_save_between_forward_and_backward_disturbs_nothing(rank, world, tmp_path):
    model, other = wrap(0), wrap(0)
    loss = loss_of(model, 1)
    shardkit.save_checkpoint(tmp_path / "a", model)
    loss.backward()
    loss_of(other, 1).backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(p.grad, q.grad), name


@ranks(4)
def test_each_rank_reads_its_share_of_the_bytes(rank, world, tmp_path):
    from shardkit.checkpoint import load, metadata

    torch.manual_seed(0)
    model = shardkit.auto_wrap(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24))), policy={nn.Linear})
    shardkit.save_checkpoint(tmp_path / "a", model)
    total = sum(p.stat().st_size for p in (tmp_path / "a").glob("*.distcp"))
    with metadata.Checkpoint(tmp_path / "a") as checkpoint:
        before = checkpoint.reader.bytes_read
        load.load_model(checkpoint, model, True)
        read = checkpoint.reader.bytes_read - before
    assert read < 1.02 * total / world, (read, total)
