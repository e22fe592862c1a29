"""Activation checkpointing and offload of sharded models: gradients and weights equal single-process training without.

The oracle is in tests/oracle.py; its twin is neither sharded nor checkpointed. Dropout is on, with one seed for both.
"""

import copy
import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import shardkit
from shardkit.activation import Checkpointed
from shardkit.runtime.unit import Unit
from tests.harness import ranks
from tests.oracle import RTOL, STRATEGIES, Twins, adam, compare, data, full_grads, grads, ids, mesh, sgd

both_kinds = pytest.mark.parametrize("reentrant", [True, False])
ALL_OFFLOADED = shardkit.ActivationOffload(min_bytes=0)


class Mlp(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d + 1), nn.Linear(2 * d + 1, d)

    def forward(self, x, *, scale):
        return self.down(F.gelu(self.up(x))) * scale["by"]


class Block(nn.Module):
    def __init__(self, d=5):
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(d), Mlp(d), nn.Dropout(0.3)

    def forward(self, x, scale):
        return x + self.dropout(self.mlp(self.norm(x), scale={"by": scale}))


class Stack(nn.Module):
    """Holds units and no parameters."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x, scale):
        for block in self.blocks:
            x = block(x, scale=scale)
        return {"hidden": x}


class Model(nn.Module):
    def __init__(self, norm=False, tied=True):
        super().__init__()
        self.emb, self.gain = nn.Embedding(11, 5), nn.Parameter(torch.ones(5))
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.first, self.second, self.head = Stack(2), Stack(2), nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens):
        x = self.norm(self.emb(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.second(self.first(x, self.gain)["hidden"], self.gain)["hidden"])


def is_stack(module):
    return isinstance(module, Stack)


def loss(model, rank, step):
    torch.manual_seed(1000 * step + rank)
    x = ids(100 * step + rank, 11, 3, 4)
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


def _blocks(model):
    return [m for m in model.modules() if isinstance(m, Block)]


PLACES = {
    "units": _blocks,
    "parts of units": lambda model: [b.mlp for b in _blocks(model)],
    "around units": lambda model: [model.first, model.second],
    "the model": lambda model: [model],
    "lookup": lambda model: [model.emb],
    "every other unit, and around one": lambda model: [*_blocks(model)[::2], model.second],
}
places = pytest.mark.parametrize("place", PLACES)


# ------------------------------------------------------------------------------------------------------- our own


@ranks(2)
@places
@both_kinds
@pytest.mark.parametrize("when", ["before", "after", "before and after"])
def test_checkpoints_anywhere_train_as_without(rank, world, place, reentrant, when):
    options = dict(use_reentrant=reentrant)

    def wrap(model, **sharding):
        for module in PLACES[place](model) if "before" in when else ():
            shardkit.checkpoint_wrapper(module, **options)
        shardkit.auto_wrap(model, policy={Block}, **sharding)
        for module in PLACES[place](model) if "after" in when else ():
            shardkit.checkpoint_wrapper(module, **options)
        return model

    for build in (Model, functools.partial(Model, tied=False)):
        Twins(rank, world, build, wrap=wrap).train(loss, steps=2)
    Twins(rank, world, Model, wrap=functools.partial(wrap, sharding_strategy="grad_op")).train(loss, steps=2)


@ranks(2)
@places
@both_kinds
@pytest.mark.parametrize("frozen", ["first", "gain and embedding", "all but the head"])
def test_frozen_parts_may_be_checkpointed_and_inputs_offloaded(rank, world, place, reentrant, frozen):
    def build():
        model = Model(tied=False)
        if frozen == "first":
            model.first.requires_grad_(False)
        elif frozen == "gain and embedding":
            model.gain.requires_grad_(False)
            model.emb.requires_grad_(False)
        elif frozen == "all but the head":
            model.requires_grad_(False).head.requires_grad_(True)
        return model

    def wrap(model):
        shardkit.auto_wrap(model, policy={Block})
        for module in PLACES[place](model):
            shardkit.checkpoint_wrapper(module, use_reentrant=reentrant, offload_to_cpu=True)
        return model

    twins = Twins(rank, world, build, wrap=wrap, optim=lambda ps: sgd([p for p in ps if p.requires_grad]))
    twins.train(loss, steps=2)


class Tokens(nn.Module):
    """A lookup and a matrix, of one unit."""

    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(11, 5), nn.Linear(5, 11)

    def forward(self, tokens):
        return self.out(torch.tanh(self.emb(tokens)))


@ranks(2)
@both_kinds
@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_are_looked_up_again_are_there(rank, world, reentrant, whole):
    """Backward by itself needs no embedding, so the engine gathers it for the recomputation only."""

    def wrap(model):
        shardkit.auto_wrap(model, policy=None)
        shardkit.checkpoint_wrapper(model if whole else model[0], use_reentrant=reentrant)
        return model

    Twins(rank, world, lambda: nn.Sequential(Tokens()), wrap=wrap).train(loss, steps=2)


@ranks(2)
@both_kinds
@pytest.mark.parametrize("where", [True, 0.5, {Block}, {Mlp}, is_stack], ids="all half Block Mlp predicate".split())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_option_trains_as_without(rank, world, where, strategy, reentrant):
    chosen = shardkit.ActivationCheckpointing(where=where, use_reentrant=reentrant)
    twins = Twins(rank, world, Model, policy={Block}, sharding_strategy=strategy, activation_checkpointing=chosen)
    twins.train(loss, steps=3)


@ranks(2)
def test_the_option_checkpoints_what_it_says(rank, world):
    def names(**options):
        model = shardkit.auto_wrap(Model(), policy={Block}, **options)
        return [n for n, m in model.named_modules() if isinstance(m, Checkpointed)]

    blocks = ["first.blocks.0", "first.blocks.1", "second.blocks.0", "second.blocks.1"]
    assert names(activation_checkpointing=True) == blocks and names(activation_checkpointing=False) == []
    assert names(activation_checkpointing=0.5) == blocks[::2]
    assert names(activation_checkpointing={Stack}) == ["first", "second"]
    block = shardkit.FullyShardedDataParallel(Block(), activation_checkpointing=True)
    assert isinstance(block, Checkpointed)
    assert [n for n, _ in block.named_parameters()] == [n for n, _ in Block().named_parameters()]


@ranks(2)
@pytest.mark.parametrize("policy", ["addmm gelu", ""], ids=["some", "none"])
@pytest.mark.parametrize("place", ["units", "parts of units"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_selective_checkpoints_train_as_without(rank, world, policy, place, when):
    policy = [getattr(torch.ops.aten, name).default for name in policy.split()]

    def wrap(model):
        for step in ("shard", "checkpoint") if when == "after" else ("checkpoint", "shard"):
            if step == "shard":
                shardkit.auto_wrap(model, policy={Block})
            else:
                for module in PLACES[place](model):
                    shardkit.checkpoint_wrapper(module, policy=policy)
        return model

    Twins(rank, world, Model, wrap=wrap).train(loss, steps=2)


@ranks(2)
@both_kinds
def test_running_statistics_are_those_without(rank, world, reentrant):
    """Per rank, so the twin, which sees every rank's batch, is no oracle: an unwrapped copy on this rank's batch is."""
    model = Model(norm=True)
    mine = copy.deepcopy(model)
    chosen = shardkit.ActivationCheckpointing(where={nn.BatchNorm1d}, use_reentrant=reentrant)
    shardkit.auto_wrap(model, policy={Block}, activation_checkpointing=chosen)
    for step in range(2):
        loss(model, rank, step).backward()
        loss(mine, rank, step).backward()
    assert model.norm.num_batches_tracked == 2
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), mine.buffers(), strict=True))


@ranks(2)
@both_kinds
def test_accumulation_and_two_forwards_before_one_backward(rank, world, reentrant):
    chosen = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
    twins = Twins(rank, world, Model, policy={Block}, activation_checkpointing=chosen, activation_offload=ALL_OFFLOADED)

    def twice(model, rank, step):
        return loss(model, rank, 2 * step) + loss(model, rank, 2 * step + 1)

    for _ in range(2):
        twins.zero()
        with twins.model.no_sync():
            twins.backward(loss)
        twins.backward(twice)
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(2)
@both_kinds
def test_evaluation_and_direct_calls_between_steps_change_nothing(rank, world, reentrant):
    """A direct forward() of a checkpointed unit is what once made the recomputation count other tensors."""
    chosen = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
    twins = Twins(rank, world, Model, policy={Block}, activation_checkpointing=chosen)
    for step in range(3):
        with torch.no_grad():
            for model in (twins.model.eval(), twins.ref.eval()):
                model(ids(step, 11, 2, 3))
                model.first.blocks[0].forward(data(step, 2, 5), torch.ones(5))
                model.first.blocks[1].mlp(data(step, 2, 5), scale={"by": 1})
        twins.model.train(), twins.ref.train()
        twins.model.first.blocks[0].forward(data(step, 2, 5), torch.ones(5))
        twins.zero()
        twins.backward(loss)
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(2)
@both_kinds
def test_a_deep_copy_trains_on_its_own(rank, world, reentrant):
    def wrap(model):
        chosen = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
        shardkit.auto_wrap(model, policy={Block}, activation_checkpointing=chosen, activation_offload=ALL_OFFLOADED)
        other = copy.deepcopy(model)
        loss(model, rank, 7).backward()
        for p in model.parameters():
            p.data.zero_()
        return other

    twins = Twins(rank, world, Model, wrap=wrap).train(loss, steps=2)
    assert [isinstance(b, Checkpointed) for b in _blocks(twins.model)] == [True] * 4


@ranks(2)
@both_kinds
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Mlp, Block])
def test_compiled_blocks_may_be_checkpointed(rank, world, reentrant, compiler, kind):
    def wrap(model):
        chosen = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
        shardkit.auto_wrap(model, policy={Block}, activation_checkpointing=chosen)
        for module in model.modules():
            if isinstance(module, kind):
                module.compile(backend=compiler)
        return model

    torch._dynamo.reset()
    Twins(rank, world, _without_dropout, wrap=wrap).train(loss, steps=2)


def _without_dropout():
    model = Model()
    for block in _blocks(model):
        block.dropout.p = 0.0
    return model


@ranks(2)
def test_a_step_that_broke_off_in_the_recomputation_does_not_spoil_the_next(rank, world):
    twins = Twins(rank, world, Model, policy={Block}, activation_checkpointing=True)
    twins.train(loss, steps=1)
    block = twins.model.second.blocks[0]

    def fail(module, args):
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("broken")

    handle = block.mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="broken"):
        loss(twins.model, rank, 1).backward()
    handle.remove()
    twins.train(loss, steps=2)


@ranks(2)
def test_two_ways_to_checkpoint_the_same_block_are_refused(rank, world):
    pytest.importorskip("transformers")
    model = _llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(shardkit.ConfigError, match="activation_checkpointing and gradient_checkpointing_enable"):
        shardkit.auto_wrap(model, activation_checkpointing=True)
    with pytest.raises(shardkit.ConfigError, match="activation_offload"):
        shardkit.auto_wrap(Model(), activation_offload="yes")


# ----------------------------------------------------------------------------------------------- other people's


@ranks(2)
@places
@both_kinds
def test_checkpoint_wrapper_of_torch_trains_as_without(rank, world, place, reentrant):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as theirs

    if reentrant and place not in ("units", "parts of units"):
        pytest.skip("torch's reentrant kind needs a tensor that requires grad among its inputs, and tensors as outputs")
    kind = theirs.CheckpointImpl.REENTRANT if reentrant else theirs.CheckpointImpl.NO_REENTRANT

    def checkpointed(model):
        if place == "the model":
            return theirs.checkpoint_wrapper(model, kind)
        chosen = set(PLACES[place](model))
        wrapper = functools.partial(theirs.checkpoint_wrapper, checkpoint_impl=kind)
        theirs.apply_activation_checkpointing(model, wrapper, check_fn=lambda m: m in chosen)
        return model

    def before(model):
        return shardkit.auto_wrap(checkpointed(model), policy={Block})

    def after(model):
        return checkpointed(shardkit.auto_wrap(model, policy={Block}))

    for wrap in (before, after):
        twins = Twins(rank, world, Model, wrap=wrap)
        for _ in range(2):
            twins.zero()
            twins.backward(loss)
            got = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in full_grads(twins.model).items()}
            compare("gradient of", got, grads(twins.ref), rtol=2 * RTOL)
            twins.update()


@ranks(2)
@pytest.mark.parametrize("place", ["units", "parts of units"])  # fairscale's loses the gradient of a dict output
@pytest.mark.parametrize("offload", [True, False])
def test_checkpoint_wrapper_of_fairscale_trains_as_without(rank, world, place, offload):
    fairscale = pytest.importorskip("fairscale.nn.checkpoint")

    def before(model):
        for module in PLACES[place](model):
            fairscale.checkpoint_wrapper(module, offload_to_cpu=offload)
        return shardkit.auto_wrap(model, policy={Block})

    def after(model):
        shardkit.auto_wrap(model, policy={Block})
        for module in PLACES[place](model):
            fairscale.checkpoint_wrapper(module, offload_to_cpu=offload)
        return model

    for wrap in (before, after):
        Twins(rank, world, Model, wrap=wrap).train(loss, steps=2)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.3, tie_word_embeddings=False, use_cache=False,
        attn_implementation="eager",
    )).train()  # fmt: skip


def llama_loss(model, rank, step):
    torch.manual_seed(1000 * step + rank)
    x = ids(100 * step + rank, 17, 2, 6)
    return model(input_ids=x, labels=x).loss


@ranks(2)
@both_kinds
@pytest.mark.parametrize("how", ["enable before", "enable after", "option", "option and offload", "offload"])
def test_a_llama_with_attention_dropout_trains_as_without(rank, world, reentrant, how):
    pytest.importorskip("transformers")
    kwargs = {"use_reentrant": reentrant}

    def wrap(model):
        if how == "enable before":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        options = {}
        if "option" in how:
            options["activation_checkpointing"] = shardkit.ActivationCheckpointing(**kwargs)
        if "offload" in how:
            options["activation_offload"] = ALL_OFFLOADED
        shardkit.auto_wrap(model, **options)
        if how == "enable after":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return model

    Twins(rank, world, _llama, wrap=wrap, optim=adam).train(llama_loss, steps=2)


# ------------------------------------------------------------------------------------------------------- offload


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("checkpointing", [None, 0.5, shardkit.ActivationCheckpointing(offload_to_cpu=True)], ids=str)
def test_offload_trains_as_without(rank, world, strategy, checkpointing):
    twins = Twins(
        rank, world, Model, policy={Block}, sharding_strategy=strategy, activation_checkpointing=checkpointing,
        activation_offload=ALL_OFFLOADED,
    )  # fmt: skip
    twins.train(loss, steps=3)


@ranks(4)
def test_offload_and_checkpointing_of_a_hybrid(rank, world):
    options = dict(activation_checkpointing=0.5, activation_offload=ALL_OFFLOADED)
    twins = Twins(rank, world, Model, policy={Block}, sharding_strategy="hybrid", device_mesh=mesh(2, 2), **options)
    twins.train(loss, steps=2)


@ranks(2)
@pytest.mark.parametrize("around", ["torch", "save_on_cpu"])
def test_offload_inside_other_hooks_leaves_the_work_to_them(rank, world, around):
    from torch.utils.checkpoint import checkpoint

    twins = Twins(rank, world, Model, policy={Block}, activation_offload=ALL_OFFLOADED)

    def inside(model, rank, step):
        if model is twins.ref:
            return loss(model, rank, step)
        if around == "torch":
            return checkpoint(loss, model, rank, step, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            return loss(model, rank, step)

    twins.train(inside, steps=2)


@ranks(2)
@both_kinds
@pytest.mark.parametrize("checkpointing", [True, False])
def test_mixed_precision_gradients_are_the_same_with_and_without(rank, world, reentrant, checkpointing):
    """Bitwise: the same operators on the same values."""

    def local_grads(**options):
        torch.manual_seed(0)
        mp = shardkit.MixedPrecision(param_dtype=torch.bfloat16)
        model = shardkit.auto_wrap(Model(tied=False), policy={Block}, mixed_precision=mp, **options)
        for step in range(2):
            loss(model, rank, step).backward()
        return [p.grad.to_local() for p in model.parameters()]

    options = dict(activation_offload=ALL_OFFLOADED)
    if checkpointing:
        options["activation_checkpointing"] = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
    for a, b in zip(local_grads(), local_grads(**options), strict=True):
        assert torch.equal(a, b)


@ranks(2)
def test_recomputation_leaves_no_unit_active_or_open(rank, world):
    model = shardkit.auto_wrap(Model(), policy={Block}, activation_checkpointing=True)
    for step in range(2):
        loss(model, rank, step).backward()
        units: list[Unit] = model._shardkit_step.units
        assert all(u.active == 0 and not u.opened and not u.live for u in units)
        assert all(flat.buffer is None for u in units for flat in u.flats)


@ranks(2)
@pytest.mark.parametrize("strategy", ["full", "grad_op", "zero2"])
def test_a_block_that_looks_rows_up_inside_its_checkpoint_finds_them(rank, world, strategy):
    """T5's first block holds the table of relative positions: backward does not need it, the recomputation does."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,  # a recomputation would find the cache filled, whoever shards the model
    )  # fmt: skip
    torch.manual_seed(0)
    twin = T5ForConditionalGeneration(config)
    model = copy.deepcopy(twin)
    shardkit.auto_wrap(model, activation_checkpointing=True, sharding_strategy=strategy)
    for step in range(2):
        for m in (model, twin):
            m.zero_grad()
        ids = [torch.arange(6)[None] + 3 * step + r for r in range(world)]
        model(input_ids=ids[rank], labels=ids[rank]).loss.backward()
        for r in range(world):
            (twin(input_ids=ids[r], labels=ids[r]).loss / world).backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6, msg=name)
