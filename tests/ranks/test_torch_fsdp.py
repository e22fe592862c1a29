"""FSDP1's interface trains as a single process does: every argument, wrapping helper and method."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn as nn

import shardkit
from shardkit.integrations.torch_fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    always_wrap_policy,
    enable_wrap,
    fully_shard,
    lambda_auto_wrap_policy,
    register_fsdp_forward_method,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP
from tests.harness import ranks
from tests.oracle import (
    LM,
    Block,
    Net,
    Twins,
    compare,
    data,
    full_grads,
    grads,
    lm_loss,
    mesh,
    params,
    raises,
    seeded,
    sgd,
    square_loss,
)

BF16_RTOL = 2e-2  # a few of bfloat16's half ulps (2 ** -9) of the largest element
POLICIES = {
    "none": None,
    "classes": ModuleWrapPolicy({Block}),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=60),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "custom": CustomPolicy(lambda m: isinstance(m, Block)),
    "always": always_wrap_policy,
}


def by_hand(net, **options):
    """Blocks first, then the root, as scripts wrap."""
    for i, block in enumerate(net.blocks):
        net.blocks[i] = FSDP(block, **options)
    return FSDP(net, **options)


def unit_names(model):
    return {name for name, m in model.named_modules() if isinstance(m, FSDP)}


@ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", None])
def test_every_strategy_trains_as_a_single_process(rank, world, strategy):
    chosen = strategy and ShardingStrategy[strategy]
    Twins(rank, world, Net, wrap=lambda m: by_hand(m, sharding_strategy=chosen)).train(square_loss, 3)


@ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_strategies_take_a_mesh_or_a_pair_of_groups(rank, world, strategy):
    grid = mesh(2, 2)
    pair = (grid.get_group(1), grid.get_group(0))
    for where in ({"device_mesh": grid}, {"process_group": pair}):
        options = {"sharding_strategy": ShardingStrategy[strategy], "auto_wrap_policy": POLICIES["classes"], **where}
        Twins(rank, world, Net, wrap=lambda m, o=options: FSDP(m, **o)).train(square_loss, 2)


@ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_its_units_and_trains(rank, world, policy):
    twins = Twins(rank, world, Net, wrap=lambda m: FSDP(m, auto_wrap_policy=POLICIES[policy]))
    blocks = {"", "blocks.0", "blocks.1", "blocks.2"}
    names = unit_names(twins.model)
    if policy == "none":
        assert names == {""}
    elif policy == "always":
        assert {"inp", "head", "blocks.0.up", "blocks.0.norm"} <= names
    elif policy == "size":
        assert {"", "blocks.0.up"} <= names and "inp" not in names
    else:
        assert names == blocks
    twins.train(square_loss, 2)


@ranks(2)
def test_torchs_own_policy_objects_and_settings_are_understood(rank, world):
    from torch.distributed import fsdp
    from torch.distributed.fsdp import wrap as torch_wrap

    chosen = {
        "sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP,
        "cpu_offload": fsdp.CPUOffload(offload_params=True),
        "backward_prefetch": fsdp.BackwardPrefetch.BACKWARD_PRE,
        "mixed_precision": fsdp.MixedPrecision(param_dtype=torch.float32),
    }
    for policy in (
        torch_wrap.ModuleWrapPolicy({Block}),
        torch_wrap.CustomPolicy(lambda m: isinstance(m, Block)),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    ):
        twins = Twins(rank, world, Net, wrap=lambda m, p=policy: FSDP(m, auto_wrap_policy=p, **chosen))
        assert len(unit_names(twins.model)) == 4
        twins.train(square_loss, 2)
    sized = functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=60)
    ours = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
    assert unit_names(FSDP(Net(), auto_wrap_policy=sized)) == unit_names(FSDP(Net(), auto_wrap_policy=ours))


@ranks(2)
def test_a_custom_policy_gives_units_arguments_of_their_own(rank, world):
    low = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)}
    policy = CustomPolicy(lambda m: low if isinstance(m, nn.Linear) and m.out_features == 3 else isinstance(m, Block))
    model = FSDP(seeded(Net), auto_wrap_policy=policy)
    assert unit_names(model) == {"", "head", *(f"blocks.{i}" for i in range(3))}
    dtypes = {}
    for name in ("head", "blocks.0.up"):
        watch = model.get_submodule(name)
        watch.register_forward_pre_hook(lambda m, args, n=name: dtypes.update({n: (m.weight.dtype, args[0].dtype)}))
    model(data(0, 4, 5)).sum().backward()
    assert dtypes == {"head": (torch.bfloat16,) * 2, "blocks.0.up": (torch.float32,) * 2}


@ranks(2)
def test_wrap_wraps_inside_of_enable_wrap_only(rank, world):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = wrap(nn.Linear(5, 5))
            self.b = wrap(nn.Linear(5, 3), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

        def forward(self, x):
            return self.b(self.a(x))

    assert not unit_names(Small())

    def build(model):
        with enable_wrap(wrapper_cls=FSDP, sync_module_states=True):
            torch.manual_seed(0)
            return FSDP(Small())

    twins = Twins(rank, world, Small, wrap=build)
    assert unit_names(twins.model) == {"", "a", "b"}
    assert twins.model.a._shardkit_unit.drops_after_forward and not twins.model.b._shardkit_unit.drops_after_forward
    twins.train(square_loss, 2)


@ranks(2)
def test_mixed_precision_casts_what_fsdp_casts(rank, world):
    """Inputs of the root are cast, those of other units only with cast_forward_inputs; batch normalisation is exempt;
    shards, gradients and the state dict keep the parameters' own dtype."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(5, 6), nn.BatchNorm1d(6), Block(6)

        def forward(self, x, scale):
            seen["x"], seen["scale"], seen["weight"] = x.dtype, scale.dtype, self.a.weight.dtype
            seen["norm"] = self.norm.weight.dtype
            return self.b(self.norm(self.a(x)).float()).mean() * scale

    seen = {}
    for inner in (False, True):
        mp = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16, cast_forward_inputs=inner)
        model = Mixed()
        model.b.register_forward_pre_hook(lambda m, args: seen.update(inner=args[0].dtype, inner_w=m.up.weight.dtype))
        model.b = FSDP(model.b, mixed_precision=mp)
        model = FSDP(model, mixed_precision=mp)
        if inner:
            model(data(rank, 4, 5), torch.ones(())).backward()
        else:
            with pytest.raises(RuntimeError):  # a float32 input meets bfloat16 weights, as in FSDP1
                model(data(rank, 4, 5), torch.ones(()))
        low = torch.bfloat16
        assert [seen[k] for k in ("x", "scale", "weight", "inner_w")] == [low] * 4 and seen["norm"] == torch.float32
        assert seen["inner"] == (low if inner else torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {p.grad.dtype for p in model.parameters()}
    assert {v.dtype for v in model.state_dict().values()} == {torch.float32, torch.int64}


@ranks(2)
def test_low_precision_training_follows_the_single_process(rank, world):
    mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twins = Twins(rank, world, Net, wrap=lambda m: by_hand(m, mixed_precision=mp))
    for _ in range(3):
        twins.zero()
        square_loss(twins.model, rank, twins.steps).backward()
        twins.ref_backward(square_loss)
        compare("gradient", full_grads(twins.model), grads(twins.ref), rtol=5 * BF16_RTOL)
        twins.update()
    twins.check_weights(rtol=BF16_RTOL)


@ranks(2)
def test_a_bfloat16_model_keeps_bfloat16_shards(rank, world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = FSDP(seeded(Net).bfloat16(), auto_wrap_policy=POLICIES["classes"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {v.dtype for v in model.state_dict().values()} == {torch.bfloat16}


@ranks(2)
def test_the_remaining_arguments_mean_what_they_meant(rank, world):
    options = {"cpu_offload": CPUOffload(offload_params=True), "forward_prefetch": True, "use_orig_params": True}
    options |= {"device_id": torch.device("cpu"), "limit_all_gathers": True, "backward_prefetch": None}
    Twins(rank, world, Net, wrap=lambda m: by_hand(m, **options)).train(square_loss, 2)

    torch.manual_seed(rank)  # ranks differ until the first one's weights are taken
    synced = FSDP(Net(), sync_module_states=True)
    ref = seeded(Net)  # what the first rank had, who was seeded with 0
    compare("weights", dict(synced.state_dict()), params(ref))

    frozen = seeded(Net)
    model = FSDP(frozen, ignored_modules=[frozen.inp], ignored_states=[frozen.head.weight])
    assert frozen.inp.weight.shape == (5, 5) and model.head.weight.shape == (3, 5)
    assert sum(b.up.weight.numel() for b in model.blocks) < 3 * 55

    with torch.device("meta"):
        empty = Net()
    model = FSDP(empty, param_init_fn=lambda m: [nn.init.ones_(p) for p in m.parameters(recurse=False)])
    assert all(v.eq(1).all() for v in model.state_dict().values())


@ranks(2)
def test_arguments_without_effect_say_why_once(rank, world):
    from shardkit.integrations import _common

    _common._said.clear()
    options = {"limit_all_gathers": False, "backward_prefetch": BackwardPrefetch.BACKWARD_POST}
    options["mixed_precision"] = MixedPrecision(keep_low_precision_grads=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = by_hand(Net(), **options)
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        model.set_modules_to_backward_prefetch([model.blocks[0]])
        model.set_requires_all_reduce(False)
        model.set_reshard_after_backward(False)
    texts = [str(w.message) for w in caught]
    words = ["BACKWARD_POST", "limit_all_gathers", "keep_low_precision_grads", "forward_prefetch", "backward_prefetch"]
    words += ["all_reduce", "reshard_after_backward"]
    assert [sum(word in text for text in texts) for word in words] == [1] * len(words), texts


@ranks(2)
def test_wrapping_returns_the_same_object_and_module_leads_back_to_it(rank, world):
    net = Net()
    model = FSDP(module=net)
    assert model is net and model.module is net and isinstance(net, (FSDP, shardkit.FullyShardedDataParallel))
    assert model.rank == rank and model.world_size == world
    outer = FSDP(nn.Sequential(net, nn.Linear(3, 2)))
    assert outer.check_is_root() and not net.check_is_root()
    assert FSDP.fsdp_modules(outer) == [outer, net] and FSDP.fsdp_modules(outer, root_only=True) == [outer]

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.rank = nn.Linear(2, 2), 16

    holder = FSDP(Holder())
    assert type(holder.module).__name__ == "Linear" and holder.rank == 16  # what a module has comes first


@ranks(2)
def test_apply_shows_whole_parameters_and_keeps_changes(rank, world):
    def init(module):
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
            nn.init.normal_(module.weight)

    model = by_hand(seeded(Net))
    torch.manual_seed(1)
    assert model.apply(init) is model
    ref = seeded(Net)
    torch.manual_seed(1)
    ref.apply(init)
    compare("weights", dict(model.state_dict()), params(ref))


@ranks(2)
def test_no_sync_accumulates_and_clipping_is_global(rank, world):
    twins = Twins(rank, world, Net, wrap=by_hand)
    for norm in (2.0, 1.0, float("inf")):
        twins.zero()
        with twins.model.no_sync():
            twins.backward(square_loss)
        twins.steps += 1
        twins.backward(square_loss)
        got = twins.model.clip_grad_norm_(0.05, norm)
        want = nn.utils.clip_grad_norm_(twins.ref.parameters(), 0.05, norm)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        twins.check_grads(5e-6)
        twins.update()
    twins.check_weights(1e-5)


def fp16_compress_hook(state, bucket):
    raise AssertionError("only the name is looked at")


@ranks(2)
def test_comm_hooks_set_the_dtype_that_gradients_travel_in(rank, world):
    from torch.distributed.algorithms._comm_hooks import default_hooks

    for hook, dtype in (
        (default_hooks.allreduce_hook, torch.float32),
        (default_hooks.reduce_scatter_hook, torch.float32),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
        (fp16_compress_hook, torch.float16),
    ):
        twins = Twins(rank, world, Net, wrap=by_hand)
        twins.model.register_comm_hook(None, hook)
        assert {flat.reduce_dtype for flat in twins.model._shardkit_step.flats} == {dtype}
        twins.zero()
        twins.backward(square_loss)
        twins.check_grads(1e-6 if dtype == torch.float32 else BF16_RTOL)
    raises(shardkit.ConfigError, twins.model.register_comm_hook, None, print)
    raises(shardkit.StateError, twins.model.blocks[0].register_comm_hook, None, hook)


@ranks(2)
def test_tied_weights_in_two_units_stay_tied(rank, world):
    """FSDP1 fails on them ("mat2 must be a matrix, got 1-D tensor")."""

    def build(model):
        model.emb, model.head = FSDP(model.emb), FSDP(model.head)
        return FSDP(model)

    twins = Twins(rank, world, LM, wrap=build)
    assert twins.model.emb.weight is twins.model.head.weight
    twins.train(lm_loss, 3)


@ranks(2)
def test_frozen_and_trainable_parameters_in_one_unit(rank, world):
    """FSDP1 refuses them unless use_orig_params=True."""

    def freeze(model):
        for name, p in model.named_parameters():
            p.requires_grad_("up" in name)
        return model

    twins = Twins(rank, world, lambda: freeze(Net()), wrap=by_hand)
    twins.train(square_loss, 3)


@ranks(2)
def test_a_copy_is_independent_and_keeps_the_interface(rank, world):
    model = by_hand(seeded(Net))
    twin = copy.deepcopy(model)
    assert isinstance(twin, FSDP) and twin.check_is_root()
    before = twin.state_dict()
    optim = sgd(model.parameters())
    square_loss(model, rank, 0).backward()
    optim.step()
    compare("copy", dict(twin.state_dict()), dict(before), rtol=0)


@ranks(2)
def test_the_gradient_scaler_skips_on_all_ranks(rank, world):
    twins = Twins(rank, world, Net, wrap=by_hand)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    for step in range(3):
        twins.zero()
        overflow = step == 1
        loss = square_loss(twins.model, rank, twins.steps)
        scaler.scale(loss * (float("inf") if overflow and rank == 1 else 1.0)).backward()
        scaler.step(twins.optim)
        scaler.update()
        if not overflow:
            twins.ref_backward(square_loss)
            twins.ref_optim.step()
            twins.steps += 1
    assert scaler.get_scale() == 2.0
    twins.check_weights()


# ------------------------------------------------------------------------------------------------- FSDP2's names


@ranks(2)
def test_fully_shard_trains_and_takes_fsdp2s_settings(rank, world):
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    def build(model):
        for block in model.blocks:
            assert fully_shard(block, reshard_after_forward=False) is block
        return fully_shard(model)

    twins = Twins(rank, world, Net, wrap=build)
    assert not twins.model.blocks[0]._shardkit_unit.drops_after_forward
    assert all(isinstance(v, shardkit.LocalShard) for v in twins.model.state_dict().values())
    twins.train(square_loss, 3)

    offload = CPUOffloadPolicy(pin_memory=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = fully_shard(Net(), mp_policy=policy, offload_policy=offload, mesh=mesh(world))
    out = model(data(rank, 4, 5))
    assert out.dtype == torch.float32 and model._shardkit_step.flats[0].compute_dtype == torch.bfloat16
    raises(shardkit.ConfigError, fully_shard, [nn.Linear(2, 2)])


@ranks(4)
def test_a_number_of_ranks_to_reshard_to_is_each_units_own(rank, world):
    def build(model):
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=2)
        return fully_shard(model, reshard_after_forward=True, ignored_params={model.head.bias})

    twins = Twins(rank, world, Net, wrap=build, optim=lambda params: sgd(list(params)[:3]))
    assert twins.model.head.bias.shape == (3,) and twins.model._shardkit_unit.flats[0].mesh.near is None
    assert twins.model.blocks[0]._shardkit_unit.flats[0].mesh.near.size == 2
    twins.backward(square_loss)
    twins.model.head.bias.grad = twins.ref.head.bias.grad  # ignored parameters are nobody's
    twins.check_grads()


@ranks(2)
def test_unshard_shows_whole_parameters_until_reshard_or_the_next_call(rank, world):
    twins = Twins(rank, world, Net, wrap=by_hand)
    block, ref = twins.model.blocks[0], twins.ref.blocks[0]
    handle = block.unshard(async_op=True)
    handle.wait()
    compare("whole", {"w": block.up.weight}, {"w": ref.up.weight})
    block.reshard()
    assert block.up.weight.numel() < ref.up.weight.numel()
    twins.model.unshard()
    block.unshard()
    twins.train(square_loss, 3)  # the forward ends both


@ranks(2)
def test_gradient_sync_and_divide_factor_are_switches_on_the_model(rank, world):
    twins = Twins(rank, world, Net, wrap=by_hand)
    twins.zero()
    twins.model.set_requires_gradient_sync(False)
    twins.backward(square_loss)
    assert all(p.grad is None for p in twins.model.parameters())
    twins.model.set_requires_gradient_sync(True)
    twins.model.set_is_last_backward(True)
    twins.backward(square_loss)
    twins.check_grads()
    for module in (twins.model, *twins.model.blocks):
        module.set_gradient_divide_factor(1.0)
    twins.zero()
    square_loss(twins.model, rank, 0).backward()
    for r in range(world):
        square_loss(twins.ref, r, 0).backward()
    twins.check_grads()


@ranks(2)
def test_reshard_after_forward_can_be_changed_later(rank, world):
    twins = Twins(rank, world, Net, wrap=by_hand)
    inner = twins.model.blocks[0]._shardkit_unit
    for keep in (True, False):
        twins.model.set_reshard_after_forward(not keep)
        with torch.enable_grad():
            loss = square_loss(twins.model, rank, 0)
        assert (inner.flats[0].buffer is not None) == keep
        del loss
        twins.train(square_loss, 1)


@ranks(2)
def test_a_registered_forward_method_computes_with_full_parameters(rank, world):
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 5)

        def encode(self, x):
            return x @ self.a.weight

        def forward(self, x):
            return self.a(x)

    def build(model):
        model = FSDP(model)
        register_fsdp_forward_method(model, "encode")
        register_fsdp_forward_method(model, "missing")
        return model

    Twins(rank, world, Coder, wrap=build).train(lambda m, r, s: (m.encode(data(s + r, 4, 5)) ** 2).mean(), 2)
