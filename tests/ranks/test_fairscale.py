"""fairscale's FullyShardedDataParallel trains as a single process does: the behaviours that fairscale's own tests
assert, by the numbers of the list in its reference, and what it gets wrong."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from shardkit.integrations.fairscale import (
    OSS,
    ProcessGroupName,
    ShardedDataParallel,
    ShardedGradScaler,
    TrainingState,
    auto_wrap_bn,
    checkpoint_wrapper,
    get_fsdp_instances,
)
from shardkit.integrations.fairscale import FullyShardedDataParallel as FSDP
from tests.harness import ranks
from tests.oracle import (
    LM,
    Net,
    Twins,
    adam,
    compare,
    data,
    full_grads,
    grads,
    lm_loss,
    params,
    raises,
    seeded,
    sgd,
    square_loss,
)

FP16_RTOL = 5e-3  # a few of float16's half ulps (2 ** -12) of the largest element, added up over a model


def nested(model, **options):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(block, **options)
    return FSDP(model, **options)


def everything(model, **options):
    """Every module with parameters of its own, so that the root has none."""
    for child in list(model.children()):
        if isinstance(child, nn.Linear):
            FSDP(child, **options)
    return nested(model, **options)


def checkpointed(model, **options):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(checkpoint_wrapper(block, offload_to_cpu=i == 0), **options)
    return FSDP(model, **options)


# ------------------------------------------------------------------------------------------ 1, 2: training, dtypes


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("flatten", [True, False])
def test_training_equals_a_single_process_in_every_configuration(rank, world, reshard, flatten):
    options = {"reshard_after_forward": reshard, "flatten_parameters": flatten}
    for how in (nested, everything, checkpointed):
        Twins(rank, world, Net, wrap=lambda m, how=how: how(m, **options)).train(square_loss, 2)
    Twins(rank, world, LM, wrap=lambda m: nested(m, **options)).train(lm_loss, 2)


@ranks(2)
def test_reshard_after_forward_is_each_units_own(rank, world):
    model = Net()
    for i, block in enumerate(model.blocks):
        FSDP(block, reshard_after_forward=i != 0)
    model = FSDP(model)
    loss = square_loss(model, rank, 0)
    there = [model.blocks[i]._shardkit_unit.flats[0].buffer is not None for i in range(2)]
    assert there == [True, False]
    loss.backward()
    assert all(b._shardkit_unit.flats[0].buffer is None for b in model.blocks)


@ranks(2)
@pytest.mark.parametrize("fp32_reduce", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_computes_reduces_and_stores_in_its_dtypes(rank, world, dtype, fp32_reduce):
    seen = {}

    class Typed(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(5))

        def forward(self, x):
            seen.update(input=x.dtype, param=self.inp.weight.dtype, buffer=self.table.dtype)
            return super().forward(x * self.table)

    low = {"mixed_precision": True, "fp32_reduce_scatter": fp32_reduce}
    low["compute_dtype"] = None if dtype == torch.float16 else dtype  # the default is float16
    twins = Twins(rank, world, Typed, wrap=lambda m: nested(m, **low))
    loss = square_loss(twins.model, rank, 0)
    assert seen == {"input": dtype, "param": dtype, "buffer": dtype} and loss.dtype == dtype
    wire = {flat.reduce_dtype for flat in twins.model._shardkit_step.flats}
    assert wire == {torch.float32 if fp32_reduce else dtype}
    loss.backward()
    twins.ref_backward(square_loss)
    rtol = FP16_RTOL * (1 if dtype == torch.float16 else 16)
    compare("gradient", full_grads(twins.model), grads(twins.ref), rtol)
    assert {p.dtype for p in twins.model.parameters()} == {torch.float32}  # 18
    assert {v.dtype for v in twins.model.state_dict().values()} == {torch.float32}
    raises(ValueError, FSDP, Net(), None, ProcessGroupName.default, True, True, False, True)


@ranks(2)
def test_a_float16_model_stays_float16(rank, world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FSDP(seeded(Net).half(), compute_dtype=torch.float16)
    assert {v.dtype for v in model.state_dict().values()} == {torch.float16}
    assert model(data(0, 4, 5).half()).dtype == torch.float16


@ranks(2)
def test_bfloat16_modules_and_dataclass_outputs_work(rank, world):
    """fairscale casts inputs to float16 whatever compute_dtype is, and fails on outputs that are no containers."""
    import dataclasses

    @dataclasses.dataclass
    class Out:
        y: torch.Tensor

    class Wrapped(Net):
        def forward(self, x):
            return Out(super().forward(x))

    Twins(rank, world, Wrapped, wrap=nested).train(lambda m, r, s: (m(data(s + r, 4, 5)).y ** 2).mean(), 2)
    model = FSDP(seeded(Net).bfloat16(), mixed_precision=False)
    model(data(0, 4, 5).bfloat16()).sum().backward()


@ranks(2)
def test_offload_to_the_host_and_the_devices_arguments(rank, world):
    for options in ({"move_params_to_cpu": True}, {"cpu_offload": True}, {"compute_device": torch.device("cpu")}):
        Twins(rank, world, Net, wrap=lambda m, o=options: nested(m, **o)).train(square_loss, 2)
    model = nested(seeded(Net), state_dict_device=torch.device("cpu"), state_dict_on_rank_0_only=True)
    state = model.state_dict()  # 13
    assert (len(state) == 22) == (rank == 0) and bool(state) == (rank == 0)
    assert all(v.device.type == "cpu" for v in state.values())


@ranks(2)
def test_force_input_to_fp32_casts_float16_inputs(rank, world):
    seen = []
    model = FSDP(Net(), force_input_to_fp32=True)
    model.inp.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    model(data(0, 4, 5).half())
    assert seen == [torch.float32]


@ranks(2)
def test_arguments_without_effect_say_why_once(rank, world):
    from shardkit.integrations import _common

    _common._said.clear()
    options = {"bucket_cap_mb": 5, "clear_autocast_cache": True, "gradient_predivide_factor": 2.0}
    options |= {"disable_reshard_on_root": False, "move_grads_to_cpu": True}
    options |= {"process_group_reduce_scatter": dist.group.WORLD}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nested(Net(), **options)
        assert "bucket_cap_mb=5" not in repr(model)
        assert "bucket_cap_mb=5, " in repr(FSDP(nn.Linear(2, 2), verbose=True, **options))
        ShardedDataParallel(Net(), OSS(Net().parameters(), broadcast_fp16=True, lr=0.1))
    texts = [str(w.message) for w in caught]
    for word in [*options, "broadcast_fp16"]:
        assert sum(f"{word}" in text.split(" has no effect")[0] for text in texts) == 1, (word, texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nested(Net())


# ----------------------------------------------------------------------------------- 3 to 9: clipping, groups, ...


@ranks(2)
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_clipping_is_by_the_global_norm(rank, world, norm):
    twins = Twins(rank, world, Net, wrap=nested)
    twins.backward(square_loss)
    got = twins.model.clip_grad_norm_(0.05, norm)
    torch.testing.assert_close(got, nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.05, norm), rtol=1e-5, atol=0)
    twins.check_grads(5e-6)


class Experts(nn.Module):
    """A mixture of one expert a rank; `expert` differs between ranks."""

    def __init__(self, rank, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        torch.manual_seed(10 + rank)
        self.expert = wrap(nn.Linear(5, 5))

    def forward(self, x):
        return self.head(self.expert(self.shared(x)))


@ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_in_groups_of_one_rank_train_by_themselves(rank, world, checkpointing):
    """4, and 29: their optimizer state stays with its rank. 3: clipping by a norm over both is refused."""
    alone = [dist.new_group([r]) for r in range(world)][rank]

    def wrap(expert):
        return FSDP(checkpoint_wrapper(expert) if checkpointing else expert, process_group=alone)

    model = FSDP(Experts(rank, wrap))
    optim = adam(model.parameters())
    refs = [Experts(r, lambda m: m) for r in range(world)]
    ref_optims = [adam(ref.parameters()) for ref in refs]
    for step in range(2):
        square_loss(model, rank, step).backward()
        optim.step()
        model.zero_grad()
        for r, ref in enumerate(refs):
            square_loss(ref, r, step).backward()
        for name in ("shared", "head"):  # averaged over the ranks
            for a, b in zip(*(ref.get_submodule(name).parameters() for ref in refs), strict=True):
                a.grad = b.grad = (a.grad + b.grad) / 2
        for ref_optim, ref in zip(ref_optims, refs, strict=True):
            ref_optim.step()
            ref.zero_grad()
    compare("weights", dict(model.state_dict()), params(refs[rank]), 1e-5)
    square_loss(model, rank, 2).backward()
    raises(NotImplementedError, model.clip_grad_norm_, 1.0)
    whole = model.gather_full_optim_state_dict(optim)
    if rank == 0:
        assert len(whole["state"]) == 4 and sorted(whole["uncollected_local_ids"]) == [4, 5]
    before = copy.deepcopy(optim.state_dict())
    box = [whole]
    dist.broadcast_object_list(box)
    optim.load_state_dict(model.get_shard_from_optim_state_dict(box[0]))
    for i, values in before["state"].items():
        compare(f"state {i}", optim.state_dict()["state"][i], values, rtol=0)


@ranks(2)
def test_changes_after_wrapping_change_the_output(rank, world):
    """5; 6: apply; 7: reset_parameters by flag."""
    model, ref = FSDP(nn.Linear(5, 3), allow_reset_parameters=True), nn.Linear(5, 3)
    for p in model.parameters():
        p.data.mul_(2)
    before = model(data(0, 2, 5))
    model.weight.data.zero_()
    assert not torch.equal(model(data(0, 2, 5)), before)
    for fill in (lambda m: m.reset_parameters(), lambda m: m.apply(_ones)):
        torch.manual_seed(3)
        fill(model)
        torch.manual_seed(3)
        fill(ref)
        compare("weights", dict(model.state_dict()), params(ref), rtol=0)
    raises(RuntimeError, FSDP(nn.Linear(2, 2)).reset_parameters)


def _ones(module):
    if isinstance(module, nn.Linear):
        assert module.weight.dim() == 2
        nn.init.normal_(module.weight)


@ranks(2)
def test_a_pickled_model_trains_on(rank, world):
    """9. Two optimizer steps, a round trip, two more."""
    twins = Twins(rank, world, LM, wrap=lambda m: nested(m, reshard_after_forward=False)).train(lm_loss, 2)
    twins.model.blocks[0].up.weight.requires_grad_(False)
    twins.model = pickle.loads(pickle.dumps(twins.model))
    assert isinstance(twins.model.blocks[1], FSDP) and twins.model.head.weight is twins.model.emb.weight
    assert not twins.model.blocks[0].up.weight.requires_grad and isinstance(twins.model, LM)
    twins.ref.blocks[0].up.weight.requires_grad_(False)
    twins.optim, twins.ref_optim = sgd(twins.model.parameters()), sgd(twins.ref.parameters())
    twins.train(lm_loss, 2)


# --------------------------------------------------------------------------------- 10 to 17: hooks, names, batches


@ranks(2)
def test_evaluation_without_grad_equals_evaluation_with_it(rank, world):
    """11, 27: shapes are the same through train, eval, train, checkpoint inside and outside the unit."""
    for inside in (True, False):

        def build(m, inside=inside):
            block = m.blocks[0]
            m.blocks[0] = FSDP(checkpoint_wrapper(block)) if inside else checkpoint_wrapper(FSDP(block))
            return FSDP(m)

        twins = Twins(rank, world, Net, wrap=build)
        shapes = [p.shape for p in twins.model.parameters()]
        for mode in (True, False, True):
            twins.model.train(mode)
            twins.train(square_loss, 1)
            assert [p.shape for p in twins.model.parameters()] == shapes
            with torch.no_grad():
                out = twins.model(data(0, 2, 5))
            assert torch.equal(out, twins.model(data(0, 2, 5)))


@ranks(2)
def test_names_are_the_modules_own(rank, world):
    """12, also with flatten_parameters=True, which in fairscale loses them."""
    model = nested(seeded(Net))
    want = [name for name, _ in seeded(Net).named_parameters()]
    assert [name for name, _ in model.named_parameters()] == want == list(model.state_dict())
    with model.summon_full_params():
        assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in Net().named_parameters()}


@ranks(2)
def test_batches_are_accumulated_with_and_without_no_sync(rank, world):
    """14, 16, 17: also before the first forward, and three forwards before three backwards."""
    twins = Twins(rank, world, Net, wrap=nested)
    with twins.model.no_sync():
        twins.backward(square_loss)
    twins.backward(square_loss)
    twins.check_grads()
    twins.update()
    twins.zero()
    twins.backward(square_loss)
    twins.backward(square_loss)
    twins.check_grads()
    twins.update()
    twins.zero()
    with twins.model.no_sync():
        losses = [square_loss(twins.model, rank, s) for s in (4, 5)]
    losses.append(square_loss(twins.model, rank, 6))
    for loss in losses[:2]:
        with twins.model.no_sync():
            loss.backward()
    losses[2].backward()
    for twins.steps in (4, 5, 6):
        twins.ref_backward(square_loss)
    compare("gradient", full_grads(twins.model), grads(twins.ref), 1e-5)


@ranks(2)
def test_collectives_are_as_few_as_they_can_be(rank, world):
    """15: per step a gather of each unit in forward, of each but the first and the last in backward, and a reduction of
    each; inside no_sync no reductions."""
    model = nested(seeded(Net))
    counts = {"gather": 0, "reduce": 0}

    def counted(name, run):
        def call():
            counts[name] += 1
            return run()

        return call

    flats = model._shardkit_step.flats
    for flat in flats:
        flat.gather, flat.reduce = counted("gather", flat.gather), counted("reduce", flat.reduce)
    units = len(flats)
    assert units == 4
    square_loss(model, rank, 0).backward()  # the order of units is not known yet
    for held in (True, False):
        counts.update(gather=0, reduce=0)
        with model.no_sync() if held else contextlib.nullcontext():
            square_loss(model, rank, 1).backward()
        assert counts == {"gather": 2 * units - 2, "reduce": 0 if held else units}


@ranks(2)
def test_a_trained_unit_is_wrapped_again_by_a_new_root(rank, world):
    """23"""
    twins = Twins(rank, world, Net, wrap=nested).train(square_loss, 2)
    x = data(1, 3, 5)
    with torch.no_grad():
        before = twins.model(x)
        outer = FSDP(nn.Sequential(twins.model))
        assert torch.equal(outer(x), before)
    twins.optim = sgd(twins.model.parameters())
    twins.ref_optim = sgd(twins.ref.parameters())
    outer(data(0, 2, 5)).sum().backward()
    outer.zero_grad()
    for step in range(2):
        twins.zero()
        square_loss(outer, rank, step).backward()
        for r in range(world):
            (square_loss(twins.ref, r, step) / world).backward()
        twins.check_grads(1e-5)
        twins.update()


# ------------------------------------------------------------------------------ 20 to 27: shapes, inputs, freezing


@ranks(2)
def test_summoned_edits_stay_unless_volatile(rank, world):
    """20. An edit on one rank alone keeps that rank's part, as in fairscale."""
    model = nested(seeded(Net))
    with model.summon_full_params(), torch.no_grad():
        model.inp.weight.fill_(7.0)
        model.blocks[0].up.weight.fill_(8.0)
    with model.summon_full_params(volatile=True), torch.no_grad():
        model.inp.weight.fill_(9.0)
    state = model.state_dict()
    assert state["inp.weight"].eq(7.0).all() and state["blocks.0.up.weight"].eq(8.0).all()


@ranks(2, 4)
@pytest.mark.parametrize("out", [1, 2, 3, 7, 129])
def test_uneven_shards_train_exactly(rank, world, out):
    """21"""

    def build():
        return nn.Sequential(nn.Linear(5, out, bias=False), nn.Linear(out, 1))

    twins = Twins(rank, world, build, wrap=lambda m: FSDP(nn.Sequential(FSDP(m[0]), m[1])))
    twins.check_output(data(1, 3, 5))
    twins.train(square_loss, 1)


class Twice(nn.Module):
    """Runs its inner unit twice, and returns the inner result too."""

    def __init__(self, wrap=lambda m: m):
        super().__init__()
        self.inner, self.outer = wrap(nn.Linear(5, 5)), nn.Linear(5, 2)

    def forward(self, x):
        first = self.inner(x)
        second = self.inner(first)
        return self.outer(second), second


def twice_loss(model, rank, step):
    a, b = model(data(10 * step + rank, 4, 5))
    return (a**2).mean() + (b**2).mean()


@ranks(2)
def test_a_unit_runs_twice_and_its_output_is_also_returned(rank, world):
    """22"""

    def build(model):
        FSDP(model.inner)
        return FSDP(model)

    Twins(rank, world, Twice, wrap=build).train(twice_loss, 3)


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, inputs):
        x = inputs["x"] if isinstance(inputs, dict) else inputs[0]
        return self.a(x)


@ranks(2)
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_inputs_in_containers_get_their_gradients(rank, world, kind):
    """24"""
    model, ref = FSDP(seeded(Takes)), seeded(Takes)
    inputs = []
    for m in (model, ref):
        x = data(rank, 4, 5).requires_grad_()
        m({"x": x} if kind == "dict" else [x]).sum().backward()
        inputs.append(x.grad)
    torch.testing.assert_close(*inputs)


@ranks(2)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("part", ["inp", "blocks", "head"])
def test_frozen_parts_train_as_in_a_single_process(rank, world, before, part):
    """25: a frozen trunk, middle or root, frozen before or after wrapping; in one unit with trainable ones too."""

    def freeze(model):
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(part))
        return model

    for wrap in (nested, FSDP):
        twins = Twins(rank, world, lambda: freeze(Net()) if before else Net(), wrap=wrap)
        if not before:
            freeze(twins.model), freeze(twins.ref)
        twins.train(square_loss, 2)
        assert all(p.grad is None for n, p in twins.model.named_parameters() if n.startswith(part))


@ranks(2)
def test_unused_parameters_keep_no_gradient(rank, world):
    """In fairscale a unit that forward leaves out breaks the end of backward."""

    def build(m):
        FSDP(m.unused)
        return FSDP(m)

    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3)

    twins = Twins(rank, world, Unused, wrap=build).train(square_loss, 2)
    assert twins.model.unused.weight.grad is None


@ranks(2)
@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_siblings_share_a_parameter(rank, world, shared):
    """26: fairscale silently unties it unless append_shared_param is called and nothing is flattened."""

    class Siblings(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
            setattr(self.b, shared, getattr(self.a, shared))

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    def build(m):
        FSDP(m.a, flatten_parameters=False)
        FSDP(m.b)
        m.b.append_shared_param(getattr(m.a, shared))
        return FSDP(m)

    twins = Twins(rank, world, Siblings, wrap=build).train(square_loss, 3)
    assert getattr(twins.model.a, shared) is getattr(twins.model.b, shared)
    state = twins.model.state_dict()
    assert torch.equal(state[f"a.{shared}"], state[f"b.{shared}"])


# -------------------------------------------------------------------------------------------- 31, and the wrongs


@ranks(2)
def test_the_training_state_is_told_and_returns_to_idle(rank, world):
    """31. In fairscale it stays FORWARD after an exception, and even state_dict() fails."""
    model = nested(seeded(Net))
    seen = []
    handle = model.blocks[0].register_forward_hook(lambda m, a, out: seen.append(model.training_state))
    out = model(data(0, 2, 5))
    out.register_hook(lambda grad: seen.append(model.training_state))
    out.sum().backward()
    handle.remove()
    with model.summon_full_params():
        seen.append(model.training_state)
        raises(ValueError, model.assert_state, TrainingState.IDLE)
    model.assert_state([TrainingState.IDLE, TrainingState.FORWARD])
    assert seen[0] is TrainingState.FORWARD and seen[1].name.startswith("BACKWARD")
    assert seen[2] is TrainingState.SUMMON_FULL_PARAMS
    handle = model.blocks[1].register_forward_hook(lambda *a: 1 / 0)
    raises(ZeroDivisionError, model, data(0, 2, 5))
    handle.remove()
    assert model.training_state is TrainingState.IDLE
    model.state_dict()
    twins = Twins(rank, world, Net, wrap=nested)
    handle = twins.model.blocks[1].register_forward_hook(lambda *a: 1 / 0)
    raises(ZeroDivisionError, twins.model, data(0, 2, 5))
    handle.remove()
    twins.train(square_loss, 2)


@ranks(2)
def test_ranks_with_different_weights_are_refused_not_mixed(rank, world):
    torch.manual_seed(rank)
    raises(shardkit.PlanMismatchError, FSDP, Net())


@ranks(2)
def test_gradient_divide_factors_replace_the_number_of_ranks(rank, world):
    twins = Twins(rank, world, Net, wrap=nested)
    twins.model.set_gradient_divide_factors(1.0, 0.5, recursive=True)
    square_loss(twins.model, rank, 0).backward()
    for r in range(world):
        (square_loss(twins.ref, r, 0) / 0.5).backward()
    twins.check_grads()


@ranks(2)
@pytest.mark.parametrize("single", [False, True])
def test_batch_normalisations_become_units_of_their_own(rank, world, single):
    class Convolutional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv1d(1, 4, 2), nn.BatchNorm1d(4), nn.Linear(16, 3)

        def forward(self, x):
            return self.out(self.norm(self.conv(x[:, None])).flatten(1))

    def build(m):
        m = auto_wrap_bn(m, single_rank_pg=single)
        assert isinstance(m.norm, FSDP) and not isinstance(m.conv, FSDP)
        return FSDP(m)

    twins = Twins(rank, world, Convolutional, wrap=build)
    assert get_fsdp_instances(twins.model) == [twins.model, twins.model.norm]
    assert sum(p.numel() for p in twins.model.norm.parameters()) == (8 if single else 4)
    for _ in range(2):
        twins.zero()
        twins.backward(square_loss)
        for p in twins.model.norm.parameters():  # with single_rank_pg the whole of it is here, averaged
            assert p.grad is not None
        twins.check_grads()
        twins.update()
    low = FSDP(auto_wrap_bn(seeded(Convolutional), single), mixed_precision=True)
    low(data(rank, 4, 5)).sum().backward()
    assert low.norm._shardkit_unit.flats[0].compute_dtype == torch.float32
    tagged = auto_wrap_bn(Convolutional(), wrap_it=False)
    assert not isinstance(tagged.norm, FSDP) and tagged.norm.wrapper_config["mixed_precision"] is False
    raises(shardkit.ConfigError, auto_wrap_bn, tagged)


@ranks(2)
def test_fairscales_own_checkpoint_wrapper_composes_with_units(rank, world):
    theirs = pytest.importorskip("fairscale.nn.checkpoint").checkpoint_wrapper
    for inside in (True, False):

        def build(m, inside=inside):
            for i, block in enumerate(m.blocks):
                m.blocks[i] = FSDP(theirs(block)) if inside else theirs(FSDP(block))
            return FSDP(m)

        Twins(rank, world, Net, wrap=build).train(square_loss, 2)


@ranks(2)
def test_the_gradient_scaler_skips_on_all_ranks(rank, world):
    """fairscale's turns itself off without CUDA; with it emulated, one rank skips and the other steps."""
    twins = Twins(rank, world, Net, wrap=nested)
    scaler = ShardedGradScaler(init_scale=4.0)
    assert scaler.is_enabled()
    for step in range(3):
        twins.zero()
        bad = step == 1 and rank == 1
        scaler.scale(square_loss(twins.model, rank, twins.steps) * (float("nan") if bad else 1.0)).backward()
        scaler.unscale_(twins.optim)
        scaler.step(twins.optim)
        scaler.update()
        if step != 1:
            twins.ref_backward(square_loss)
            twins.ref_optim.step()
            twins.steps += 1
    assert scaler.get_scale() == 2.0
    twins.check_weights()
