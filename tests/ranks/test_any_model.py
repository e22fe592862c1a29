"""Models of every make train as in one process: shared, frozen and odd parameters, odd outputs, weights changed in
forward.

What autograd is asked for in unusual ways (hooks, checkpoints, partial and double backward) is in
test_any_model_autograd.py. The oracle and its tolerance: tests/oracle.py.
"""

import collections
import copy
import dataclasses
import typing

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import shardkit
from tests.harness import ranks
from tests.oracle import (
    LM,
    Block,
    Net,
    Twins,
    adam,
    compare,
    data,
    full_params,
    grads,
    ids,
    lm_loss,
    params,
    seeded,
    sgd,
    square_loss,
)  # fmt: skip

KEEPING = ["full", "zero2"]  # full parameters are dropped as soon as can be, or never; test_parity has all strategies

# ------------------------------------------------------------------------------------------------ shared parameters


class Shared(nn.Module):
    """`kind`: where the shared matrix is used."""

    def __init__(self, kind):
        super().__init__()
        self.net = Net(blocks=3)
        blocks = self.net.blocks
        if kind == "siblings":
            blocks[2].up.weight = blocks[0].up.weight
        elif kind == "three blocks":
            blocks[1].up.weight = blocks[2].up.weight = blocks[0].up.weight
        elif kind == "within a block":
            for b in blocks:
                b.down = nn.Linear(11, 5, bias=False)
                b.down.weight = nn.Parameter(torch.randn(5, 11) * 0.2)
                b.up2 = nn.Linear(11, 5, bias=False)
                b.up2.weight = b.down.weight
                b.forward = lambda x, b=b: x + b.up2(torch.tanh(b.up(b.norm(x)))) + b.down(b.up(x)).tanh()
        elif kind == "whole module":
            blocks[2] = blocks[0]
        elif kind == "all biases":
            for b in blocks[1:]:
                b.up.bias, b.norm.weight, b.down.weight = (
                    blocks[0].up.bias,
                    blocks[0].norm.weight,
                    blocks[0].down.weight,
                )

    def forward(self, x):
        return self.net(x)


SHARED = ["siblings", "three blocks", "within a block", "whole module", "all biases"]


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("kind", SHARED)
def test_shared_parameters_get_the_sum_of_their_uses(rank, world, kind, strategy):
    Twins(rank, world, lambda: Shared(kind), policy={Block}, sharding_strategy=strategy).train(square_loss, 3)


@ranks(2)
@pytest.mark.parametrize("kind", SHARED)
def test_shared_parameters_with_a_unit_for_every_leaf(rank, world, kind):
    Twins(rank, world, lambda: Shared(kind), policy={nn.Linear, nn.LayerNorm}).train(square_loss, 3)


class Borrower(nn.Module):
    """The second unit runs first, is frozen, or runs alone, as `kind` says; both hold `w`."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b, self.out = kind, nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.b.weight = self.a.weight
        if kind == "owner frozen bias":
            self.a.bias.requires_grad_(False)

    def forward(self, x):
        order = {"reversed": (self.b, self.a), "alone": (self.b,), "twice": (self.b, self.a, self.b)}
        for module in order.get(self.kind, (self.a, self.b)):
            x = module(x).tanh()
        return self.out(x)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("kind", ["plain", "reversed", "alone", "twice", "owner frozen bias"])
def test_a_borrowed_weight_trains_in_any_order_of_its_units(rank, world, kind, strategy):
    optim = lambda ps: sgd([p for p in ps if p.requires_grad])  # noqa: E731
    Twins(rank, world, lambda: Borrower(kind), policy={nn.Linear}, sharding_strategy=strategy, optim=optim).train(
        square_loss, 3
    )


class Direct(nn.Module):
    """The root reads a weight of its unit `emb` without calling it: the logits of a language model."""

    def __init__(self, functional):
        super().__init__()
        self.emb, self.block, self.functional = nn.Embedding(11, 5), Block(), functional

    def forward(self, x):
        h = self.block(self.emb(x))
        return F.linear(h, self.emb.weight) if self.functional else h @ self.emb.weight.t()


@ranks(2)
@pytest.mark.parametrize("functional", [True, False])
def test_auto_wrap_trains_a_model_that_reads_its_embedding_directly(rank, world, functional):
    Twins(rank, world, lambda: Direct(functional)).train(lm_loss, 3)


@ranks(2)
def test_a_registered_alias_lets_the_root_read_the_weight_of_a_unit(rank, world):
    def build():
        model = Direct(True)
        model.alias = model.emb.weight
        model.forward = lambda x: F.linear(model.block(model.emb(x)), model.alias)
        return model

    def wrap(model):
        return shardkit.auto_wrap(model, policy={nn.Embedding, Block})

    Twins(rank, world, build, wrap=wrap).train(lm_loss, 2)


# --------------------------------------------------------------------------------------------- how often, which order


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.b, self.out = nn.ModuleList(Block() for _ in range(4)), nn.Linear(5, 2)

    def forward(self, x, order=(0, 1, 2, 3)):
        for i in order:
            x = self.b[i](x)
        return self.out(x)


ORDERS = [
    (0, 1, 2, 3),
    (3, 2, 1, 0),
    (1, 3),
    (2, 0, 2, 1),
    (),
    (0, 0, 0),
    (0, 1, 2, 3),
    (0, 1, 2, 3),
    (3,),
    (0, 1, 2, 3),
]


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_units_may_run_in_a_different_order_each_step(rank, world, strategy):
    twins = Twins(rank, world, Ordered, policy={Block}, sharding_strategy=strategy)
    for order in ORDERS:
        twins.check_output(data(5, 2, 5), order[::-1])
        # optimizers skip what no rank used, and so does the twin's
        twins.train(lambda m, r, s, order=order: (m(data(10 * s + r, 4, 5), order) ** 2).mean(), 1)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("backwards", ["one", "two", "two reversed", "nested", "retained"])
def test_two_forwards_and_their_backwards_in_any_order(rank, world, strategy, backwards):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)

    def passes(model, r, s, scale=1.0):
        first = (model(data(10 * s + r, 4, 5)) ** 2).mean() * scale
        second = model(data(50 + 10 * s + r, 3, 5)).tanh().mean() * scale
        if backwards == "one":
            (first + second).backward()
        elif backwards == "two":
            first.backward(), second.backward()
        elif backwards == "two reversed":
            second.backward(), first.backward()
        elif backwards == "nested":
            third = model(data(90 + r, 2, 5)).sum() * scale
            second.backward()
            fourth = model(data(95 + r, 2, 5)).sum() * scale
            (first + fourth).backward(), third.backward()
        else:
            (first + second).backward(retain_graph=True)
            first.backward(retain_graph=True), first.backward()

    for s in range(3):
        twins.zero()
        passes(twins.model, rank, s)
        for r in range(world):
            passes(twins.ref, r, s, 1 / world)
        twins.check_grads()
        twins.update()
    twins.check_weights()


class Recursive(nn.Module):
    """A module that calls itself, as a tree-structured network does."""

    def __init__(self):
        super().__init__()
        self.lin, self.block = nn.Linear(5, 5), Block()

    def forward(self, x, depth=2):
        return self.block(self.lin(x).tanh()) if depth == 0 else self.lin(self(x, depth - 1)) + self(x * 0.5, depth - 1)


class Holder(nn.Module):
    def __init__(self, make=Recursive):
        super().__init__()
        self.inner, self.out = make(), nn.Linear(5, 2)

    def forward(self, x, *args):
        return self.out(self.inner(x, *args))


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("policy", [{Recursive}, {Recursive, Block}, {nn.Linear}, None])
def test_a_module_that_calls_itself(rank, world, strategy, policy):
    Twins(rank, world, Holder, policy=policy, sharding_strategy=strategy).train(square_loss, 3)


@ranks(2)
def test_a_root_that_calls_itself(rank, world):
    Twins(rank, world, Recursive, policy={Block}).train(square_loss, 3)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.inner = nn.Linear(5, 5), nn.Sequential(Block(), Holder(Block), nn.Linear(2, 5))
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.a(self.inner(self.a(x)) * self.scale)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("policy", [{Block}, {Holder}, {Block, Holder, nn.Sequential}, {nn.Linear, Block, Holder}])
def test_units_inside_units(rank, world, strategy, policy):
    Twins(rank, world, Nested, policy=policy, sharding_strategy=strategy).train(square_loss, 3)


@ranks(2)
@pytest.mark.parametrize("strategies", [("full", "full"), ("grad_op", "full"), ("full", "grad_op"), ("zero2", "full")])
def test_inner_modules_wrapped_one_by_one_then_the_outer(rank, world, strategies):
    inner, outer = strategies

    def wrap(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = shardkit.FullyShardedDataParallel(block, sharding_strategy=inner)
        return shardkit.FullyShardedDataParallel(model, sharding_strategy=outer)

    Twins(rank, world, Net, wrap=wrap).train(square_loss)


@ranks(2)
def test_inner_modules_may_be_used_before_the_outer_is_wrapped(rank, world):
    def wrap(model):
        for block in model.blocks:
            shardkit.FullyShardedDataParallel(block)(data(1, 2, 5)).sum().backward()
            block.zero_grad()
        return shardkit.auto_wrap(model, policy={nn.Linear})

    Twins(rank, world, Net, wrap=wrap).train(square_loss, 3)


@ranks(2)
def test_parts_wrapped_alone_without_an_outer_are_roots_of_their_own(rank, world):
    def wrap(model):
        for part in (model.inp, *model.blocks, model.head):
            shardkit.FullyShardedDataParallel(part)
        return model

    twins = Twins(rank, world, Net, wrap=wrap)
    for _ in range(3):
        twins.train(square_loss, 1)


# ------------------------------------------------------------------------------------------------- frozen parameters


def _freeze(kind):
    def build():
        model = Net()
        if kind == "block":
            model.blocks[1].requires_grad_(False)
        elif kind == "all but the head":
            model.requires_grad_(False), model.head.requires_grad_(True)
        elif kind == "all but the input":
            model.requires_grad_(False), model.inp.requires_grad_(True)
        elif kind == "biases":
            for name, p in model.named_parameters():
                p.requires_grad_("bias" not in name)
        elif kind == "only biases":
            for name, p in model.named_parameters():
                p.requires_grad_("bias" in name)
        elif kind == "one tiny":
            model.requires_grad_(False), model.blocks[1].norm.bias.requires_grad_(True)
        return model

    return build


FROZEN = ["block", "all but the head", "all but the input", "biases", "only biases", "one tiny"]


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("kind", FROZEN)
def test_frozen_parameters_stay_and_the_others_train(rank, world, kind, strategy):
    twins = Twins(rank, world, _freeze(kind), policy={Block}, sharding_strategy=strategy)
    frozen = {n: p for n, p in params(twins.ref).items() if not dict(twins.ref.named_parameters())[n].requires_grad}
    twins.train(square_loss, 3)
    after = full_params(twins.model)
    assert all(torch.equal(after[n], p) for n, p in frozen.items())


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("kind", FROZEN)
def test_parameters_unfrozen_and_frozen_midway(rank, world, kind, strategy):
    twins = Twins(rank, world, _freeze(kind), policy={Block}, sharding_strategy=strategy)
    twins.train(square_loss, 2)
    for model in (twins.model, twins.ref):
        model.requires_grad_(True)
    twins.train(square_loss, 2)
    for model in (twins.model, twins.ref):
        model.blocks[0].requires_grad_(False), model.blocks[1].up.weight.requires_grad_(False)
    twins.train(square_loss, 2)
    for model in (twins.model, twins.ref):
        model.requires_grad_(True)
    twins.train(square_loss, 2)


@ranks(2)
def test_a_frozen_model_gives_gradients_to_its_input(rank, world):
    twins = Twins(rank, world, lambda: Net().requires_grad_(False), policy={Block}, optim=lambda ps: sgd(list(ps)))
    for _ in range(2):
        inputs = [data(rank, 4, 5).requires_grad_() for _ in range(2)]
        for model, x in zip((twins.model, twins.ref), inputs):
            (model(x) ** 2).mean().backward()
        compare("input", {"grad": inputs[0].grad}, {"grad": inputs[1].grad})


@ranks(2)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
def test_parameters_that_no_rank_used_keep_no_gradient(rank, world, strategy):
    """None, as in one process, so that weight decay leaves them alone; zeros after zero_grad(set_to_none=False)."""

    def build():
        model = Net()
        model.unused, model.blocks[1].unused = nn.Parameter(torch.ones(3)), nn.Linear(5, 5)
        return model

    twins = Twins(rank, world, build, policy={Block}, sharding_strategy=strategy,
                  optim=lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.3))  # fmt: skip
    twins.train(square_loss, 3)
    assert twins.model.unused.grad is None and twins.model.blocks[1].unused.weight.grad is None


@ranks(2)
@pytest.mark.parametrize("where", [0, 1])
def test_parameters_that_one_rank_used_get_its_share(rank, world, where):
    def build():
        model = Net()
        model.extra = nn.Parameter(torch.ones(3))
        model.forward = _with_extra(model)
        return model

    Twins(rank, world, build, policy={Block}).train(
        lambda m, r, s: (m(data(10 * s + r, 4, 5), r == where) ** 2).mean(), 3
    )


def _with_extra(model):
    return lambda x, on: Net.forward(model, x) + (model.extra.sum() if on else 0.0)


# ----------------------------------------------------------------------------------------------------- odd parameters


class Odd(nn.Module):
    """One parameter of any shape and dtype."""

    def __init__(self, make):
        super().__init__()
        self.w, self.lin = nn.Parameter(make()), nn.Linear(5, 5)

    def forward(self, x):
        w = self.w.abs() if self.w.is_complex() else self.w
        w = w.double().pow(2)
        return self.lin(x) * (1 + (w.sum() / max(w.numel(), 1)).to(x.dtype))


ODD = {
    "scalar": lambda: torch.tensor(0.3),
    "one": lambda: torch.ones(1) * 0.3,
    "tiny": lambda: torch.full((3,), 0.2),
    "1x1x1": lambda: torch.full((1, 1, 1), 0.2),
    "empty": lambda: torch.zeros(0),
    "empty 2-d": lambda: torch.zeros(0, 4),
    "empty last": lambda: torch.zeros(3, 0),
    "transposed": lambda: torch.randn(4, 6).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "strided": lambda: torch.randn(8, 6)[::2, ::3],
    "expanded": lambda: torch.randn(1, 6).expand(4, 6).clone(),
    "channels last": lambda: torch.randn(3, 4, 3, 2).to(memory_format=torch.channels_last),
    "channels last 3-d": lambda: torch.randn(2, 3, 2, 3, 2).to(memory_format=torch.channels_last_3d),
    "float64": lambda: torch.randn(7, 3, dtype=torch.float64) * 0.2,
    "complex64": lambda: torch.randn(7, 3, dtype=torch.complex64) * 0.2,
    "complex128": lambda: torch.randn(7, dtype=torch.complex128) * 0.2,
    "complex scalar": lambda: torch.randn((), dtype=torch.complex64) * 0.2,
    "five dims": lambda: torch.randn(2, 1, 3, 1, 2) * 0.2,
    "odd rows": lambda: torch.randn(3, 17) * 0.1,
}


@ranks(2, 4)
@pytest.mark.parametrize("kind", ODD)
def test_parameters_of_any_shape_and_dtype_train(rank, world, kind):
    for strategy in ("full", "zero2") if world == 2 else ("full",):
        twins = Twins(
            rank, world, lambda: nn.Sequential(Odd(ODD[kind]), Odd(ODD[kind])), policy={Odd}, sharding_strategy=strategy
        )
        twins.train(square_loss, 3)
        state = shardkit.full_state_dict(twins.model)
        for name, value in twins.ref.state_dict().items():
            assert state[name].shape == value.shape and state[name].dtype == value.dtype


@ranks(2)
@pytest.mark.parametrize("optim", ["adam", "adamw fused", "adagrad", "rmsprop"])
def test_odd_parameters_under_other_optimizers(rank, world, optim):
    make = {
        "adam": adam,
        "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
        "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
        "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    }[optim]
    kinds = ["scalar", "one", "tiny", "empty", "empty 2-d", "transposed", "odd rows", "channels last"]
    twins = Twins(rank, world, lambda: nn.Sequential(*(Odd(ODD[k]) for k in kinds)), policy={Odd}, optim=make)
    twins.train(lambda m, r, s: m(data(10 * s + r, 4, 5)).tanh().mean() * 100, 3, rtol=2e-5)


class Dtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.low, self.high = nn.LayerNorm(5), nn.Linear(5, 5).bfloat16(), nn.Linear(5, 5).double()
        self.coarse = nn.Parameter(torch.ones(5, dtype=torch.float16))
        self.table = nn.Parameter(torch.tensor([2, 0, 1, 4, 3]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, True]), requires_grad=False)
        self.byte = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.short = nn.Parameter(torch.arange(3, dtype=torch.int16), requires_grad=False)

    def forward(self, x):
        x = self.norm(x)[:, self.table] * self.mask + self.byte[1].float() * 0.1 + self.short[1] * 0.1
        return x + self.high(x.double()).float() + self.low(x.bfloat16()).float() + x * self.coarse.float()


@ranks(2, 4)
@pytest.mark.parametrize("strategy", [*KEEPING, "none", "zero1"])
def test_many_dtypes_in_one_unit(rank, world, strategy):
    """rtol: the 16-bit parts round on both sides alike, but their gradients are rounded before or after the mean over
    ranks, which moves a bfloat16 weight by up to 2^-8 of itself and the next loss with it. Losses are compared by their
    gradients."""
    twins = Twins(
        rank,
        world,
        lambda: nn.Sequential(Dtypes(), Dtypes(), nn.Linear(5, 2)),
        policy={Dtypes},
        sharding_strategy=strategy,
    )
    twins.train(lambda m, r, s: square_loss(m, r, s).log1p(), 1, rtol=2e-2)
    state, want = shardkit.full_state_dict(twins.model), twins.ref.state_dict()
    for name in want:
        assert state[name].dtype == want[name].dtype
        if not want[name].is_floating_point():
            assert torch.equal(state[name], want[name])


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(5, 5) * 0.3, torch.randn(5), torch.tensor(0.5)])
        self.dict = nn.ParameterDict(
            {"a": torch.randn(5, 5) * 0.3, "b": nn.Parameter(torch.randn(3), requires_grad=False)}
        )
        self.nested = nn.ModuleDict({"x": nn.ParameterList([torch.randn(5)]), "y": nn.Linear(5, 5)})

    def forward(self, x):
        x = x @ self.list[0] + self.list[1] * self.list[2]
        for p in self.nested["x"]:
            x = x + p
        for name, p in self.dict.items():
            x = x @ p if name == "a" else x + p.sum()
        return self.nested["y"](x)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("policy", ["auto", {Lists}, None])
def test_parameter_lists_and_dicts(rank, world, strategy, policy):
    Twins(
        rank, world, lambda: nn.Sequential(Lists(), Lists(), nn.Linear(5, 2)), policy=policy, sharding_strategy=strategy
    ).train(square_loss, 3)


# ------------------------------------------------------------------------------------------------------- odd outputs


@dataclasses.dataclass
class Record:
    h: dict
    extra: list
    none: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    y: torch.Tensor


class Slots:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


class Custom:
    def __init__(self, y):
        self.hidden = [[{"y": y}]]


class Lazy:
    """Hides the tensor in a closure: no walk over the output finds it."""

    def __init__(self, y):
        self.get = lambda: y


Named = collections.namedtuple("Named", "y n")

OUTPUTS = {
    "dict": (lambda y: {"y": y, "n": 3}, lambda o: o["y"]),
    "nested": (lambda y: [({"a": [y]}, 1)], lambda o: o[0][0]["a"][0]),
    "dataclass": (lambda y: Record({"y": y}, [y.mean(), 3]), lambda o: o.h["y"] + o.extra[0]),
    "frozen": (Frozen, lambda o: o.y),
    "slots": (Slots, lambda o: o.y),
    "custom": (Custom, lambda o: o.hidden[0][0]["y"]),
    "closure": (Lazy, lambda o: o.get()),
    "namedtuple": (lambda y: Named(y, 1), lambda o: o.y),
    "ordered dict": (lambda y: collections.OrderedDict(y=y), lambda o: o["y"]),
    "view": (lambda y: y.unsqueeze(1).squeeze(1), lambda o: o),
    "chunk": (lambda y: y.chunk(2, 0), lambda o: torch.cat(o)),
    "generator": (lambda y: iter([y]), lambda o: next(o)),
    "input too": (lambda y: (y, None, y), lambda o: o[0] * 0.5 + o[2] * 0.5),
    "detached too": (lambda y: (y.detach(), y), lambda o: o[0] * 0.1 + o[1]),
}


class Out(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, x):
        return OUTPUTS[self.kind][0](self.block(x))


class OutNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.u, self.out, self.kind = nn.ModuleList(Out(kind) for _ in range(3)), nn.Linear(5, 2), kind

    def forward(self, x):
        for u in self.u:
            x = OUTPUTS[self.kind][1](u(x))
        return self.out(x)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
@pytest.mark.parametrize("kind", OUTPUTS)
def test_units_may_return_anything(rank, world, kind, strategy):
    Twins(rank, world, lambda: OutNet(kind), policy={Out}, sharding_strategy=strategy).train(square_loss, 3)


class InPlace(nn.Module):
    """The caller changes the output (a view, or not) in place."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.u, self.out = kind, nn.ModuleList(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 2)

    def forward(self, x):
        for u in self.u:
            y = u(x)
            if self.kind == "add":
                y += x
            elif self.kind == "view":
                y = y.view(2, 2, 5)
                y[0].mul_(2)
                y = y.view(4, 5)
            elif self.kind == "chunks":
                a, b = y[:2], y[2:]
                a.add_(b * 2)
            elif self.kind == "relu":
                y = F.relu_(y)
            elif self.kind == "copy":
                y[:, 0] = x[:, 1]
            x = y
        return self.out(x)


@ranks(2)
@pytest.mark.parametrize("kind", ["add", "view", "chunks", "relu", "copy"])
def test_outputs_may_be_changed_in_place(rank, world, kind):
    for strategy in KEEPING:
        Twins(rank, world, lambda: InPlace(kind), policy={nn.Linear}, sharding_strategy=strategy).train(square_loss, 3)


class WeightOut(nn.Module):
    """A unit that returns (a function of) its own weight, used outside."""

    def __init__(self, kind):
        super().__init__()
        self.lin, self.kind = nn.Linear(5, 5), kind

    def forward(self, x):
        w = self.lin.weight
        return self.lin(x), {"weight": w, "view": w.t(), "function": w * 2, "row": w[1]}[self.kind]


class WeightNet(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.u, self.out = nn.ModuleList(WeightOut(kind) for _ in range(2)), nn.Linear(5, 2)

    def forward(self, x):
        for u in self.u:
            x, w = u(x)
            x = x.tanh() * (1 + w.pow(2).sum())
            x = x @ w if w.dim() == 2 else x + w
        return self.out(x)


@ranks(2)
@pytest.mark.parametrize("kind", ["weight", "view", "function", "row"])
def test_a_unit_may_return_its_weights(rank, world, kind):
    for strategy in KEEPING:
        twins = Twins(rank, world, lambda: WeightNet(kind), policy={WeightOut}, sharding_strategy=strategy)
        twins.train(lambda m, r, s: m(data(10 * s + r, 4, 5)).tanh().mean(), 3)


# ----------------------------------------------------------------------------------------- weights changed in forward


def _spectral(kind):
    def build():
        net = Net(blocks=2)
        for block in net.blocks:
            if kind == "old spectral":
                torch.nn.utils.spectral_norm(block.up)
            elif kind == "spectral":
                parametrizations.spectral_norm(block.up)
            elif kind == "old weight":
                torch.nn.utils.weight_norm(block.up)
            elif kind == "weight":
                parametrizations.weight_norm(block.up)
            elif kind == "orthogonal":
                parametrizations.orthogonal(block.down)
            elif kind == "pruned":
                prune.l1_unstructured(block.up, "weight", amount=0.4)
            elif kind == "random pruned":
                prune.random_structured(block.down, "weight", amount=2, dim=1)
            elif kind == "custom":
                parametrize.register_parametrization(block.up, "weight", Symmetric())
        return net

    return build


class Symmetric(nn.Module):
    def forward(self, w):
        return w.tanh() + 0.1 * w


@ranks(2)
@pytest.mark.parametrize(
    "kind", ["old spectral", "spectral", "old weight", "weight", "orthogonal", "pruned", "random pruned", "custom"]
)
@pytest.mark.parametrize("policy", [{Block}, {nn.Linear}])
def test_normed_parametrized_and_pruned_weights(rank, world, kind, policy):
    """Power iterations and matrix factorisations amplify rounding, alike on every rank: 10 times the tolerance."""
    for strategy in ("full", "zero2"):
        twins = Twins(rank, world, _spectral(kind), policy=policy, sharding_strategy=strategy)
        # spectral norm takes a power iteration per forward, and the twin runs forward once a rank: buffers are set
        # alike
        for _ in range(3):
            buffers = {n: b.clone() for n, b in twins.model.named_buffers()}
            twins.zero()
            square_loss(twins.model, rank, twins.steps).backward()
            for r in range(world):
                with torch.no_grad():
                    for n, b in twins.ref.named_buffers():
                        b.copy_(buffers[n])
                (square_loss(twins.ref, r, twins.steps) / world).backward()
            twins.check_grads(rtol=1e-5)
            compare("buffer", dict(twins.model.named_buffers()), dict(twins.ref.named_buffers()), 1e-5)
            twins.update()
        twins.check_weights(rtol=5e-5)
        assert list(twins.model.state_dict()) == list(twins.ref.state_dict())


class MaxNorm(nn.Module):
    def __init__(self, kind):
        super().__init__()
        make = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.emb, self.out, self.kind = make(11, 5, max_norm=0.5), nn.Linear(5, 2), kind

    def forward(self, i):
        return self.out(self.emb(i.flatten().view(2, -1) if self.kind == "bag" else i))


@ranks(2)
@pytest.mark.parametrize("kind", ["embedding", "bag"])
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
@pytest.mark.parametrize("policy", [{nn.Embedding, nn.EmbeddingBag}, None])
def test_max_norm_embeddings_keep_the_rows_they_rescaled(rank, world, strategy, kind, policy):
    """The same ids on every rank: what rows other ranks rescale is not defined."""
    twins = Twins(rank, world, lambda: MaxNorm(kind), policy=policy, sharding_strategy=strategy)
    for _ in range(3):
        twins.train(lambda m, r, s: (m(torch.tensor([1, 4, 9, 4]) + s % 2) ** 2).mean() * (r + 1), 1)


class Writes(nn.Module):
    """Clamps its weight under no_grad in every forward, as Wasserstein critics and ternary nets do."""

    def __init__(self, how):
        super().__init__()
        self.lin, self.how = nn.Linear(5, 5), how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "clamp":
                self.lin.weight.clamp_(-0.2, 0.2)
            elif self.how == "data":
                self.lin.weight.data.clamp_(-0.2, 0.2)
            elif self.how == "data assigned":  # braindecode's and EEGNet's layers with a weight constraint
                self.lin.weight.data = torch.renorm(self.lin.weight.data, p=2, dim=0, maxnorm=0.3)
            elif self.how == "row":
                self.lin.weight[1].mul_(0.5)
            elif self.how == "normalize":
                self.lin.weight.copy_(F.normalize(self.lin.weight, dim=1))
        return self.lin(x)


@ranks(2)
@pytest.mark.parametrize("how", ["clamp", "data", "data assigned", "row", "normalize"])
def test_weights_written_in_forward_are_kept(rank, world, how):
    """ "row" halves at every forward; the twin runs one per rank, so it is given one rank's worth of halvings."""
    for strategy in [*KEEPING, "none"]:
        twins = Twins(
            rank,
            world,
            lambda: nn.Sequential(Writes(how), Writes(how), nn.Linear(5, 2)),
            policy={Writes},
            sharding_strategy=strategy,
        )
        for _ in range(3):
            twins.zero()
            square_loss(twins.model, rank, twins.steps).backward()
            before = params(twins.ref)
            for r in range(world):
                with torch.no_grad():
                    for n, p in twins.ref.named_parameters():
                        p.copy_(before[n])
                (square_loss(twins.ref, r, twins.steps) / world).backward()
            twins.check_grads()
            twins.update()
        twins.check_weights()


# ------------------------------------------------------------------------------------------------ kinds of modules


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        make = {
            "lstm": lambda: nn.LSTM(5, 4, num_layers=2, batch_first=True),
            "bidirectional": lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True),
            "projected": lambda: nn.LSTM(5, 4, proj_size=3, bidirectional=True, batch_first=True),
            "gru": lambda: nn.GRU(5, 4, batch_first=True, bias=False),
            "rnn": lambda: nn.RNN(5, 4, num_layers=2, nonlinearity="relu", batch_first=True),
        }[kind]
        self.rnn = make()
        self.rnn2 = make()
        width = 3 * 2 if kind == "projected" else 8 if kind == "bidirectional" else 4
        self.back, self.out = nn.Linear(width, 5), nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.rnn2(self.back(self.rnn(x)[0]))[0])


RECURRENT = ["lstm", "bidirectional", "projected", "gru", "rnn"]


@ranks(2)
@pytest.mark.parametrize("policy", [{nn.LSTM, nn.GRU, nn.RNN}, None])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_networks(rank, world, kind, policy):
    for strategy in ("full", "zero2"):
        twins = Twins(rank, world, lambda: Recurrent(kind), policy=policy, sharding_strategy=strategy)
        for _ in range(3):
            twins.train(lambda m, r, s: (m(data(10 * s + r, 3, 6, 5)) ** 2).mean(), 1)
            twins.check_output(data(9, 2, 4, 5))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.gru, self.out = nn.LSTMCell(5, 5), nn.GRUCell(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        h = c = g = torch.zeros_like(x)
        for _ in range(3):  # the same unit many times in one forward
            h, c = self.cell(x, (h, c))
            g = self.gru(h, g)
        return self.out(g)


@ranks(2)
def test_recurrent_cells_called_many_times(rank, world):
    for strategy in KEEPING:
        Twins(rank, world, Cells, policy={nn.LSTMCell, nn.GRUCell}, sharding_strategy=strategy).train(square_loss, 3)


class Sparse(nn.Module):
    def __init__(self, bag):
        super().__init__()
        self.emb = nn.EmbeddingBag(11, 5, sparse=True) if bag else nn.Embedding(11, 5, sparse=True, padding_idx=0)
        self.emb2, self.block, self.out = nn.Embedding(11, 5, scale_grad_by_freq=True), Block(), nn.Linear(5, 2)

    def forward(self, i):
        h = self.emb(i)
        return self.out(self.block(h + (self.emb2(i).mean(1) if h.dim() == 2 else self.emb2(i))))


@ranks(2)
@pytest.mark.parametrize("bag", [True, False])
@pytest.mark.parametrize("policy", [{nn.Embedding, nn.EmbeddingBag, Block}, None])
def test_sparse_gradients_are_densified(rank, world, bag, policy):
    def train(twins):
        for _ in range(3):
            twins.zero()
            twins.backward(lambda m, r, s: (m(ids(10 * s + r, 11, 4, 3)) ** 2).mean())
            twins.check_grads()
            for p in twins.ref.parameters():
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
            twins.update()
        twins.check_weights()

    train(Twins(rank, world, lambda: Sparse(bag), policy=policy, optim=lambda ps: torch.optim.SGD(ps, 0.1)))


@ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 3, "vdim": 4}, {"bias": False}, {"add_bias_kv": True}, {"batch_first": True}]
)
@pytest.mark.parametrize("policy", [{nn.MultiheadAttention}, {nn.Linear}])
def test_multihead_attention(rank, world, options, policy):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.att, self.lin = nn.MultiheadAttention(6, 2, **options), nn.Linear(6, 6)

        def forward(self, x, k, v):
            return x + self.att(self.lin(x), k, v)[0]

    def loss(m, r, s):
        k, v = data(50 + s + r, 3, 4, options.get("kdim", 6)), data(70 + s + r, 3, 4, options.get("vdim", 6))
        return (m(data(10 * s + r, 3, 4, 6), k, v) ** 2).mean()

    twins = Twins(rank, world, Attention, policy=policy)
    twins.train(loss, 3)
    twins.model.eval(), twins.ref.eval()
    twins.check_output(data(1, 3, 4, 6), data(2, 3, 4, options.get("kdim", 6)), data(3, 3, 4, options.get("vdim", 6)))


@ranks(2)
@pytest.mark.parametrize("policy", [{nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}, "auto", None])
def test_an_encoder_decoder_of_torch(rank, world, policy):
    def build():
        return nn.Transformer(6, 2, 2, 2, 9, dropout=0.0, batch_first=True)

    twins = Twins(rank, world, build, policy=policy)
    for _ in range(2):
        twins.model.train(), twins.ref.train()
        twins.train(lambda m, r, s: (m(data(10 * s + r, 2, 4, 6), data(50 + s + r, 2, 3, 6)) ** 2).mean(), 1, rtol=3e-6)
        twins.model.eval(), twins.ref.eval()
        twins.check_output(data(5, 2, 4, 6), data(6, 2, 3, 6), rtol=2e-5)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(2)
        ))  # fmt: skip
        self.depth, self.out = nn.Conv2d(3, 6, 3, groups=3), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.depth(self.stages(x)).mean((2, 3)))


@ranks(2)
@pytest.mark.parametrize("policy", ["auto", {nn.Sequential}, {nn.Conv2d, nn.BatchNorm2d}, None])
@pytest.mark.parametrize("channels_last", [True, False])
def test_convolutions_and_batch_norm(rank, world, policy, channels_last):
    """Statistics are each rank's own; those of the twin after its forward of this rank's batch are compared."""
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    twins = Twins(rank, world, lambda: Conv().to(memory_format=fmt), policy=policy)
    for s in range(3):
        twins.zero()
        before = {n: b.clone() for n, b in twins.model.named_buffers()}
        ((twins.model(data(10 * s + rank, 4, 3, 6, 6).to(memory_format=fmt)) ** 2).mean()).backward()
        for r in [*(r for r in range(world) if r != rank), rank]:
            with torch.no_grad():
                for n, b in twins.ref.named_buffers():
                    b.copy_(before[n])
            ((twins.ref(data(10 * s + r, 4, 3, 6, 6).to(memory_format=fmt)) ** 2).mean() / world).backward()
        twins.check_grads(rtol=5e-6)
        compare("statistics", dict(twins.model.named_buffers()), dict(twins.ref.named_buffers()), rtol=1e-5)
        twins.update()


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_two_roots_of_a_gan(rank, world, strategy):
    gan = [Twins(rank, world, lambda: Net(out=5), seed=k, policy={Block}, sharding_strategy=strategy) for k in (0, 1)]
    generator, critic = gan
    for s in range(4):
        for t in gan:
            t.zero()
        fake = lambda side, r, s=s: getattr(generator, side)(data(10 * s + r, 4, 5))  # noqa: E731
        score = lambda side, x: getattr(critic, side)(x).tanh().mean()  # noqa: E731
        (score("model", fake("model", rank).detach()) - score("model", data(70 + s + rank, 4, 5))).backward()
        for r in range(world):
            ((score("ref", fake("ref", r).detach()) - score("ref", data(70 + s + r, 4, 5))) / world).backward()
        critic.check_grads()
        critic.update(), critic.zero()
        if s % 2:  # toggled, or simply left to collect gradients that the next zero() drops
            critic.model.requires_grad_(False), critic.ref.requires_grad_(False)
        (-score("model", fake("model", rank))).backward()
        for r in range(world):
            (-score("ref", fake("ref", r)) / world).backward()
        generator.check_grads(), critic.check_grads()
        generator.update(), generator.check_weights(), critic.check_weights()
        critic.model.requires_grad_(True), critic.ref.requires_grad_(True)


# ------------------------------------------------------------------------------------------------- calling otherwise


class Methods(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec, self.scale = (
            nn.Sequential(Block(), Block()),
            nn.Linear(5, 5),
            nn.Parameter(torch.ones(5) * 2),
        )

    def encode(self, x):
        return self.enc(x) * self.scale

    def decode(self, z):
        return self.dec(z * self.scale)

    def forward(self, x):
        return self.decode(self.encode(x))


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_methods_named_in_forward_methods_find_full_parameters(rank, world, strategy):
    twins = Twins(
        rank, world, Methods, policy={Block}, forward_methods=("encode", "decode"), sharding_strategy=strategy
    )
    twins.train(lambda m, r, s: (m.decode(m.encode(data(10 * s + r, 4, 5))) ** 2).mean(), 3)
    twins.train(lambda m, r, s: (m.encode(data(10 * s + r, 4, 5)) ** 2).mean() + m(data(r, 4, 5)).mean(), 2)
    with torch.no_grad():
        compare("encoded", {"z": twins.model.encode(data(3, 2, 5))}, {"z": twins.ref.encode(data(3, 2, 5))}, 1e-5)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_submodules_called_directly_find_full_parameters_and_train(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    twins.train(square_loss, 1)
    twins.train(lambda m, r, s: (m.blocks[1](data(10 * s + r, 4, 5)) ** 2).mean(), 2)
    twins.train(lambda m, r, s: (m.head(m.inp(data(10 * s + r, 4, 5))) ** 2).mean(), 2)
    twins.train(lambda m, r, s: (m.blocks[0].up(data(10 * s + r, 4, 5)) ** 2).mean(), 2)
    twins.train(square_loss, 2)
    twins.train(lambda m, r, s: (m.blocks[1](m(data(10 * s + r, 4, 5)) @ torch.ones(3, 5)) ** 2).mean(), 2)


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_forward_of_a_unit_and_of_the_root_may_be_called_directly(rank, world, strategy):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.out = nn.ModuleList(Block() for _ in range(3)), nn.Linear(5, 2)

        def forward(self, x):
            for b in self.b:
                x = b.forward(x)
            return self.out.forward(x)

    twins = Twins(rank, world, Calls, policy={Block}, sharding_strategy=strategy)
    twins.train(square_loss, 2)
    twins.train(lambda m, r, s: (m.forward(data(10 * s + r, 4, 5)) ** 2).mean(), 2)


@ranks(2)
def test_forward_replaced_on_the_instance(rank, world):
    """What accelerate, Lightning and fairscale do: `model.forward = wrapper(model.forward)`, before or after
    wrapping."""

    def build():
        model = Net()
        forward = model.forward
        model.forward = lambda x: forward(x) * 2
        return model

    def late(model):
        model = shardkit.auto_wrap(model, policy={Block})
        forward, inner = model.forward, model.blocks[0].forward
        model.forward = lambda x: forward(x)
        model.blocks[0].forward = lambda x: inner(x)
        return model

    Twins(rank, world, build, policy={Block}).train(square_loss, 3)
    Twins(rank, world, build, wrap=late).train(square_loss, 3)


# ------------------------------------------------------------------------------------------------------- around it


@ranks(2, 4)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
def test_a_deep_copy_trains_on_its_own(rank, world, strategy):
    twins = Twins(rank, world, lambda: LM(tied=True), policy={Block}, sharding_strategy=strategy)
    twins.train(lm_loss, 2)
    model, ref = copy.deepcopy(twins.model), copy.deepcopy(twins.ref)
    assert model.head.weight is model.emb.weight
    before = full_params(twins.model)
    clone = Twins.__new__(Twins)
    clone.rank, clone.world, clone.model, clone.ref, clone.steps = rank, world, model, ref, 10
    clone.optim, clone.ref_optim = sgd(model.parameters()), sgd(ref.parameters())
    clone.train(lm_loss, 2)
    compare("original", full_params(twins.model), before, 0)
    twins.train(lm_loss, 2)


@ranks(2)
def test_a_deep_copy_of_one_unit_trains_on_its_own(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    twins.train(square_loss, 1)
    clone = Twins.__new__(Twins)
    clone.rank, clone.world, clone.steps = rank, world, 0
    clone.model, clone.ref = copy.deepcopy(twins.model.blocks[1]), copy.deepcopy(twins.ref.blocks[1])
    clone.optim, clone.ref_optim = sgd(clone.model.parameters()), sgd(clone.ref.parameters())
    before = full_params(twins.model)
    clone.train(square_loss, 2)
    compare("original", full_params(twins.model), before, 0)
    twins.train(square_loss, 2)


@ranks(2)
def test_a_model_with_gradients_is_copied_with_them(rank, world):
    twins = Twins(rank, world, Net, policy={Block})
    twins.backward(square_loss)
    twins.model, twins.ref = copy.deepcopy(twins.model), copy.deepcopy(twins.ref)
    twins.check_grads()
    twins.backward(square_loss)
    twins.check_grads()


@ranks(2)
@pytest.mark.parametrize("strategy", KEEPING)
def test_an_average_of_weights_follows(rank, world, strategy):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)

    def average(m):
        return torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    ema, ref = average(twins.model), average(twins.ref)
    for _ in range(3):
        twins.train(square_loss, 1)
        ema.update_parameters(twins.model), ref.update_parameters(twins.ref)
        with torch.no_grad():
            compare("average", {"y": ema(data(1, 2, 5))}, {"y": ref(data(1, 2, 5))}, 1e-5)
    compare("average", full_params(ema.module), params(ref.module), 1e-5)


@ranks(2)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "after", "before, in place", "after, in place"])
@pytest.mark.parametrize("strategy", ["full", "zero2"])
def test_compiled_blocks(rank, world, compiler, when, strategy):
    torch._dynamo.reset()

    def compiled(model):
        for i, block in enumerate(model.blocks):
            if "in place" in when:
                block.compile(backend=compiler)
            else:
                model.blocks[i] = torch.compile(block, backend=compiler)
        return model

    def wrap(model):
        if when.startswith("before"):
            return shardkit.auto_wrap(compiled(model), policy={Block}, sharding_strategy=strategy)
        return compiled(shardkit.auto_wrap(model, policy={Block}, sharding_strategy=strategy))

    twins = Twins(rank, world, lambda: Net(blocks=2), wrap=wrap)
    twins.check_weights = twins.check_grads = lambda *_, **__: None  # names have _orig_mod in them
    for _ in range(3):
        twins.train(square_loss, 1)
        got = {n.replace("_orig_mod.", ""): p for n, p in full_params(twins.model).items()}
        compare("weight", got, params(twins.ref), 5e-6)
        twins.check_output(data(3, 2, 5))


@ranks(2)
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
def test_an_optimizer_built_before_wrapping_trains(rank, world, strategy):
    kept = {}

    def wrap(model):
        kept["optim"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kept["params"] = list(model.parameters())
        return shardkit.auto_wrap(model, policy={Block}, sharding_strategy=strategy)

    twins = Twins(rank, world, Net, wrap=wrap)
    twins.optim = kept["optim"]
    twins.train(square_loss)
    assert all(a is b for a, b in zip(kept["params"], twins.model.parameters(), strict=True))


@ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("strategy", [*KEEPING, "none"])
def test_evaluation_between_steps_sees_todays_weights_and_disturbs_nothing(rank, world, strategy, mode):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)

    def evaluate(switch):
        if switch:
            twins.model.eval(), twins.ref.eval()
        with mode():
            got, want = twins.model(data(5, 2, 5)), twins.ref(data(5, 2, 5))
        compare("evaluation", {"y": got.clone()}, {"y": want.clone()}, 1e-5)
        twins.model.train(), twins.ref.train()

    evaluate(True)
    for s in range(4):
        twins.zero()
        if s % 2:  # between forward and backward
            loss = square_loss(twins.model, rank, twins.steps)
            evaluate(s == 1)
            loss.backward()
            twins.ref_backward(square_loss)
        else:
            twins.backward(square_loss)
        evaluate(s < 2)
        twins.check_grads()
        twins.update()
        evaluate(s < 2)
    twins.check_weights()


@ranks(2)
def test_a_model_wrapped_under_no_grad_trains(rank, world):
    def wrap(model):
        with torch.no_grad():
            return shardkit.auto_wrap(model, policy={Block})

    Twins(rank, world, Net, wrap=wrap).train(square_loss, 2)


@ranks(2)
def test_many_models_can_live_and_die(rank, world):
    for k in range(12):
        twins = Twins(rank, world, lambda k=k: Net(blocks=1 + k % 3), policy={Block}, seed=k).train(square_loss, 1)
        if k % 3 == 0:
            keep = twins
    keep.train(square_loss, 1)


@ranks(2)
def test_modules_may_be_unused_and_empty(rank, world):
    def build():
        model = Net()
        model.nothing, model.identity, model.no_params = nn.ModuleList(), nn.Identity(), nn.Dropout(0.1)
        model.blocks[1].nothing = nn.Sequential()
        return model

    Twins(rank, world, build, policy={Block, nn.Identity, nn.Dropout, nn.Sequential}).train(square_loss, 2)


@ranks(2)
def test_a_model_without_any_parameter_runs(rank, world):
    model = shardkit.auto_wrap(nn.Sequential(nn.ReLU(), nn.Flatten()))
    x = data(rank, 2, 5).requires_grad_()
    model(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())
    assert shardkit.full_state_dict(model) == {} if list(model.modules()) else True


@ranks(2)
def test_the_class_keeps_its_name_and_attributes(rank, world):
    model = seeded(lambda: Methods())
    model.note = {"a": 1}
    wrapped = shardkit.auto_wrap(model, policy={Block})
    assert wrapped is model and type(model).__name__ == "Methods" and type(model).__qualname__ == Methods.__qualname__
    assert isinstance(model, Methods) and isinstance(model, shardkit.FullyShardedDataParallel)
    assert model.note == {"a": 1} and not hasattr(model, "module")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Methods().named_parameters()]
    assert "Methods(" in repr(model)
    assert grads(model)["scale"] is None


@ranks(2)
@pytest.mark.parametrize("strategy", ["full", "zero1", "zero2"])
def test_a_target_network_that_follows_another_through_data_computes_with_its_new_weights(rank, world, strategy):
    """As in reinforcement learning, and TRL's `sync_ref_model`: the target never has gradients, nor an optimizer."""

    def run(wrap):
        online, target = wrap(seeded(Net)), wrap(seeded(Net, seed=1))
        optimizer = torch.optim.AdamW(online.parameters(), lr=1e-2, fused=True)
        out = []
        for step in range(3):
            with torch.no_grad():
                goal = target(data(step, 4, 5))
            out.append(goal.clone())
            F.mse_loss(online(data(step, 4, 5)), goal).backward()
            optimizer.step()
            optimizer.zero_grad()
            for mine, theirs in zip(target.parameters(), online.parameters()):
                mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
        return {"goals": torch.stack(out)}

    def wrap(model):
        return shardkit.auto_wrap(model, policy={Block}, sharding_strategy=strategy)

    compare("goals", run(wrap), run(lambda model: model))
