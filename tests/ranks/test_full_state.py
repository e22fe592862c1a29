"""Whole weights and whole optimizer states go out and come in, under the bare model's names, for any wrapping and
world.

The oracle: the bare model's own state dict and its optimizer's state; and uninterrupted training.
"""

import copy

import pytest
import torch
import torch.nn as nn

import shardkit
from shardkit import LocalShard
from tests.harness import ranks, run_ranks
from tests.oracle import (
    HYBRIDS,
    LM,
    RTOL,
    STRATEGIES,
    Block,
    Net,
    Twins,
    compare,
    data,
    full_params,
    lm_loss,
    mesh,
    params,
    seeded,
    sgd,
    square_loss,
)  # fmt: skip

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.01),
}
ADAPTIVE = 2e-3  # adaptive steps divide noise by noise where a gradient is near zero: a share of one step


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.scalar, self.empty = (
            nn.Linear(5, 5),
            nn.Parameter(torch.tensor(0.5)),
            nn.Parameter(torch.zeros(0, 3)),
        )
        self.tied = self.lin.bias
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("gone", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.lin(x) * self.scalar + self.kept.sum() + self.empty.sum() + self.tied

    def get_extra_state(self):
        return {"note": 7}

    def set_extra_state(self, state):
        self.note = state


def _odd():
    return nn.Sequential(Odd(), Odd(), nn.BatchNorm1d(5), nn.Linear(5, 2))


@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_full_state_is_the_state_of_the_bare_model(rank, world, strategy):
    model, want = seeded(_odd), seeded(_odd).state_dict()
    shardkit.auto_wrap(model, policy={Odd}, sharding_strategy=strategy)
    state = shardkit.full_state_dict(model)
    assert list(state) == list(want)
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert type(state[name]) is torch.Tensor and torch.equal(state[name], value)
            assert state[name].dtype == value.dtype
        else:
            assert state[name] == value
    first = shardkit.full_state_dict(model, rank0_only=True)
    assert (list(first) == list(want)) if rank == 0 else first == {}
    seeded(_odd).load_state_dict(state)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_state_loads_back_and_into_another_wrapping(rank, world, strategy):
    twins = Twins(rank, world, lambda: LM(tied=True), policy={Block}, sharding_strategy=strategy).train(lm_loss, 2)
    state = shardkit.full_state_dict(twins.model)
    keep = {k: v.clone() for k, v in state.items()}
    for policy in ({Block}, {nn.Linear}, None, "auto"):
        other = shardkit.auto_wrap(seeded(lambda: LM(tied=True), seed=5), policy=policy, sharding_strategy=strategy)
        keys = shardkit.load_full_state_dict(other, state)
        assert not keys.missing_keys and not keys.unexpected_keys
        compare("loaded", full_params(other), params(twins.ref), 5 * RTOL)
        with torch.no_grad():
            x = torch.tensor([[1, 2, 3]])
            compare("output", {"y": other(x)}, {"y": twins.ref(x)}, 1e-5)
    twins.train(lm_loss, 1)
    assert all(torch.equal(state[k], keep[k]) for k in keep)  # a snapshot
    shardkit.load_full_state_dict(twins.model, keep), twins.ref.load_state_dict(keep)
    twins.train(lm_loss, 2)


@ranks(2)
def test_loading_in_part(rank, world):
    model = shardkit.auto_wrap(seeded(Net), policy={Block})
    state = shardkit.full_state_dict(model)
    part = {k: v + 1 for k, v in state.items() if k.startswith("blocks.1")}
    keys = shardkit.load_full_state_dict(model, part, strict=False)
    assert set(keys.missing_keys) == set(state) - set(part) and not keys.unexpected_keys
    after = shardkit.full_state_dict(model)
    assert all(torch.equal(after[k], part.get(k, state[k])) for k in state)


@ranks(2)
def test_the_state_of_a_submodule(rank, world):
    twins = Twins(rank, world, Net, policy={Block}).train(square_loss, 1)
    compare("block", shardkit.full_state_dict(twins.model.blocks[1]), dict(twins.ref.blocks[1].state_dict()), 5 * RTOL)
    state = {k: torch.zeros_like(v) for k, v in twins.ref.blocks[1].state_dict().items()}
    twins.model.blocks[1].load_state_dict(state), twins.ref.blocks[1].load_state_dict(state)
    twins.model.head.load_state_dict({"weight": torch.ones(3, 5), "bias": torch.ones(3)})
    twins.ref.head.load_state_dict({"weight": torch.ones(3, 5), "bias": torch.ones(3)})
    twins.train(square_loss, 2)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_dict_holds_local_shards_and_loads_back(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy).train(square_loss, 1)
    state = twins.model.state_dict()
    assert list(state) == list(twins.ref.state_dict())
    assert all(isinstance(v, LocalShard) and v.shard_info.name == k for k, v in state.items())
    keep = copy.deepcopy(state)
    before = full_params(twins.model)
    twins.train(square_loss, 1)
    twins.model.load_state_dict(keep)
    compare("rewound", full_params(twins.model), before, 0)
    fresh = shardkit.auto_wrap(seeded(Net, seed=9), policy={Block}, sharding_strategy=strategy)
    fresh.load_state_dict(keep)
    compare("fresh", full_params(fresh), before, 0)


@ranks(2)
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("strategy", ["full", "zero2", "none"])
def test_load_state_dict_with_assign_trains_on(rank, world, assign, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy).train(square_loss, 1)
    # a state dict each: torch notes `assign` in the metadata of the one it was given
    twins.model.load_state_dict(seeded(Net, seed=3).state_dict(), assign=assign)
    twins.ref.load_state_dict(seeded(Net, seed=3).state_dict())
    twins.check_weights()
    twins.train(square_loss, 2)


# ------------------------------------------------------------------------------------------------------------- summon


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("writeback", [True, False])
def test_summoned_parameters_are_whole_and_changes_are_kept_if_asked(rank, world, strategy, writeback):
    twins = Twins(rank, world, lambda: LM(tied=True), policy={Block}, sharding_strategy=strategy).train(lm_loss, 2)
    objects = list(twins.model.parameters())
    with twins.model.summon_full_params(writeback=writeback):
        assert all(a is b for a, b in zip(twins.model.parameters(), objects, strict=True))
        compare(
            "summoned", {n: p.detach().clone() for n, p in twins.model.named_parameters()}, params(twins.ref), 5 * RTOL
        )
        with torch.no_grad():
            twins.model.emb.weight.mul_(2)
            twins.model.blocks[0].up.weight.data.add_(1)
            twins.model.blocks[1].up.bias.data = torch.ones(11)
            twins.model.blocks[1].down.weight[0].zero_()
    if writeback:
        with torch.no_grad():
            twins.ref.emb.weight.mul_(2), twins.ref.blocks[0].up.weight.add_(1)
            twins.ref.blocks[1].up.bias.fill_(1), twins.ref.blocks[1].down.weight[0].zero_()
    twins.check_weights()
    assert all(p.grad is None or p.grad.shape == p.shape for p in twins.model.parameters())
    twins.train(lm_loss, 2)


@ranks(2)
def test_forward_and_reinitialisation_inside_summon(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    with twins.model.summon_full_params(), torch.no_grad():
        twins.check_output(data(rank, 2, 5))
        for model in (twins.model, twins.ref):
            torch.manual_seed(4)
            for m in model.modules():
                if isinstance(m, nn.Linear):
                    m.reset_parameters()
        twins.check_output(data(rank, 2, 5))
    twins.check_weights()
    twins.train(square_loss, 2)


@ranks(2)
def test_an_exception_inside_summon_leaves_local_parameters(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    try:
        with twins.model.summon_full_params():
            raise KeyError
    except KeyError:
        pass
    twins.train(square_loss, 2)


@ranks(2)
def test_summon_of_one_unit_or_without_recursion(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    with twins.model.blocks[1].summon_full_params():
        assert tuple(twins.model.blocks[1].up.weight.shape) == (11, 5)
    with twins.model.summon_full_params(recurse=False):
        assert tuple(twins.model.head.weight.shape) == (3, 5)
    twins.train(square_loss, 2)


# --------------------------------------------------------------------------------------------------- optimizer state


def _named_state(model, optim):
    return {n: optim.state[p] for n, p in model.named_parameters() if p in optim.state}


@ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_full_state_of_an_optimizer_is_that_of_one_process(rank, world, name):
    twins = Twins(rank, world, Net, policy={Block}, optim=OPTIMIZERS[name])
    twins.zero(), twins.backward(square_loss), twins.update()
    state = shardkit.full_optim_state_dict(twins.model, twins.optim)
    want = _named_state(twins.ref, twins.ref_optim)
    assert set(state["state"]) == {n for n, s in want.items() if s} or set(state["state"]) == set(want)
    for n in state["state"]:
        assert list(state["state"][n]) == list(want[n])
        for key, value in want[n].items():
            got = state["state"][n][key]
            if isinstance(value, torch.Tensor):
                assert got.shape == value.shape and got.dtype == value.dtype
                assert torch.allclose(got, value, rtol=1e-4, atol=1e-6), (n, key)
            else:
                assert got == value
    (group,) = state["param_groups"]
    assert group["params"] == [n for n, _ in twins.ref.named_parameters()]
    assert set(group) == set(twins.ref_optim.state_dict()["param_groups"][0])


@ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", [{nn.Linear}, None])
def test_training_resumes_under_another_wrapping(rank, world, name, policy):
    twins = Twins(rank, world, lambda: LM(tied=True), policy={Block}, optim=OPTIMIZERS[name])
    for _ in range(2):
        twins.zero(), twins.backward(lm_loss), twins.update()
    state, optim = shardkit.full_state_dict(twins.model), shardkit.full_optim_state_dict(twins.model, twins.optim)
    twins.model = shardkit.auto_wrap(seeded(lambda: LM(tied=True), seed=7), policy=policy, sharding_strategy="grad_op")
    twins.optim = OPTIMIZERS[name](twins.model.parameters())
    shardkit.load_full_state_dict(twins.model, state)
    shardkit.load_full_optim_state_dict(twins.model, twins.optim, optim)
    for _ in range(2):
        twins.zero(), twins.backward(lm_loss), twins.update()
    twins.check_weights(rtol=ADAPTIVE)


def _save(rank, world, name):
    twins = Twins(rank, world, Net, policy={Block}, optim=OPTIMIZERS[name])
    for _ in range(2):
        twins.zero()
        for part in range(4 // world):  # four batches in all, whatever the world
            loss = _quarter(rank * (4 // world) + part, world)
            loss(twins.model, twins.steps).backward()
        twins.update()
    return (
        shardkit.full_state_dict(twins.model, rank0_only=True),
        shardkit.full_optim_state_dict(twins.model, twins.optim, rank0_only=True),
    )


def _quarter(which, world):
    return lambda model, step: square_loss(model, which, step) * world / 4


def _resume(rank, world, name, state, optim):
    model = shardkit.auto_wrap(seeded(Net, seed=3), policy={nn.Linear})
    optimizer = OPTIMIZERS[name](model.parameters())
    shardkit.load_full_state_dict(model, state)
    shardkit.load_full_optim_state_dict(model, optimizer, optim)
    for step in (2, 3):
        model.zero_grad()
        for part in range(4 // world):
            _quarter(rank * (4 // world) + part, world)(model, step).backward()
        optimizer.step()
    return shardkit.full_state_dict(model)


@pytest.mark.parametrize("name", ["momentum", "adamw fused"])
@pytest.mark.parametrize("worlds", [(2, 4), (4, 2)], ids=str)
def test_training_resumes_on_another_number_of_ranks(name, worlds):
    saved = run_ranks(_save, worlds[0], name)
    assert saved[1] == ({}, {})
    got = run_ranks(_resume, worlds[1], name, *saved[0])[0]
    model = seeded(Net)
    optim = OPTIMIZERS[name](model.parameters())
    for step in range(4):
        model.zero_grad()
        for which in range(4):
            (square_loss(model, which, step) / 4).backward()
        optim.step()
    compare("resumed", dict(got), dict(model.state_dict()), ADAPTIVE)


@ranks(2)
def test_groups_are_found_by_their_parameters_in_any_order(rank, world):
    def groups(model, swap=False, lrs=(0.05, 0.01)):
        named = list(model.named_parameters())
        decay = {"params": [p for n, p in named if p.dim() > 1], "lr": lrs[0], "weight_decay": 0.3, "name": "decay"}
        rest = {"params": [p for n, p in named if p.dim() <= 1], "lr": lrs[1], "weight_decay": 0.0, "name": "rest"}
        return [rest, decay] if swap else [decay, rest]

    # a local parameter keeps ndim, so that code which asks for it after wrapping decides as before
    twins = Twins(rank, world, Net, policy={Block})
    twins.optim, twins.ref_optim = torch.optim.AdamW(groups(twins.model)), torch.optim.AdamW(groups(twins.ref))
    for _ in range(2):
        twins.zero(), twins.backward(square_loss), twins.update()
    state, optim = shardkit.full_state_dict(twins.model), shardkit.full_optim_state_dict(twins.model, twins.optim)
    assert [g["name"] for g in optim["param_groups"]] == ["decay", "rest"]
    twins.model = shardkit.auto_wrap(seeded(Net, seed=2), policy={nn.Linear})
    twins.optim = torch.optim.AdamW(groups(twins.model, swap=True, lrs=(9.0, 9.0)))
    shardkit.load_full_state_dict(twins.model, state)
    shardkit.load_full_optim_state_dict(twins.model, twins.optim, optim)
    assert [(g["lr"], g["name"]) for g in twins.optim.param_groups] == [(0.01, "rest"), (0.05, "decay")]
    for _ in range(2):
        twins.zero(), twins.backward(square_loss), twins.update()
    twins.check_weights(rtol=ADAPTIVE)


@ranks(4)
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_states_on_a_hybrid_mesh(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy, device_mesh=mesh(2, 2)).train(
        square_loss, 2
    )
    compare("state", dict(shardkit.full_state_dict(twins.model)), dict(twins.ref.state_dict()), 5 * RTOL)
    optim = shardkit.full_optim_state_dict(twins.model, twins.optim)
    for n, s in _named_state(twins.ref, twins.ref_optim).items():
        compare(n, {"m": optim["state"][n]["momentum_buffer"]}, {"m": s["momentum_buffer"]}, 1e-5)


@ranks(2)
def test_the_state_of_a_model_with_unused_and_frozen_parameters(rank, world):
    def build():
        model = Net()
        model.unused = nn.Parameter(torch.ones(3))
        model.blocks[0].requires_grad_(False)
        return model

    twins = Twins(
        rank, world, build, policy={Block}, optim=lambda ps: torch.optim.Adam([p for p in ps if p.requires_grad])
    )
    twins.zero(), twins.backward(square_loss), twins.update()
    state = shardkit.full_optim_state_dict(twins.model, twins.optim)
    assert set(state["state"]) == {n for n, s in _named_state(twins.ref, twins.ref_optim).items() if s}
    assert "unused" in state["param_groups"][0]["params"]


# ---------------------------------------------------------------------------------------- memory replaced by the user


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_converting_to_float64_after_wrapping(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    twins.train(square_loss, 1)
    twins.model.to(torch.float64), twins.ref.to(torch.float64)
    twins.optim, twins.ref_optim = sgd(twins.model.parameters()), sgd(twins.ref.parameters())
    assert all(p.dtype == torch.float64 for p in twins.model.parameters())
    twins.train(lambda m, r, s: (m(data(100 * s + r, 4, 5).double()) ** 2).mean(), 2)
    assert shardkit.full_state_dict(twins.model)["head.weight"].dtype == torch.float64


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_converting_to_16_bits_after_wrapping(rank, world, strategy, dtype):
    """One step: 16-bit gradients are rounded before the mean or after it."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    convert = {torch.bfloat16: lambda m: m.bfloat16(), torch.float16: lambda m: m.half()}[dtype]
    convert(twins.model), convert(twins.ref)
    loss = lambda m, r, s: (m(data(100 * s + r, 4, 5).to(dtype)).float() ** 2).mean()  # noqa: E731
    loss(twins.model, rank, 0).backward(), twins.ref_backward(loss)
    twins.check_grads(rtol=3e-2)
    twins.update()
    twins.check_weights(rtol=2e-2)
    state = shardkit.full_state_dict(twins.model)
    assert all(v.dtype == dtype for v in state.values())


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_swapped_by_data_for_an_evaluation(rank, world, strategy):
    """An EMA: `p.data` is exchanged for an average, and exchanged back."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    ema = {m: [p.detach().clone() for p in m.parameters()] for m in (twins.model, twins.ref)}
    for _ in range(3):
        twins.train(square_loss, 1)
        for m, shadow in ema.items():
            for e, p in zip(shadow, m.parameters()):
                e.lerp_(p.detach(), 0.5)
        kept = {m: [p.data for p in m.parameters()] for m in ema}
        for how in ("exchange", "copy"):
            for m in ema:
                for e, p, k in zip(ema[m], m.parameters(), kept[m]):
                    if how == "exchange":
                        p.data = e.clone()
                    else:
                        kept_copy = k.clone()
                        p.data.copy_(e)
                        p.backup = kept_copy
            twins.model.eval(), twins.ref.eval()
            twins.check_output(data(3, 2, 5))
            for m in ema:
                for p, k in zip(m.parameters(), kept[m]):
                    if how == "exchange":
                        p.data = k
                    else:
                        p.data.copy_(p.backup)
            twins.model.train(), twins.ref.train()
        twins.check_weights()


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_written_between_steps_are_used_in_the_next(rank, world, strategy):
    """Through the parameter, through `data`, by an initialiser, by an optimizer without version counters."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)

    def everywhere(change):
        for m in (twins.model, twins.ref):
            with torch.no_grad():
                for p in m.parameters():
                    change(p)

    for change in (
        lambda p: p.mul_(0.9),
        lambda p: p.data.mul_(0.8),
        lambda p: nn.init.constant_(p, 0.1),
        lambda p: p.data.add_(0.05),
        lambda p: p.detach().mul_(0.9),
        lambda p: setattr(p, "data", p.data * 0.7),
    ):
        twins.train(square_loss, 1)
        everywhere(change)
        twins.train(square_loss, 1)  # in training mode throughout
        everywhere(change)
        twins.check_output(data(3, 2, 5))


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tasks_of_an_ordinary_loop_around_parameters(rank, world, strategy):
    """parameters(), named_parameters(), requires_grad_, zero_grad, and lbfgs-like re-evaluation within a step."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    for m, o, which in ((twins.model, twins.optim, [rank]), (twins.ref, twins.ref_optim, range(world))):

        def closure(m=m, o=o, which=which):
            o.zero_grad()
            total = 0.0
            for r in which:
                loss = square_loss(m, r, 0) / len(which)
                loss.backward()
                total += loss.detach()
            return total

        for _ in range(3):
            o.step(closure)
    twins.steps = 3
    twins.check_weights()


@ranks(2)
def test_lbfgs_is_refused_or_right(rank, world):
    """LBFGS takes inner products over all parameters: on pieces they would be local, and ranks would go apart."""
    twins = Twins(
        rank, world, lambda: Net(blocks=1), policy={Block}, optim=lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3)
    )

    def closure(m, o, which):
        def run():
            o.zero_grad()
            total = 0.0
            for _ in which:
                loss = square_loss(m, 0, 0) / len(which)  # the same loss on all ranks, so that decisions on it agree
                loss.backward()
                total = total + loss.detach()
            return total

        return run

    try:
        for _ in range(2):
            twins.optim.step(closure(twins.model, twins.optim, [rank]))
    except shardkit.ShardkitError:
        return
    for _ in range(2):
        twins.ref_optim.step(closure(twins.ref, twins.ref_optim, range(world)))
    twins.check_weights(rtol=1e-4)
