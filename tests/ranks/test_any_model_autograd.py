"""What autograd, hooks, checkpoints and exceptions do to a sharded model is what they do to the bare one.

The oracle and its tolerance: tests/oracle.py.
"""

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardkit
from tests.harness import ranks
from tests.oracle import (
    LM,
    Block,
    Net,
    Twins,
    compare,
    data,
    full,
    full_grads,
    full_params,
    grads,
    lm_loss,
    params,
    raises,
    square_loss,
)  # fmt: skip

KEEPING = ["full", "grad_op"]  # dropped after forward, or after backward; test_parity has all strategies

# ------------------------------------------------------------------------------------------------- partial backward


@ranks(2)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
def test_autograd_grad_with_respect_to_inputs_touches_no_gradient(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    twins.backward(square_loss)
    out = {}
    for name, model in (("got", twins.model), ("want", twins.ref)):
        x = data(30 + rank, 4, 5).requires_grad_()
        (out[name],) = torch.autograd.grad(model(x).tanh().sum(), x)
    compare("input", {"grad": out["got"]}, {"grad": out["want"]})
    twins.check_grads()
    twins.train(square_loss, 2)


@ranks(2, 4)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
@pytest.mark.parametrize("tied", [True, False])
def test_autograd_grad_with_respect_to_parameters_gives_reduced_pieces(rank, world, strategy, tied):
    twins = Twins(rank, world, lambda: LM(tied=tied), policy={Block, nn.Embedding}, sharding_strategy=strategy)
    for step in range(2):
        got = torch.autograd.grad(lm_loss(twins.model, rank, step), list(twins.model.parameters()))
        want = [torch.zeros_like(p) for p in twins.ref.parameters()]
        for r in range(world):
            for w, g in zip(want, torch.autograd.grad(lm_loss(twins.ref, r, step), list(twins.ref.parameters()))):
                w += g / world
        names = [n for n, _ in twins.ref.named_parameters()]
        compare(
            "captured",
            {n: _whole(g, p) for n, g, p in zip(names, got, twins.model.parameters())},
            dict(zip(names, want)),
        )
        assert all(p.grad is None for p in twins.model.parameters())
        with torch.no_grad():  # an optimizer written by hand
            for p, g in zip(twins.model.parameters(), got):
                p -= 0.1 * g
            for p, g in zip(twins.ref.parameters(), want):
                p -= 0.1 * g
        twins.check_weights()
    twins.train(lm_loss, 2)


def _whole(grad, param):
    assert isinstance(grad, shardkit.LocalShard) and grad.shape == param.shape
    return full(grad)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_autograd_grad_of_some_parameters_and_of_unused_ones(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    pick = lambda m: [m.blocks[1].up.weight, m.inp.bias, m.blocks[2].norm.weight]  # noqa: E731
    got = torch.autograd.grad(square_loss(twins.model, rank, 0), pick(twins.model))
    want = [0, 0, 0]
    for r in range(world):
        want = [w + g / world for w, g in zip(want, torch.autograd.grad(square_loss(twins.ref, r, 0), pick(twins.ref)))]
    compare("some", {i: _whole(g, p) for i, (g, p) in enumerate(zip(got, pick(twins.model)))}, dict(enumerate(want)))
    some = [twins.model.head.weight, twins.model.blocks[2].up.weight]
    y = twins.model.blocks[0](twins.model.inp(data(1, 4, 5))).sum()
    assert torch.autograd.grad(y, some, allow_unused=True) == (None, None)
    twins.train(square_loss, 2)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_backward_with_inputs_gives_gradients_to_these_alone(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    pick = lambda m: [m.blocks[1].up.weight, m.inp.bias, m.head.weight]  # noqa: E731
    for step in range(2):
        square_loss(twins.model, rank, step).backward(inputs=pick(twins.model))
        for r in range(world):
            (square_loss(twins.ref, r, step) / world).backward(inputs=pick(twins.ref))
    twins.check_grads()
    twins.zero()
    twins.train(square_loss, 2)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_backward_with_an_input_tensor_as_input(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    xs = [data(rank, 4, 5).requires_grad_() for _ in range(2)]
    for model, x in zip((twins.model, twins.ref), xs):
        (model(x) ** 2).mean().backward(inputs=[x])
    compare("input", {"grad": xs[0].grad}, {"grad": xs[1].grad})
    assert all(p.grad is None for p in twins.model.parameters())
    twins.train(square_loss, 2)


@ranks(2)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
@pytest.mark.parametrize("penalty_only", [True, False])
def test_gradient_penalty(rank, world, strategy, penalty_only):
    def loss(model, r, s):
        x = data(10 * s + r, 4, 5).requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = ((g.norm(dim=1) - 1) ** 2).mean()
        return penalty if penalty_only else penalty + 0.1 * model(data(40 + s + r, 4, 5)).mean()

    Twins(rank, world, lambda: Net(out=1), policy={Block}, sharding_strategy=strategy).train(loss, 3, rtol=5e-6)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_forces_of_an_energy_model(rank, world, strategy):
    """Energy and its gradient by the input both enter the loss; the same forward serves both."""

    def loss(model, r, s):
        x = data(10 * s + r, 4, 5).requires_grad_()
        energy = model(x).sum(1)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True, retain_graph=True)
        return energy.pow(2).mean() + (force - 1).pow(2).mean()

    Twins(rank, world, lambda: Net(out=1), policy={Block}, sharding_strategy=strategy).train(loss, 3, rtol=5e-6)


@ranks(2)
def test_third_derivatives(rank, world):
    def loss(model, r, s):
        x = data(10 * s + r, 4, 5).requires_grad_()
        y = model(x).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = g.pow(2).sum()
        return y * 0.1

    Twins(rank, world, lambda: Net(out=1, blocks=2), policy={Block}).train(loss, 2, rtol=1e-5)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_backward_of_several_losses_at_once_and_with_a_given_gradient(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    for step in range(2):
        twins.zero()
        for model, which, scale in ((twins.model, [rank], 1.0), (twins.ref, range(world), 1 / world)):
            for r in which:
                y, z = model(data(10 * step + r, 4, 5)), model(data(50 + step + r, 2, 5))
                weight = data(7, 4, 3) * scale
                torch.autograd.backward([y, z.sum() * scale], [weight, None])
        twins.check_grads()
        twins.update()


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("how", ["jvp", "dual", "jvp of a unit"])
def test_forward_mode_derivatives_by_the_input(rank, world, strategy, how):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    x, v = data(rank, 4, 5), data(10 + rank, 4, 5)

    def derivative(model):
        if how == "dual":
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(model(forward_ad.make_dual(x, v))).tangent.clone()
        return torch.func.jvp(model.blocks[1] if "unit" in how else model, (x,), (v,))[1]

    for _ in range(2):
        compare("tangent", {"t": derivative(twins.model)}, {"t": derivative(twins.ref)}, 5e-6)
        with torch.no_grad():
            compare("tangent", {"t": derivative(twins.model)}, {"t": derivative(twins.ref)}, 5e-6)
        twins.train(square_loss, 1)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("how", ["vjp", "grad", "jacrev", "jacfwd", "vmap", "jacobian"])
def test_function_transforms_by_the_input(rank, world, strategy, how):
    twins = Twins(rank, world, lambda: Net(blocks=2), policy={Block}, sharding_strategy=strategy)
    x = data(rank, 2, 5)

    def result(model):
        if how == "vjp":
            return torch.func.vjp(model, x)[1](torch.ones(2, 3))[0]
        if how == "grad":
            return torch.func.grad(lambda x: model(x).tanh().sum())(x)
        if how == "jacobian":
            return torch.autograd.functional.jacobian(model, x)
        return {"jacrev": torch.func.jacrev, "jacfwd": torch.func.jacfwd, "vmap": torch.vmap}[how](model)(x)

    for _ in range(2):
        compare(how, {"r": result(twins.model).detach()}, {"r": result(twins.ref).detach()}, 5e-6)
        twins.train(square_loss, 1)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_a_graph_cut_by_hand_trains_as_the_whole(rank, world, strategy):
    """What autograd sees of one forward may be detached, kept, and asked again."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    kept = []
    for step in range(3):
        twins.zero()
        out = {}
        for model, which, scale in ((twins.model, [rank], 1.0), (twins.ref, range(world), 1 / world)):
            for r in which:
                y = model(data(10 * step + r, 4, 5))
                if model is twins.model:
                    kept.append(y)  # graphs that are never used again
                h = y.detach().requires_grad_()
                (h**2).sum().backward()  # a pipeline cut by hand
                y.backward(h.grad * scale)
                out[model] = h
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_a_graph_that_is_dropped_without_backward_leaves_nothing(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    for _ in range(3):
        y = twins.model(data(1, 2, 5))
        z = twins.model(data(2, 2, 5)).sum()
        del y, z
        twins.train(square_loss, 1)


@ranks(2)
def test_backward_in_another_thread(rank, world):
    import threading

    twins = Twins(rank, world, Net, policy={Block})
    for _ in range(2):
        twins.zero()
        loss = square_loss(twins.model, rank, twins.steps)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        twins.ref_backward(square_loss)
        twins.check_grads()
        twins.update()


# ------------------------------------------------------------------------------------------------------------- hooks


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("when", ["before", "after"])
def test_module_hooks_fire_and_see_full_parameters(rank, world, strategy, when):
    seen = {"got": [], "want": []}

    def hooked(model, into):
        for name in ("blocks.0", "blocks.0.up", "head", ""):
            module = model.get_submodule(name)
            shape = (lambda m: tuple(m.weight.shape)) if name in ("blocks.0.up", "head") else (lambda m: ())
            module.register_forward_pre_hook(lambda m, a, n=name, f=shape: into.append((n, "pre", f(m))))
            module.register_forward_hook(lambda m, a, o, n=name, f=shape: into.append((n, "post", f(m))))
            module.register_full_backward_hook(
                lambda m, gi, go, n=name: into.append((n, "back", len(gi), tuple(go[0].shape)))
            )
            module.register_full_backward_pre_hook(
                lambda m, go, n=name: into.append((n, "back pre", tuple(go[0].shape)))
            )
        model.blocks[1].register_forward_hook(lambda m, a, o: o * 2)
        model.blocks[2].register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
        model.blocks[1].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        return model

    def wrap(model):
        if when == "before":
            return shardkit.auto_wrap(hooked(model, seen["got"]), policy={Block}, sharding_strategy=strategy)
        return hooked(shardkit.auto_wrap(model, policy={Block}, sharding_strategy=strategy), seen["got"])

    twins = Twins(rank, world, Net, wrap=wrap)
    hooked(twins.ref, seen["want"])
    for _ in range(3):
        seen["got"].clear(), seen["want"].clear()
        twins.train(square_loss, 1)
        assert seen["got"] * world == seen["want"]


@ranks(2)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_parameters_fire_with_the_reduced_gradient(rank, world, strategy, when):
    """The twin's hooks fire once for each rank's batch: they are linear, so that scaling commutes with the mean."""
    fired = {"got": 0, "accumulated": 0}

    def hooked(model, count):
        model.blocks[1].up.weight.register_hook(lambda g: g * 2)
        model.head.bias.register_hook(lambda g: (count("got"), None)[1])
        model.inp.weight.register_hook(lambda g: -g)
        model.head.weight.register_post_accumulate_grad_hook(lambda p: count("accumulated"))
        return model

    def count(what):
        fired[what] += 1

    def wrap(model):
        if when == "before":
            return shardkit.auto_wrap(hooked(model, count), policy={Block}, sharding_strategy=strategy)
        return hooked(shardkit.auto_wrap(model, policy={Block}, sharding_strategy=strategy), count)

    twins = Twins(rank, world, Net, wrap=wrap)
    hooked(twins.ref, lambda _: None)
    twins.train(square_loss, 3)
    assert fired == {"got": 3, "accumulated": 3}


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_an_optimizer_that_steps_in_a_hook_on_each_parameter(rank, world, strategy):
    """Step in backward: the gradient is consumed and freed by the hook."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    optims = {p: torch.optim.SGD([p], lr=0.1) for p in twins.model.parameters()}

    def step(p):
        optims[p].step()
        p.grad = None

    for p in twins.model.parameters():
        p.register_post_accumulate_grad_hook(step)
    twins.ref_optim = torch.optim.SGD(twins.ref.parameters(), lr=0.1)
    for _ in range(3):
        twins.ref.zero_grad()
        twins.backward(square_loss)
        assert all(p.grad is None for p in twins.model.parameters())
        twins.ref_optim.step()
        twins.steps += 1
        twins.check_weights()


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_hooks_on_activations_fire(rank, world, strategy):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.out = nn.ModuleList(Block() for _ in range(3)), nn.Linear(5, 2)

        def forward(self, x):
            for b in self.b:
                x = b(x)
                x.register_hook(lambda g: g * torch.tensor([1.0, 0, 1, 1, 2]))
            return self.out(x)

    Twins(rank, world, Masked, policy={Block}, sharding_strategy=strategy).train(square_loss, 3)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_saved_tensor_hooks_of_the_user_apply_to_activations_alone(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    for _ in range(2):
        twins.zero()
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, packed=packed: packed.append(t) or t.clone(), lambda t: t
        ):
            loss = square_loss(twins.model, rank, twins.steps)
        assert packed
        loss.backward()
        twins.ref_backward(square_loss)
        twins.check_grads()
        twins.zero()
        with torch.autograd.graph.save_on_cpu():
            loss = square_loss(twins.model, rank, twins.steps)
        loss.backward()
        twins.ref_backward(square_loss)
        twins.check_grads()
        twins.update()


@ranks(2)
def test_global_hooks_of_torch_and_anomaly_detection_leave_numbers_alone(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: calls.append(type(m).__name__))
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            twins.train(square_loss, 2)
    finally:
        handle.remove()
    assert calls.count("Net") == 2 * (1 + world)


# -------------------------------------------------------------------------------------------------------- checkpoints


class Checkpointed(nn.Module):
    """`where`: the checkpoint is inside the unit, around it, around two units, or around everything; or units nest."""

    def __init__(self, where, reentrant):
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.inp, self.out = nn.Linear(5, 5), nn.Linear(5, 2)
        self.u = nn.ModuleList(Inner(where, reentrant) for _ in range(4))

    def forward(self, x):
        x = self.inp(x)
        if self.where == "around":
            for u in self.u:
                x = checkpoint(u, x, use_reentrant=self.reentrant)
        elif self.where == "around pairs":
            for a, b in (self.u[:2], self.u[2:]):
                x = checkpoint(lambda x, a=a, b=b: b(a(x)), x, use_reentrant=self.reentrant)
        elif self.where == "nested":
            x = checkpoint(self._half, x, use_reentrant=self.reentrant)
        elif self.where == "twice":
            for u in self.u:
                x = checkpoint(u, checkpoint(u, x, use_reentrant=self.reentrant), use_reentrant=self.reentrant)
        elif self.where == "sequential":
            x = checkpoint_sequential(self.u, 2, x, use_reentrant=self.reentrant)
        elif self.where == "forward":
            for u in self.u:
                x = checkpoint(u.forward, x, use_reentrant=self.reentrant)
        elif self.where == "mixed":
            for i, u in enumerate(self.u):
                x = checkpoint(u, x, use_reentrant=self.reentrant) if i % 2 else u(x)
        else:
            for u in self.u:
                x = u(x)
        return self.out(x)

    def _half(self, x):
        for u in self.u:
            x = checkpoint(u, x, use_reentrant=self.reentrant)
        return x


class Inner(nn.Module):
    def __init__(self, where, reentrant):
        super().__init__()
        self.b, self.c, self.where, self.reentrant = Block(dropout=0.2), nn.Linear(5, 5), where, reentrant

    def forward(self, x):
        if self.where == "inside":
            return self.c(checkpoint(self.b, x, use_reentrant=self.reentrant))
        if self.where == "all inside":
            return checkpoint(lambda x: self.c(self.b(x)), x, use_reentrant=self.reentrant)
        return self.c(self.b(x))


PLACES = ["inside", "all inside", "around", "around pairs", "nested", "twice", "sequential", "forward", "mixed"]


def _seeded_loss(model, r, s):
    torch.manual_seed(1000 + 10 * s + r)  # dropout
    return square_loss(model, r, s)


@ranks(2)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("policy", [{Inner}, {Block}, {Inner, Block}, {nn.Linear}])
def test_activation_checkpoints_change_no_numbers(rank, world, where, reentrant, policy):
    for strategy in KEEPING:
        twins = Twins(rank, world, lambda: Checkpointed(where, reentrant), policy=policy, sharding_strategy=strategy)
        twins.train(_seeded_loss, 2)


@ranks(2)
@pytest.mark.parametrize("where", ["inside", "around", "nested"])
def test_a_checkpointed_model_with_frozen_units(rank, world, where):
    def build(reentrant):
        model = Checkpointed(where, reentrant)
        model.u[1].requires_grad_(False), model.u[2].b.requires_grad_(False)
        return model

    for reentrant in (True, False):
        Twins(rank, world, lambda reentrant=reentrant: build(reentrant), policy={Inner}).train(_seeded_loss, 2)


@ranks(2)
@pytest.mark.parametrize("where", ["inside", "around", "around pairs"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_with_accumulation_and_evaluation(rank, world, where, reentrant):
    twins = Twins(rank, world, lambda: Checkpointed(where, reentrant), policy={Inner})
    for _ in range(2):
        twins.zero()
        with twins.model.no_sync():
            twins.backward(_seeded_loss)
        with torch.no_grad():
            twins.model.eval()(data(1, 2, 5))
            twins.model.train()
        twins.backward(lambda m, r, s: _seeded_loss(m, r, 50 + s))
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_wrappers_of_torch_for_activation_checkpoints(rank, world, reentrant):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as cw

    kind = cw.CheckpointImpl.REENTRANT if reentrant else cw.CheckpointImpl.NO_REENTRANT

    def before(model):
        cw.apply_activation_checkpointing(
            model, lambda m: cw.checkpoint_wrapper(m, kind), lambda m: isinstance(m, Block)
        )
        return shardkit.auto_wrap(model, policy={Block})

    def after(model):
        model = shardkit.auto_wrap(model, policy={Block})
        cw.apply_activation_checkpointing(
            model, lambda m: cw.checkpoint_wrapper(m, kind), lambda m: isinstance(m, Block)
        )
        return model

    for wrap in (before, after):
        twins = Twins(rank, world, Net, wrap=wrap)
        for _ in range(2):
            twins.zero()
            twins.backward(square_loss)
            compare("gradient", _clean(full_grads(twins.model)), grads(twins.ref))
            twins.update()


def _clean(named):
    return {n.replace("_checkpoint_wrapped_module.", ""): v for n, v in named.items()}


# ----------------------------------------------------------------------------------------------- scaling and casting


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_autocast_around_a_step_and_inside(rank, world, strategy):
    """bfloat16 rounds to 8 bits; both sides round the same values, in sums of another order."""

    def loss(model, r, s):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square_loss(model, r, s).float()

    Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy).train(loss, 2, rtol=2e-2)


# --------------------------------------------------------------------------------------------------------- exceptions


class Bomb(nn.Module):
    """Raises `what` in forward or in backward, while armed."""

    armed: tuple | None = None

    class Fuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            if Bomb.armed and Bomb.armed[0] == "backward":
                raise Bomb.armed[1]("boom")
            return g

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        if Bomb.armed and Bomb.armed[0] == "forward":
            raise Bomb.armed[1]("boom")
        return self.block(Bomb.Fuse.apply(x))


class BombNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bomb, self.c, self.out = Block(), Bomb(), Block(), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(self.c(self.bomb(self.a(x))))


@ranks(2)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
@pytest.mark.parametrize("where", ["forward", "backward", "module hook", "tensor hook", "param hook", "outside"])
@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_the_step_after_an_exception_is_right(rank, world, strategy, where, kind):
    twins = Twins(rank, world, BombNet, policy={Block, Bomb}, sharding_strategy=strategy)

    def blow(*_):
        raise kind("boom")

    for step in range(7):
        twins.zero()
        if step % 2:
            with contextlib.ExitStack() as stack:
                Bomb.armed = (where, kind)
                if where == "module hook":
                    stack.callback(twins.model.c.register_full_backward_hook(blow).remove)
                if where == "param hook":
                    stack.callback(twins.model.a.up.weight.register_hook(blow).remove)
                raises(kind, _broken_step, twins, where, blow)
            Bomb.armed = None
            if step == 3:  # what a loop may do first
                twins.check_output(data(3, 2, 5))
            if step == 5:
                compare("weights after the exception", full_params(twins.model), params(twins.ref), 5e-6)
            continue
        twins.backward(square_loss)
        twins.check_grads()
        twins.update()
    twins.check_weights()


def _broken_step(twins, where, blow):
    y = twins.model(data(1000 + twins.rank, 4, 5))
    if where == "tensor hook":
        y.register_hook(blow)
    if where == "outside":
        blow()
    y.sum().backward()


@ranks(2)
def test_gradients_kept_before_an_exception_are_still_there(rank, world):
    """A micro-batch that failed is skipped; what the earlier ones left in `grad` counts."""
    twins = Twins(rank, world, BombNet, policy={Block, Bomb})
    for where in ("forward", "backward"):
        twins.zero()
        twins.backward(square_loss)
        Bomb.armed = (where, ValueError)
        raises(ValueError, _broken_step, twins, where, None)
        Bomb.armed = None
        twins.backward(lambda m, r, s: square_loss(m, r, 50 + s))
        twins.check_grads()
        twins.update()


@ranks(2)
def test_gradients_kept_unreduced_survive_an_exception_in_a_later_forward(rank, world):
    twins = Twins(rank, world, BombNet, policy={Block, Bomb})
    with twins.model.no_sync():
        twins.backward(square_loss)
        Bomb.armed = ("forward", ValueError)
        raises(ValueError, _broken_step, twins, "forward", None)
        Bomb.armed = None
    twins.backward(lambda m, r, s: square_loss(m, r, 50 + s))
    twins.check_grads()


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_an_exception_in_a_recomputed_forward_leaves_the_next_step_right(rank, world, where, reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.bomb, self.out = Block(), Bomb(), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(checkpoint(self.bomb, self.a(x), use_reentrant=reentrant))

    twins = Twins(rank, world, Net, policy={Block, Bomb})
    for step in range(4):
        twins.zero()
        if step % 2:
            y = twins.model(data(1000 + rank, 4, 5)).sum()
            Bomb.armed = (where, MemoryError)  # the forward passed: the bomb goes off in backward
            raises(MemoryError, y.backward)
            Bomb.armed = None
            continue
        twins.train(square_loss, 1)


@ranks(2)
def test_an_exception_in_an_evaluation_leaves_the_next_step_right(rank, world):
    twins = Twins(rank, world, BombNet, policy={Block, Bomb})

    def evaluate():
        with torch.no_grad():
            twins.model(data(1, 2, 5))

    for _ in range(3):
        twins.train(square_loss, 1)
        Bomb.armed = ("forward", RuntimeError)
        raises(RuntimeError, evaluate)
        Bomb.armed = None
        evaluate()


@ranks(2)
def test_an_early_exit_by_an_exception_that_the_model_catches(rank, world):
    """A unit whose exception its caller catches and answers with another unit, as fallbacks do."""

    class Fallback(nn.Module):
        def __init__(self):
            super().__init__()
            self.bomb, self.other, self.out = Bomb(), Block(), nn.Linear(5, 2)

        def forward(self, x):
            try:
                x = self.bomb(x)
            except ValueError:
                x = self.other(x)
            return self.out(x)

    twins = Twins(rank, world, Fallback, policy={Block, Bomb})
    for step in range(6):
        Bomb.armed = ("forward", ValueError) if step % 2 else None
        twins.train(square_loss, 1)
    Bomb.armed = None


@ranks(2)
def test_hooks_that_stop_a_forward_early(rank, world):
    """A feature extractor: a hook raises to stop the forward once it has what it needs, inside and outside no_grad."""
    twins = Twins(rank, world, Net, policy={Block})

    class Stop(Exception):
        pass

    def features(model, x):
        kept = {}

        def hook(module, args, output):
            kept["h"] = output
            raise Stop

        handle = model.blocks[1].register_forward_hook(hook)
        with contextlib.suppress(Stop):
            model(x)
        handle.remove()
        return kept["h"]

    for _ in range(3):
        with torch.no_grad():
            compare("h", {"h": features(twins.model, data(1, 2, 5))}, {"h": features(twins.ref, data(1, 2, 5))}, 5e-6)
        twins.train(square_loss, 1)
    twins.train(lambda m, r, s: (features(m, data(10 * s + r, 4, 5)) ** 2).mean(), 2)
    twins.train(square_loss, 2)
