"""fairscale's OSS and ShardedDataParallel: as a single process, and as fairscale itself where that is right."""

import copy
import io

import pytest
import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shardkit
from shardkit.integrations.fairscale import OSS, ShardedDataParallel, ShardedGradScaler, checkpoint_wrapper
from tests.harness import ranks, run_ranks
from tests.oracle import LM, Block, Net, Twins, compare, data, full_grads, grads, params, raises, seeded, square_loss

ADAM = {"optim": torch.optim.Adam, "lr": 0.01}


class Sharded(Twins):
    """`Twins` with an OSS, over a ShardedDataParallel or (`ddp`) a DDP."""

    def __init__(self, rank, world, build, *, ddp=False, wrap_first=False, oss=None, **options):
        self.rank, self.world, self.steps = rank, world, 0
        self.ref, model = seeded(build), seeded(build)
        arguments = oss or ADAM
        if wrap_first:  # the optimizer is built last; it is told of the model by its parameters
            self.model = ShardedDataParallel(model, [], **options)
            self.optim = OSS(self.model.parameters(), **arguments)
        else:
            self.optim = OSS(model.parameters(), **arguments)
            self.model = DDP(model) if ddp else ShardedDataParallel(model, self.optim, **options)
        rest = {k: v for k, v in arguments.items() if k != "optim"}
        self.ref_optim = arguments.get("optim", torch.optim.SGD)(self.ref.parameters(), **rest)

    def zero(self, set_to_none=True):
        self.optim.zero_grad(set_to_none=set_to_none)
        self.ref_optim.zero_grad(set_to_none=set_to_none)

    def check_grads(self, rtol=1e-6):
        if not isinstance(self.model, DDP):
            super().check_grads(rtol)

    def check_weights(self, rtol=5e-6):
        model = self.model.module
        compare(f"weight after {self.steps} steps:", dict(model.state_dict()), dict(self.ref.state_dict()), rtol)


@ranks(2)
@pytest.mark.parametrize("ddp", [False, True], ids=["sharded", "ddp"])
@pytest.mark.parametrize("optim", [
    {"lr": 0.1, "momentum": 0.9}, {"optim": torch.optim.AdamW, "lr": 0.01},
    {"optim": torch.optim.Adam, "lr": 0.01, "fused": True}, {"optim": torch.optim.Adam, "lr": 0.01, "foreach": True},
], ids=["sgd", "adamw", "fused", "foreach"])  # fmt: skip
def test_training_equals_a_single_process(rank, world, ddp, optim):
    Sharded(rank, world, Net, ddp=ddp, oss=optim).train(square_loss, 3)


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_either_kind_is_right(rank, world, set_to_none):
    """With its default buckets, fairscale drifts from DDP once zero_grad() sets gradients to None."""
    twins = Sharded(rank, world, Net, wrap_first=set_to_none)
    for _ in range(4):
        twins.zero(set_to_none)
        twins.backward(square_loss)
        twins.check_grads()
        twins.update()
        twins.check_weights()


@ranks(2)
def test_batches_are_accumulated_with_and_without_no_sync(rank, world):
    """Accumulating without no_sync is silently wrong in fairscale. `reduce()` reduces what no_sync held back."""
    twins = Sharded(rank, world, Net)
    for hold in (True, False):
        twins.zero()
        if hold:
            with twins.model.no_sync():
                twins.backward(square_loss)
        else:
            twins.backward(square_loss)
        twins.backward(square_loss)
        twins.check_grads()
        twins.update()
    twins.zero()
    with twins.model.no_sync():
        twins.backward(square_loss)
    twins.model.reduce()
    twins.check_grads(5e-6)
    raises(shardkit.StateError, twins.model.reduce)
    twins.update()
    twins.check_weights()


@ranks(2)
def test_one_rank_may_save_the_weights_alone(rank, world):
    """Parameters are whole between steps, so state_dict() needs no other rank; keys with fairscale's prefix load."""
    twins = Sharded(rank, world, LM)
    if rank == 0:
        compare("at the start", dict(twins.model.state_dict()), dict(twins.ref.state_dict()), rtol=0)
    for _ in range(2):
        twins.zero()
        twins.model(torch.arange(8).view(2, 4)).square().mean().backward()
        twins.optim.step()
        if rank == 0:
            saved = {k: v.clone() for k, v in twins.model.module.state_dict().items()}
    everyone = [None] * world
    torch.distributed.all_gather_object(everyone, saved if rank == 0 else None)
    compare("collective", dict(shardkit.full_state_dict(twins.model)), everyone[0], rtol=0)
    fresh = ShardedDataParallel(seeded(LM, 3), OSS(seeded(LM).parameters(), lr=0.1))
    fresh.load_state_dict({f"module.{k}": v for k, v in everyone[0].items()})
    if rank == 1:
        compare("loaded", dict(fresh.state_dict()), everyone[0], rtol=0)


@ranks(2)
def test_an_eager_refresh_costs_no_second_gather(rank, world):
    twins = Sharded(rank, world, Net).train(square_loss, 2)
    twins.zero()
    before = [flat.buffer.clone() for flat in twins.model._shardkit_step.flats]
    gathers = []
    for flat in twins.model._shardkit_step.flats:
        flat.gather = lambda gather=flat.gather: (gathers.append(1), gather())
    square_loss(twins.model, rank, 0)
    assert not gathers
    assert all(torch.equal(a, f.buffer) for a, f in zip(before, twins.model._shardkit_step.flats))


@ranks(2)
def test_models_are_synchronised_or_compared_at_startup(rank, world):
    torch.manual_seed(rank)
    model = Net()
    optim = OSS(model.parameters(), lr=0.1)
    compare("weights", dict(ShardedDataParallel(model, optim).state_dict()), params(seeded(Net)), rtol=0)
    torch.manual_seed(rank)
    model = Net()
    raises(shardkit.PlanMismatchError, lambda: ShardedDataParallel(model, optim, sync_models_at_startup=False))


@ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_come_from_the_first_rank_if_asked(rank, world, broadcast):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    sharded = ShardedDataParallel(seeded(lambda: model), OSS(model.parameters(), lr=0.1), broadcast_buffers=broadcast)
    for step in range(3):
        sharded(data(10 * step + rank, 6, 5)).sum().backward()
    sharded.eval()
    if broadcast:
        sharded(data(0, 6, 5))
    means = [None] * world
    torch.distributed.all_gather_object(means, model[1].running_mean)
    assert torch.equal(*means) == broadcast


@ranks(2)
def test_gradients_travel_in_float16_if_asked(rank, world):
    """In fairscale reduce_fp16 is ignored with its default buckets."""
    twins = Sharded(rank, world, Net, reduce_fp16=True)
    assert {flat.reduce_dtype for flat in twins.model._shardkit_step.flats} == {torch.float16}
    twins.backward(square_loss)
    compare("gradient", full_grads(twins.model), grads(twins.ref), 5e-3)


@ranks(2)
@pytest.mark.parametrize("ddp", [False, True], ids=["sharded", "ddp"])
def test_parameters_freeze_and_thaw_and_join_later(rank, world, ddp):
    """34: refresh_trainable, add_param_group."""

    class Late(Net):
        def __init__(self):
            super().__init__()
            self.late = nn.Linear(3, 3)

        def forward(self, x):
            return self.late(super().forward(x))

    if ddp:
        twins = Sharded(rank, world, Late, ddp=True)
        twins.model.module.head.weight.requires_grad_(True)
    else:
        twins = Sharded(rank, world, Late)
    for frozen in (False, True, False):
        if not ddp:
            for model in (twins.model, twins.ref):
                model.inp.requires_grad_(not frozen)
            twins.model.refresh_trainable()
        twins.optim.refresh_trainable()
        twins.train(square_loss, 1)
    ref, model = seeded(Late), seeded(Late)
    optim = OSS([p for n, p in model.named_parameters() if "late" not in n], **ADAM)
    model = DDP(model) if ddp else ShardedDataParallel(model, optim)
    twins.model, twins.ref, twins.optim = model, ref, optim
    twins.ref_optim = torch.optim.Adam([p for n, p in ref.named_parameters() if "late" not in n], lr=0.01)
    twins.steps = 0
    for m, o in ((model.module, optim), (ref, twins.ref_optim)):
        o.add_param_group({"params": list(m.late.parameters()), "lr": 0.05})
    twins.train(square_loss, 2)
    for o in (optim, twins.ref_optim):
        o.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.05})  # after the first step
        assert [g["lr"] for g in o.param_groups] == [0.01, 0.05, 0.05]
    twins.train(square_loss, 1)


@ranks(2, 4)
def test_the_partition_is_balanced(rank, world):
    model = nn.Sequential(*(nn.Linear(n, 8, bias=False) for n in (9, 5, 8, 1, 7, 3, 2, 6)))
    parts = OSS(model.parameters(), lr=0.1).partition_parameters()
    sizes = [sum(p.numel() for g in part for p in g["params"]) for part in parts]
    assert len(parts) == world and sum(sizes) == 41 * 8 and max(sizes) - min(sizes) <= 9 * 8


@ranks(2)
@pytest.mark.parametrize("ddp", [False, True], ids=["sharded", "ddp"])
def test_schedulers_closures_and_clipping(rank, world, ddp):
    """34. fairscale's clip_grad_norm caches which parameters had gradients (12.0 for 14.56), and ignores its group."""
    twins = Sharded(rank, world, Net, ddp=ddp)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (twins.optim, twins.ref_optim)]
    for step in range(3):
        twins.zero()
        twins.backward(square_loss)
        if step == 0:
            for model in (twins.model.module, twins.ref):
                model.inp.weight.grad = None  # a first call with fewer gradients
        norm = [0.05, float("inf"), 1.0][step]
        got = twins.optim.clip_grad_norm(0.05, norm if step else 2.0)
        want = nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.05, norm if step else 2.0)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        twins.update()
        for schedule in schedules:
            schedule.step()
        assert twins.optim.param_groups[0]["lr"] == twins.ref_optim.param_groups[0]["lr"]
    twins.check_weights()
    first = []
    twins.optim.clip_grad_norm(1.0, filter_params_fn=lambda p: first.append(len(p)) or p[:1])
    assert first == [len(list(twins.ref.parameters()))]

    def closure(model, optim, r):
        def run():
            optim.zero_grad()
            loss = sum(square_loss(model, i, 9) for i in r) / len(r)
            loss.backward()
            return loss

        return run

    loss = twins.optim.step(closure(twins.model, twins.optim, [rank]))
    twins.ref_optim.step(closure(twins.ref, twins.ref_optim, range(world)))
    assert loss.dim() == 0
    twins.check_weights(2e-5)


@ranks(2)
@pytest.mark.parametrize("ddp", [False, True], ids=["sharded", "ddp"])
def test_consolidated_states_are_plain_and_resume(rank, world, ddp):
    twins = Sharded(rank, world, Net, ddp=ddp).train(square_loss, 2)
    raises(RuntimeError, twins.optim.state_dict)
    want = twins.ref_optim.state_dict()
    for recipient in (0, 1, -1):
        twins.optim.consolidate_state_dict(recipient)
        if recipient in (rank, -1):
            state = twins.optim.state_dict()
            assert state["param_groups"] == want["param_groups"]
            for i, values in want["state"].items():
                compare(f"state {i}", state["state"][i], values, 1e-5)
        else:
            raises(RuntimeError, twins.optim.state_dict)
    state = twins.optim.state_dict(all_ranks=True)
    kept = copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    twins.train(square_loss, 1)  # does not change what was collected; it is let go of
    compare("collected", state["state"][0], kept["state"][0], rtol=0)
    raises(RuntimeError, twins.optim.state_dict)
    loaded = torch.load(file)

    # A fresh model and optimizer go on as the old ones did; the state is loaded before or after wrapping.
    for after in (True, False):
        again = Sharded(rank, world, Net, ddp=ddp)
        if not after:
            model = seeded(Net)
            again.optim = OSS(model.parameters(), **ADAM)
            again.optim.load_state_dict(loaded)
            again.model = DDP(model) if ddp else ShardedDataParallel(model, again.optim)
        again.ref_optim.load_state_dict(copy.deepcopy(kept))  # torch steps the tensors it was given
        if after:
            again.optim.load_state_dict(loaded)
        again.train(square_loss, 2)


@ranks(2)
def test_an_optimizer_that_has_stepped_moves_its_state_into_the_shards(rank, world):
    twins = Sharded(rank, world, Net, ddp=True).train(square_loss, 2)
    twins.model = ShardedDataParallel(twins.model.module, twins.optim)
    twins.train(square_loss, 2, rtol=1e-5)


def save_oss(rank, world, folder, ddp):
    twins = Sharded(rank, world, Net, ddp=ddp).train(square_loss, 2)
    twins.optim.consolidate_state_dict()
    weights = twins.model.module.state_dict()
    if rank == 0:
        torch.save((weights, twins.optim.state_dict()), f"{folder}/c.pt")


def load_oss(rank, world, folder, ddp):
    weights, state = torch.load(f"{folder}/c.pt")
    model = seeded(Net, 2)
    model.load_state_dict(weights)
    optim = OSS(model.parameters(), **ADAM)
    model = DDP(model) if ddp else ShardedDataParallel(model, optim)
    optim.load_state_dict(state)
    optim.optim  # noqa: B018  (the inner optimizer is made at the first step)
    again = optim.state_dict(all_ranks=True)
    for i, values in state["state"].items():
        compare(f"state {i}", again["state"][i], values, rtol=0)


@pytest.mark.parametrize("ddp", [False, True], ids=["sharded", "ddp"])
def test_consolidated_states_load_on_another_number_of_ranks(tmp_path, ddp):
    run_ranks(save_oss, 2, str(tmp_path), ddp)
    run_ranks(load_oss, 4, str(tmp_path), not ddp)


@ranks(2)
def test_the_gradient_scaler_and_checkpointing_go_along(rank, world):
    def build():
        model = Net()
        for block in model.blocks:
            checkpoint_wrapper(block)
        return model

    twins = Sharded(rank, world, build)
    scaler = ShardedGradScaler(init_scale=8.0)
    for step in range(3):
        twins.zero()
        bad = step == 1 and rank == 0
        scaler.scale(square_loss(twins.model, rank, twins.steps) * (float("inf") if bad else 1.0)).backward()
        scaler.step(twins.optim)
        scaler.update()
        if step != 1:
            twins.ref_backward(square_loss)
            twins.ref_optim.step()
            twins.ref_optim.zero_grad()
            twins.steps += 1
    assert scaler.get_scale() == 4.0
    twins.check_weights()


# ----------------------------------------------------------------------------------------------- fairscale itself


def losses_of(rank, oss, sharded, checkpoint, zero2):
    """Losses of five steps, final weights and the consolidated state, with one library's classes."""
    model = seeded(Net)
    if checkpoint is not None:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint(block)
    optim = oss(model.parameters(), optim=torch.optim.Adam, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    model = sharded(model, optim, reduce_buffer_size=0) if zero2 else sharded(model)
    losses = []
    for step in range(5):
        optim.zero_grad()
        loss = square_loss(model, rank, step)
        loss.backward()
        optim.step()
        schedule.step()
        losses.append(loss.detach())
    optim.consolidate_state_dict(0)
    state = optim.state_dict() if rank == 0 else None
    return torch.stack(losses), {k: v.clone() for k, v in model.module.state_dict().items()}, state


@ranks(2)
@pytest.mark.parametrize("zero2", [True, False], ids=["sharded", "ddp"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_equal_fairscales_own(rank, world, zero2, checkpointing):
    """OSS over DDP, and ShardedDataParallel with buckets off, are right in fairscale."""
    pytest.importorskip("fairscale")
    from fairscale.nn.checkpoint import checkpoint_wrapper as their_checkpoint
    from fairscale.nn.data_parallel import ShardedDataParallel as TheirSharded
    from fairscale.optim import OSS as TheirOSS

    theirs = (TheirOSS, TheirSharded if zero2 else DDP, their_checkpoint if checkpointing else None)
    ours = (OSS, ShardedDataParallel if zero2 else DDP, checkpoint_wrapper if checkpointing else None)
    want, got = losses_of(rank, *theirs, zero2), losses_of(rank, *ours, zero2)
    compare("losses", {"": got[0]}, {"": want[0]}, 1e-5)
    compare("weights", got[1], {k.removeprefix("module."): v for k, v in want[1].items()}, 1e-5)
    if rank == 0:
        assert set(got[2]["state"]) == set(want[2]["state"])
        for i, values in want[2]["state"].items():
            compare(f"state {i}", got[2]["state"][i], values, 1e-5)
    assert isinstance(seeded(Net).blocks[0], Block)
