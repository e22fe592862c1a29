"""Plain PyTorch code that asks about the whole gradient gets the whole answer: norms, clipping, scaling; and
LocalShard.

The expected norm is computed from the twin's gradients by torch, in one process.
"""

import copy
import io

import pytest
import torch
import torch.nn as nn

import shardkit
from shardkit import LocalShard
from tests.harness import ranks
from tests.oracle import (
    HYBRIDS,
    LM,
    STRATEGIES,
    Block,
    Net,
    Twins,
    compare,
    data,
    full,
    full_grads,
    grads,
    lm_loss,
    mesh,
    raises,
    same_on_all_ranks,
    sgd,
    square_loss,
)  # fmt: skip

INF = float("inf")


def _norm_of(model, p):
    parts = [g.flatten() for g in grads(model).values() if g is not None and g.numel()]
    return torch.linalg.vector_norm(torch.cat(parts).double(), p).item()


def _near(got, want, rtol=2e-5):
    """rtol: a float32 sum of a few hundred powers, taken to a root."""
    assert abs(float(got) - want) <= rtol * abs(want), f"{float(got)} != {want}"


@ranks(2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clip_grad_norm_of_torch_clips_the_whole_gradient(rank, world, strategy, foreach):
    for p in (2.0, 1.0, 3.0, INF, 0.5, 2, "inf") if strategy == "full" else (2.0, INF):
        twins = Twins(rank, world, lambda: LM(tied=True), policy={Block}, sharding_strategy=strategy)
        twins.backward(lm_loss)
        want = _norm_of(twins.ref, float(p))
        got = torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.3 * want, norm_type=p, foreach=foreach)
        _near(got, want)
        assert same_on_all_ranks(float(got)) and got.dim() == 0
        torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.3 * want, norm_type=p)
        twins.check_grads(rtol=1e-5)
        _near(
            torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1e9, norm_type=p, foreach=foreach),
            0.3 * want,
            1e-3,
        )
        twins.update()
        twins.check_weights(rtol=2e-5)


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_norms_on_a_hybrid_mesh_count_every_element_once(rank, world, strategy, shape):
    for p in (2.0, 1.0, INF):
        twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy, device_mesh=mesh(*shape))
        twins.backward(square_loss)
        want = _norm_of(twins.ref, p)
        _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.5 * want, p), want)
        torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.5 * want, p)
        twins.check_grads(rtol=1e-5)


@ranks(2)
@pytest.mark.parametrize("p", [2.0, 1.0, INF])
def test_the_method_of_the_model_is_the_function_of_torch(rank, world, p):
    twins = Twins(rank, world, Net, policy={Block})
    twins.backward(square_loss)
    want = _norm_of(twins.ref, p)
    _near(twins.model.clip_grad_norm_(0.5 * want, p), want)
    torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.5 * want, p)
    twins.check_grads(rtol=1e-5)


@ranks(2)
def test_get_total_norm_and_clip_grads_with_norm(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    twins.backward(square_loss)
    for foreach in (None, True, False):
        for p in (2.0, 1.0, INF):
            norm = torch.nn.utils.get_total_norm([q.grad for q in twins.model.parameters()], p, foreach=foreach)
            _near(norm, _norm_of(twins.ref, p))
    torch.nn.utils.clip_grads_with_norm_(twins.model.parameters(), 0.1, norm)
    torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.1, INF)
    twins.check_grads(rtol=1e-5)


@ranks(2)
def test_clip_grad_value(rank, world):
    for foreach in (None, True, False):
        twins = Twins(rank, world, Net, policy={Block})
        twins.backward(square_loss)
        torch.nn.utils.clip_grad_value_(twins.model.parameters(), 0.01, foreach=foreach)
        torch.nn.utils.clip_grad_value_(twins.ref.parameters(), 0.01)
        twins.check_grads()


@ranks(2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_an_infinite_gradient_on_one_rank_is_an_error_on_all_where_asked(rank, world, foreach):
    model = shardkit.auto_wrap(Net(), policy={Block})
    square_loss(model, rank, 0).backward()
    if rank == 0:
        grad = next(p.grad for p in model.parameters() if p.grad.numel())
        grad.view(-1)[0] = INF
    error = raises(
        RuntimeError,
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, foreach=foreach),
    )
    assert "non-finite" in str(error)


@ranks(2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_where_most_ranks_hold_nothing(rank, world, foreach):
    """One trained bias: it lies on one rank, the others' pieces are empty."""

    def build():
        model = Net()
        model.requires_grad_(False), model.head.bias.requires_grad_(True)
        return model

    for p in (2.0, 1.0, INF, 0.5):
        twins = Twins(rank, world, build, policy={Block}, optim=lambda ps: sgd([p for p in ps if p.requires_grad]))
        _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0, p, foreach=foreach), 0.0)
        twins.backward(square_loss)
        want = _norm_of(twins.ref, p)
        _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.5 * want, p, foreach=foreach), want)
        torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.5 * want, p)
        twins.check_grads(rtol=1e-5)


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none, self.one, self.lin = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(1)), nn.Linear(5, 3)
        self.scalar, self.z = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return self.lin(x) * self.one * self.scalar + self.none.sum() + self.z.abs().sum()


@ranks(2, 4)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_with_empty_scalar_and_complex_parameters(rank, world, foreach):
    for p in (2.0, 1.0, INF):
        twins = Twins(rank, world, lambda: nn.Sequential(Empty(), nn.Linear(3, 5), Empty()), policy={Empty})
        twins.backward(square_loss)
        sizes = [g.abs().double() for g in grads(twins.ref).values() if g.numel()]  # torch has no maximum of nothing
        want = max(t.max().item() for t in sizes) if p == INF else sum(t.pow(p).sum().item() for t in sizes) ** (1 / p)
        _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.5 * want, p, foreach=foreach), want)
        for q in twins.ref.parameters():
            q.grad.mul_(0.5 * want / (want + 1e-6))
        twins.check_grads(rtol=1e-5)


@ranks(2)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norms_of_a_model_that_is_sharded_in_part(rank, world, foreach):
    """An ignored module's gradients are plain and local: here the same on all ranks, and counted once."""
    twins = Twins(rank, world, Net, wrap=lambda m: shardkit.auto_wrap(m, policy={Block}, ignored_modules=[m.head]))
    same = lambda m, r, s: square_loss(m, 0, s)  # noqa: E731
    twins.backward(same)
    want = _norm_of(twins.ref, 2)
    _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.5 * want, foreach=foreach), want)
    torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.5 * want)
    twins.check_grads(rtol=1e-5)


@ranks(2)
def test_norms_of_mixed_dtypes(rank, world):
    def build():
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 5))

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.seq = build()

        def forward(self, x):
            return self.seq[2](self.seq[1](self.seq[0](x).double()).float())

    for foreach in (None, True, False):
        twins = Twins(rank, world, Cast)
        twins.backward(square_loss)
        _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.1, foreach=foreach), _norm_of(twins.ref, 2))
        torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.1, foreach=False)
        twins.check_grads(rtol=1e-5)


@ranks(2)
@pytest.mark.parametrize("hook", ["returns a new tensor", "in place", "replaces grad"])
def test_gradients_that_hooks_or_loops_replaced_still_have_a_whole_norm(rank, world, hook):
    twins = Twins(rank, world, Net, policy={Block})
    for model in (twins.model, twins.ref):
        if hook == "returns a new tensor":
            model.inp.weight.register_hook(lambda g: g * 2)
        elif hook == "in place":
            model.inp.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(1.0), None)[1])
    twins.backward(square_loss)
    for model in (twins.model, twins.ref):
        if hook == "replaces grad":
            model.inp.weight.grad = model.inp.weight.grad * 2
    _near(torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1e9), _norm_of(twins.ref, 2))


# -------------------------------------------------------------------------------------------------- gradient scaling


@ranks(2)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_an_infinity_on_one_rank_makes_all_skip_the_step(rank, world, foreach, clip, bad):
    twins = Twins(rank, world, Net, policy={Block}, optim=lambda ps: torch.optim.SGD(ps, 0.1, foreach=foreach))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scales = []
    for step in range(4):
        twins.zero()
        scaler.scale(square_loss(twins.model, rank, twins.steps)).backward()
        if step == 1 and rank == world - 1:
            next(p.grad for p in reversed(list(twins.model.parameters())) if p.grad.numel()).view(-1)[-1] = bad
        if clip:
            scaler.unscale_(twins.optim)
            torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 0.1)
        scaler.step(twins.optim)
        scaler.update()
        scales.append(scaler.get_scale())
        if step != 1:
            twins.ref_backward(square_loss)
            if clip:
                torch.nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.1)
            twins.ref_optim.step()
            twins.steps += 1
        twins.check_weights(rtol=2e-5)
    assert scales == [2048.0, 1024.0, 2048.0, 4096.0] and same_on_all_ranks(scales)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_scaler_with_accumulation(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(3):
        twins.zero()
        with twins.model.no_sync():
            scaler.scale(square_loss(twins.model, rank, twins.steps)).backward()
        scaler.scale(square_loss(twins.model, rank, 50 + twins.steps)).backward()
        scaler.step(twins.optim), scaler.update()
        twins.ref_backward(square_loss), twins.ref_backward(lambda m, r, s: square_loss(m, r, 50 + s))
        twins.ref_optim.step()
        twins.steps += 1
        twins.check_weights()


@ranks(4)
def test_a_scaler_on_a_hybrid_mesh_skips_everywhere(rank, world):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy="hybrid", device_mesh=mesh(2, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x = data(rank, 4, 5)
    if rank == 3:
        x[0, 0] = INF
    scaler.scale((twins.model(x) ** 2).mean()).backward()
    scaler.step(twins.optim), scaler.update()
    assert scaler.get_scale() == 32.0
    twins.check_weights(rtol=0)


@ranks(2)
def test_a_scaler_whose_optimizer_has_one_parameter(rank, world):
    """Ranks whose piece is empty take part."""
    twins = Twins(rank, world, Net, policy={Block}, optim=lambda ps: torch.optim.SGD(ps[-1:], 0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(square_loss(twins.model, rank, 0)).backward()
    scaler.step(twins.optim), scaler.update()
    twins.ref_backward(square_loss), twins.ref_optim.step()
    twins.check_weights()


# --------------------------------------------------------------------------------------------------------- LocalShard


@ranks(2, 4)
def test_norms_of_one_gradient_are_of_the_whole(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    twins.backward(square_loss)
    for name, p in twins.model.named_parameters():
        want = dict(twins.ref.named_parameters())[name].grad
        _near(p.grad.norm(), want.norm().item())
        _near(p.grad.norm(1), want.norm(1).item())
        _near(p.grad.norm(p=INF), want.norm(p=INF).item())
        _near(torch.norm(p.grad), want.norm().item())
        _near(torch.linalg.vector_norm(p.grad), want.norm().item())
        _near(torch.linalg.vector_norm(p.grad, INF), want.abs().max().item())
        _near(torch.linalg.norm(p.grad), want.norm().item())
        _near(p.grad.detach().norm(), want.norm().item())
        _near(p.grad.clone().norm(), want.norm().item())
        _near(p.grad.norm().item() + torch.sqrt(p.grad.norm() ** 2), 2 * want.norm().item())
        _near(torch.linalg.vector_norm(p.grad, dtype=torch.float64), want.double().norm().item())
        _near(p.grad.norm(2, dtype=torch.float64), want.double().norm().item())
    total = torch.stack([p.grad.norm() for p in twins.model.parameters()]).norm()
    _near(total, _norm_of(twins.ref, 2))
    total = sum(p.grad.norm() ** 2 for p in twins.model.parameters()) ** 0.5
    _near(total, _norm_of(twins.ref, 2))
    total = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2.0) for p in twins.model.parameters()]), 2.0)
    _near(total, _norm_of(twins.ref, 2))
    total = sum(p.grad.data.norm(2).item() ** 2 for p in twins.model.parameters()) ** 0.5
    _near(total, _norm_of(twins.ref, 2))


@ranks(2)
def test_elementwise_code_sees_an_ordinary_local_tensor(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    twins.backward(square_loss)
    grad = twins.model.blocks[1].up.weight.grad
    assert isinstance(grad, LocalShard) and type(grad.to_local()) is torch.Tensor
    assert grad.to_local().data_ptr() == grad.data_ptr() and grad.shape == twins.model.blocks[1].up.weight.shape
    before = grad.to_local().clone()
    assert torch.equal((grad + 1).to_local(), before + 1) and type(grad[:1]) is torch.Tensor
    assert torch.equal((grad * grad).sqrt(), before.abs())
    grad.mul_(2)
    assert isinstance(grad, LocalShard) and torch.equal(grad.to_local(), before * 2)
    grad /= 2
    assert isinstance(grad, LocalShard) and torch.equal(grad.to_local(), before)
    grad.zero_()
    assert not grad.to_local().any()


@ranks(2, 4)
def test_full_tensor_is_the_whole_gradient(rank, world):
    twins = Twins(rank, world, lambda: nn.Sequential(Empty(), nn.Linear(3, 5)))
    twins.backward(square_loss)
    for name, p in twins.ref.named_parameters():
        got = full(dict(twins.model.named_parameters())[name].grad)
        assert type(got) is torch.Tensor and got.shape == p.shape
    compare("full", full_grads(twins.model), grads(twins.ref))


@ranks(2)
def test_a_local_shard_is_copied_and_pickled_with_its_place(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    twins.backward(square_loss)
    grad = twins.model.inp.weight.grad
    for twin in (copy.deepcopy(grad), grad.clone(), grad.detach()):
        assert isinstance(twin, LocalShard) and twin.shard_info is grad.shard_info
        assert torch.equal(twin.full_tensor(), grad.full_tensor())
    assert copy.deepcopy(grad).data_ptr() != grad.data_ptr() or not grad.numel()
    file = io.BytesIO()
    torch.save({"g": grad}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["g"]
    assert isinstance(loaded, LocalShard) and torch.equal(loaded.to_local(), grad.to_local())
    assert loaded.shard_info.piece == grad.shard_info.piece and loaded.shard_info.shape == grad.shard_info.shape
    assert loaded.shard_info.name == "inp.weight"
    repr(grad), repr(loaded), repr(grad.norm())


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_accumulation_into_a_zeroed_gradient(rank, world, set_to_none):
    twins = Twins(rank, world, Net, policy={Block})
    for _ in range(3):
        twins.optim.zero_grad(set_to_none=set_to_none), twins.ref_optim.zero_grad(set_to_none=set_to_none)
        twins.backward(square_loss)
        twins.backward(lambda m, r, s: square_loss(m, r, 50 + s))
        assert all(isinstance(p.grad, LocalShard) for p in twins.model.parameters())
        twins.check_grads()
        twins.update()
