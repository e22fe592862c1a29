"""checkpoint_wrapper on plain modules, in one process: gradients equal those without it, for both kinds.

Equality is exact where nothing is summed in another order: a recomputation runs the same operators on the same values.
"""

import copy
import dataclasses
import gc
import pickle
import weakref
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy

from shardkit import ActivationCheckpointing, ActivationOffload, ConfigError, checkpoint_wrapper
from shardkit.activation import Checkpointed, choose_blocks
from shardkit.runtime import saved_offload
from shardkit.runtime.saved_offload import to_host
from shardkit.wrap import find_units
from tests.oracle import LM, Block, Net

both_kinds = pytest.mark.parametrize("reentrant", [True, False])
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict
    count: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    hidden: torch.Tensor


class Custom:
    def __init__(self, hidden):
        self.hidden = hidden
        self.label = "kept"


class Counted(nn.Module):
    """Counts its runs."""

    def __init__(self, body):
        super().__init__()
        self.body, self.runs = body, 0

    def forward(self, *args, **kwargs):
        self.runs += 1
        return self.body(*args, **kwargs)


class Structured(nn.Module):
    """Returns what `make` makes of its result."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(torch.tanh(self.linear(x)))


def _grads(module):
    return [p.grad for p in module.parameters()]


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _trained(module, loss, **options):
    """(loss, gradients) of `loss(module)`, plain and under a checkpoint; and the checkpointed module."""
    plain, wrapped = copy.deepcopy(module), checkpoint_wrapper(copy.deepcopy(module), **options)
    results = []
    for m in (plain, wrapped):
        torch.manual_seed(1)
        value = loss(m)
        value.backward()
        results.append([value.detach(), *_grads(m)])
    return *results, wrapped


# ------------------------------------------------------------------------------------------------- what is computed


@both_kinds
@pytest.mark.parametrize("offload", [True, False])
def test_gradients_equal_those_without_and_dropout_draws_the_same_numbers(reentrant, offload):
    module = nn.Sequential(Block(dropout=0.5), Block(dropout=0.5))
    x = torch.randn(6, 5)
    options = dict(use_reentrant=reentrant, offload_to_cpu=offload)
    plain, got, wrapped = _trained(module, lambda m: m(x).square().sum(), **options)
    assert _same(plain, got) and isinstance(wrapped, Checkpointed)


@both_kinds
def test_without_preserved_rng_state_dropout_draws_other_numbers(reentrant):
    """So the test above would notice."""
    x = torch.randn(6, 5)
    options = dict(use_reentrant=reentrant, preserve_rng_state=False)
    plain, got, _ = _trained(Block(dropout=0.5), lambda m: m(x).square().sum(), **options)
    assert not _same(plain, got)


@both_kinds
def test_forward_runs_once_more_in_backward_and_not_without_grad(reentrant):
    module = checkpoint_wrapper(Counted(nn.Linear(3, 3)), use_reentrant=reentrant)
    module(torch.randn(2, 3)).sum().backward()
    assert module.runs == 2
    with torch.no_grad():
        assert not module(torch.randn(2, 3)).requires_grad
    with torch.inference_mode():
        module(torch.randn(2, 3))
    assert module.runs == 4
    module.eval()(torch.randn(2, 3)).sum().backward()
    assert module.runs == 6


@both_kinds
def test_keyword_arguments_and_nested_inputs_get_their_gradients(reentrant):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, scale=1, *, mask, parts, holder, frozen):
            return self.linear(x * mask) * scale + parts["a"][0] * holder.hidden + frozen.hidden + parts["b"].second

    def run(module):
        torch.manual_seed(2)
        leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(5)]
        x, a, b, h, f = (2 * t for t in leaves)
        parts = {"a": [a, x], "b": Pair(1, b)}
        out = module(x, 3, mask=torch.ones(3), parts=parts, holder=Custom(h), frozen=Slotted(f))
        out.square().sum().backward()
        return [t.grad for t in leaves]

    module = Takes()
    want = [*run(module), *_grads(module)]
    module.zero_grad()
    assert _same(want, [*run(checkpoint_wrapper(module, use_reentrant=reentrant)), *_grads(module)])


@both_kinds
@pytest.mark.parametrize(("make", "find"), [
    (lambda t: (t, 5, None), lambda o: o[0]),
    (lambda t: [t, [2 * t]], lambda o: o[1][0]),
    (lambda t: {"a": t, "b": {"c": t * t}}, lambda o: o["b"]["c"] + o["a"]),
    (lambda t: OrderedDict(z=t), lambda o: o["z"]),
    (lambda t: Pair(t, t), lambda o: o.first * o.second),
    (lambda t: Output(t, {"t": 2 * t, "n": 7}), lambda o: o.hidden * o.extra["t"]),
    (lambda t: Slotted(t), lambda o: o.hidden),
    (lambda t: Custom({"deep": [t]}), lambda o: o.hidden["deep"][0]),
    (lambda t: (t.argmax(-1), t), lambda o: o[1] * o[0][..., None]),
    (lambda t: (t, t.detach()), lambda o: o[0] * o[1].detach()),
], ids="tuple list dict ordered namedtuple dataclass slots object integers detached".split())  # fmt: skip
def test_outputs_keep_their_structure_and_gradients(reentrant, make, find):
    x = torch.randn(3, 4)
    module = Structured(make)
    plain, got, wrapped = _trained(module, lambda m: find(m(x)).square().sum(), use_reentrant=reentrant)
    assert _same(plain, got)
    assert type(wrapped(x)) is type(module(x))


@both_kinds
def test_an_output_of_transformers_stays_one(reentrant):
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.randn(3, 4)
    make = modeling_outputs.BaseModelOutput
    plain, got, wrapped = _trained(
        Structured(lambda t: make(last_hidden_state=t, hidden_states=(t, 2 * t))),
        lambda m: (m(x).last_hidden_state * m(x)["hidden_states"][1]).sum(), use_reentrant=reentrant,
    )  # fmt: skip
    assert _same(plain, got)
    out = wrapped(x)
    assert type(out) is make and out.last_hidden_state is out["last_hidden_state"] and out.attentions is None


@both_kinds
def test_a_module_without_tensors_in_or_out_can_be_called(reentrant):
    assert checkpoint_wrapper(Structured(lambda t: None), use_reentrant=reentrant)(torch.ones(1, 4)) is None

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return 2 * self.weight

    module = checkpoint_wrapper(Constant(), use_reentrant=reentrant)
    module().sum().backward()
    assert module.weight.grad.tolist() == [2, 2, 2]


@both_kinds
def test_outputs_require_grad_only_where_something_does(reentrant):
    module = checkpoint_wrapper(nn.Linear(3, 3).requires_grad_(False), use_reentrant=reentrant)
    assert not module(torch.randn(2, 3)).requires_grad
    x = torch.randn(2, 3, requires_grad=True)
    module(x).sum().backward()
    assert torch.equal(x.grad, module.weight.sum(0).expand(2, 3))


@both_kinds
@pytest.mark.parametrize("norm", [
    nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.InstanceNorm1d(4, track_running_stats=True),
    nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, track_running_stats=False),
], ids=["batch", "cumulative", "instance", "eval", "untracked"])  # fmt: skip
def test_running_statistics_are_updated_once_a_step(reentrant, norm):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(5, 5), copy.deepcopy(norm)

        def forward(self, x):
            return torch.tanh(self.norm(self.linear(x)))

    plain = Body()
    for inner in (False, True):
        wrapped = copy.deepcopy(plain)
        checkpoint_wrapper(wrapped.norm if inner else wrapped, use_reentrant=reentrant)
        mine = copy.deepcopy(plain)
        for _ in range(3):
            x = torch.randn(3, 4, 5)
            for m in (mine, wrapped):
                m(x).square().sum().backward()
        assert _same(mine.buffers(), wrapped.buffers()) and _same(_grads(mine), _grads(wrapped))


@both_kinds
def test_autocast_is_the_same_in_the_recomputation(reentrant):
    x = torch.randn(6, 5)

    def loss(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float().square().sum()

    plain, got, _ = _trained(Block(), loss, use_reentrant=reentrant)
    assert _same(plain, got)


def test_a_graph_that_is_kept_may_be_used_twice_and_in_part():
    module = checkpoint_wrapper(Counted(Block()))
    out = module(torch.randn(3, 5)).sum()
    out.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    out.backward(retain_graph=True)
    assert _same([2 * g for g in first], _grads(module)) and module.runs == 3
    got = torch.autograd.grad(out, list(module.parameters()))
    assert _same(first, got)


@both_kinds
def test_checkpoints_nest(reentrant):
    module = nn.Sequential(Block(dropout=0.5), Block(dropout=0.5))
    x = torch.randn(6, 5)

    def loss(m):
        for block in m:
            if isinstance(m, Checkpointed):
                checkpoint_wrapper(block, use_reentrant=reentrant)
        return m(x).square().sum()

    plain, got, _ = _trained(module, loss, use_reentrant=reentrant)
    assert _same(plain, got)


@both_kinds
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_model_breaks_its_graph_at_a_checkpoint(reentrant, compiler):
    module, x = nn.Sequential(nn.Linear(5, 5), Block(), Block()), torch.randn(3, 5)
    plain = copy.deepcopy(module)
    for block in module[1:]:
        checkpoint_wrapper(block, use_reentrant=reentrant)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=compiler)
    for m in (plain, compiled):
        for _ in range(2):
            m(x).square().sum().backward()
    assert all(torch.allclose(a, b) for a, b in zip(_grads(plain), _grads(module), strict=True))


def test_gradients_are_differentiable_through_a_checkpoint():
    def penalty(m):
        x = torch.ones(3, 5, requires_grad=True)
        (gradient,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    plain, got, _ = _trained(Block(), penalty)
    assert all(torch.allclose(a, b) for a, b in zip(plain, got, strict=True) if a is not None)


def test_an_input_changed_in_place_before_backward_is_reported():
    module = checkpoint_wrapper(Block())
    x = 1 * torch.randn(3, 5)
    out = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---------------------------------------------------------------------------------------------------- what it is


def test_the_module_stays_the_same_object_with_its_names():
    block = Block()
    names, doc = [n for n, _ in block.named_parameters()], type(block).__doc__
    assert checkpoint_wrapper(block) is block
    assert isinstance(block, Block) and type(block).__name__ == "Block" and type(block).__module__ == Block.__module__
    assert [n for n, _ in block.named_parameters()] == names == list(block.state_dict()) and type(block).__doc__ == doc
    before = type(block)
    assert type(checkpoint_wrapper(block, use_reentrant=True)) is before  # the second time changes the settings


@both_kinds
@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_checkpointed_and_use_their_own_weights(reentrant, clone):
    module = checkpoint_wrapper(Counted(nn.Linear(3, 3)), use_reentrant=reentrant)
    other = clone(module)
    assert type(other) is type(module) and isinstance(other, Checkpointed)
    if clone is not copy.copy:
        with torch.no_grad():
            other.body.weight.zero_()
        assert module.body.weight.abs().sum() > 0
    other(torch.randn(2, 3)).sum().backward()
    assert (other.runs, module.runs) == (2, 0)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_kept_operators_survive_a_pickle(protocol, tmp_path):
    module = checkpoint_wrapper(nn.Linear(3, 3), policy=[torch.ops.aten.addmm.default])
    other = pickle.loads(pickle.dumps(module, protocol))
    assert other.__dict__["_shardkit_checkpoint"] == module.__dict__["_shardkit_checkpoint"]
    torch.save(module, tmp_path / "module.pt")
    torch.load(tmp_path / "module.pt", weights_only=False)(torch.ones(1, 3)).sum().backward()


@both_kinds
def test_a_module_that_is_let_go_is_freed_at_once(reentrant):
    module = checkpoint_wrapper(Block(), use_reentrant=reentrant)
    module(torch.randn(2, 5)).sum().backward()
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------------------------------------------- selective


class Counts(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [
    [torch.ops.aten.addmm.default],
    lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default
    else CheckpointPolicy.PREFER_RECOMPUTE,
], ids=["operators", "function"])  # fmt: skip
def test_a_selective_checkpoint_keeps_what_the_policy_says(policy):
    x = torch.randn(6, 5)
    plain, got, wrapped = _trained(Block(), lambda m: m(x).square().sum(), policy=policy)
    assert _same(plain, got)
    loss = wrapped(x).square().sum()
    with Counts() as mode:
        loss.backward()
    assert torch.ops.aten.addmm.default not in mode.counts and torch.ops.aten.gelu.default in mode.counts


def test_a_selective_checkpoint_counts_running_statistics_once():
    module = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 5))
    x = torch.randn(6, 5)
    plain, got, wrapped = _trained(module, lambda m: m(x).square().sum(), policy=[torch.ops.aten.addmm.default])
    assert _same(plain, got) and wrapped[1].num_batches_tracked == 1


# ------------------------------------------------------------------------------------------------------ offload


@both_kinds
def test_offloaded_inputs_leave_the_device_and_come_back_equal(reentrant):
    first, second = Block(), checkpoint_wrapper(Block(), use_reentrant=reentrant, offload_to_cpu=True)
    x = first(torch.randn(6, 5))
    out = second(x)
    kept = weakref.ref(x)
    want = torch.autograd.grad(Block.forward(second, x).square().sum(), [*second.parameters()], retain_graph=True)
    del x
    assert kept() is None, "the device's copy of the input is still held"
    out.square().sum().backward()
    assert _same(want, _grads(second)) and first.up.weight.grad is not None


def _copies(monkeypatch):
    """A list that gets the number of elements of every copy to or from the host."""
    copies, copy_ = [], saved_offload._Lane.copy

    def counted(lane, to, source):
        copies.append(source.numel())
        return copy_(lane, to, source)

    monkeypatch.setattr(saved_offload._Lane, "copy", counted)
    return copies


def test_offload_copies_a_tensor_once_however_many_operators_save_it(monkeypatch):
    copies = _copies(monkeypatch)
    x = torch.randn(8, 8, requires_grad=True)
    y = 2 * x
    with to_host(None, ActivationOffload(min_bytes=0)):
        out = y.sin() + y.cos() + y.exp() * y
    assert len(copies) == 2  # y, and its exponential
    out.sum().backward()
    assert len(copies) == 4  # there and back
    y = y.detach()
    assert torch.allclose(x.grad, 2 * (y.cos() - y.sin() + y.exp() * (1 + y)))


def test_offload_keeps_each_version_of_a_tensor_that_changes_in_place():
    x = torch.randn(8, 8, requires_grad=True)
    y = 2 * x
    with to_host(None, ActivationOffload(min_bytes=0)):
        first = y.sin()
        second = y.add_(1).sin()
    (first + second).sum().backward()
    assert torch.allclose(x.grad, 2 * ((2 * x).cos() + (2 * x + 1).cos()))


def test_nothing_is_offloaded_that_a_recomputation_uses_at_once(monkeypatch):
    copies = _copies(monkeypatch)
    inner = checkpoint_wrapper(Block(), offload_to_cpu=True)
    outer = checkpoint_wrapper(nn.Sequential(nn.Linear(5, 5), inner), use_reentrant=True)
    outer(torch.randn(3, 5)).sum().backward()
    assert copies == []


def test_offload_leaves_parameters_and_small_tensors_on_the_device(monkeypatch):
    copies = _copies(monkeypatch)
    linear, frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    x = 2 * torch.randn(4, 8, requires_grad=True)
    with to_host(None, ActivationOffload(min_bytes=128)):
        out = frozen(linear(x).sin()).cos()[:1].tanh()
    assert out.requires_grad and copies == [32, 32, 32]  # elements; what linear, sin and cos got


@pytest.mark.parametrize("view", [
    lambda t: t, lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[2:5, 1:3], lambda t: t[:1].expand(8, 8),
], ids=["whole", "transposed", "strided", "slice", "expanded"])  # fmt: skip
def test_offload_brings_views_back_equal(view):
    x = torch.randn(8, 8)
    weight = torch.randn(view(x).shape, requires_grad=True)
    with to_host(None, ActivationOffload(min_bytes=0)):
        out = weight * view(x)
    want = view(x).clone()
    x.zero_()
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert torch.equal(weight.grad, 2 * want) or not view(x).stride(0)  # expanded: larger than its memory, so it stays


def test_offload_hands_everything_to_the_pair_that_was_active_before():
    seen = []

    def pack(t):
        seen.append("pack")
        return ("theirs", t)

    def unpack(packed):
        seen.append("unpack")
        return packed[1]

    x = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        with to_host(None, ActivationOffload(min_bytes=0)):
            out = (x * 2).sin()
    out.sum().backward()
    assert seen == ["pack", "unpack"] and torch.equal(x.grad, 2 * (x.detach() * 2).cos())


# ------------------------------------------------------------------------------------------------ which modules


def _chosen(model, where):
    names = {m: n for n, m in model.named_modules()}
    return [names[m] for m in choose_blocks(model, ActivationCheckpointing(where=where), find_units(model))]


def test_true_means_every_block_and_neither_embedding_nor_head():
    assert _chosen(LM(vocab=100, d=8, blocks=3, tied=False), True) == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(("fraction", "blocks"), [
    (1.0, [0, 1, 2, 3, 4, 5]), (1, [0, 1, 2, 3, 4, 5]), (0.5, [0, 2, 4]), (1 / 3, [0, 3]), (2 / 3, [0, 1, 3, 4]),
    (0.01, [0]),
])  # fmt: skip
def test_a_fraction_is_spread_evenly_and_leaves_the_last_block_out_first(fraction, blocks):
    assert _chosen(Net(blocks=6), fraction) == [f"blocks.{i}" for i in blocks]


def test_classes_and_predicates_choose_what_matches():
    model = Net(blocks=2)
    assert _chosen(model, {nn.LayerNorm}) == ["blocks.0.norm", "blocks.1.norm"]
    assert _chosen(model, lambda m: isinstance(m, Block)) == ["blocks.0", "blocks.1"]


def test_blocks_checkpointed_already_keep_their_settings():
    model = Net(blocks=4)
    for block in model.blocks[:2]:
        checkpoint_wrapper(block, use_reentrant=True)
    assert _chosen(model, True) == ["blocks.2", "blocks.3"]


@pytest.mark.parametrize(("body", "text"), [
    (lambda: checkpoint_wrapper(nn.Linear(1, 1), use_reentrant=True, policy=[torch.ops.aten.mm.default]), "policy="),
    (lambda: checkpoint_wrapper(nn.Linear(1, 1), policy=[torch.ops.aten.mm]), "mm.default"),
    (lambda: checkpoint_wrapper("module"), "nn.Module"),
    (lambda: ActivationCheckpointing(where=0.0), "fraction"),
    (lambda: ActivationCheckpointing(where=1.5), "fraction"),
    (lambda: ActivationCheckpointing(where=set()), "classes"),
    (lambda: ActivationCheckpointing(where=nn.Linear), "set of module classes"),
    (lambda: ActivationCheckpointing(where="auto"), "set of module classes"),
    (lambda: _chosen(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), True), "selects no module"),
    (lambda: _chosen(Net(), {nn.Conv1d}), "selects no module"),
    (lambda: choose_blocks(Net(), ActivationCheckpointing(where=0.5), None), "auto_wrap"),
])  # fmt: skip
def test_a_contradiction_is_refused_in_a_sentence(body, text):
    with pytest.raises(ConfigError, match=text):
        body()


def test_functional_calls_go_through_the_checkpoint():
    module = checkpoint_wrapper(Block())
    weights = {n: (2 * p).detach().requires_grad_() for n, p in module.named_parameters()}
    x = torch.randn(3, 5)
    out = torch.func.functional_call(module, weights, (x,))
    assert out.shape == x.shape and F.mse_loss(out, x).requires_grad
