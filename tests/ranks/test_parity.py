"""Gradients and weights equal single-process training: every strategy, 2 and 4 ranks, hand-written and `transformers`
models.

The oracle and the reason for its tolerance are in tests/oracle.py. Five optimizer steps each, gradients compared at
every one; each rank has a batch of its own.
"""

import pytest
import torch

import shardkit
from tests.harness import ranks
from tests.oracle import HYBRIDS, LM, STRATEGIES, Block, Net, Twins, ids, lm_loss, mesh, sgd, square_loss

# -------------------------------------------------------------------------------------------------- plain models


@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_net_trains_as_in_one_process(rank, world, strategy):
    Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy).train(square_loss)


@ranks(2, 4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [True])
def test_a_language_model_trains_as_in_one_process(rank, world, strategy, tied):
    Twins(rank, world, _lm(tied), policy={Block}, sharding_strategy=strategy).train(lm_loss)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_matrix_tied_across_units_trains_as_in_one_process(rank, world, strategy):
    policy = {Block, torch.nn.Embedding, torch.nn.Linear}
    twins = Twins(rank, world, _lm(True), policy=policy, sharding_strategy=strategy).train(lm_loss)
    assert twins.model.head.weight is twins.model.emb.weight


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_a_hybrid_trains_as_in_one_process(rank, world, strategy, shape):
    Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy, device_mesh=mesh(*shape)).train(square_loss)
    Twins(rank, world, _lm(True), policy={Block}, sharding_strategy=strategy, device_mesh=mesh(*shape)).train(lm_loss)


@ranks(4)
@pytest.mark.parametrize("strategy", ["full", "grad_op", "zero1", "zero2"])
def test_a_2d_mesh_makes_any_sharding_strategy_a_hybrid(rank, world, strategy):
    Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy, device_mesh=mesh(2, 2)).train(square_loss)


@ranks(2, 4)
@pytest.mark.parametrize("strategy", ["full", "none"])
def test_a_1d_mesh_trains_as_in_one_process(rank, world, strategy):
    Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy, device_mesh=mesh(world)).train(square_loss)


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("strategy", ["full", "grad_op"])
def test_reshard_after_forward_changes_no_numbers(rank, world, strategy, reshard):
    options = dict(sharding_strategy=strategy, reshard_after_forward=reshard)
    Twins(rank, world, Net, policy={Block}, **options).train(square_loss)


@ranks(2)
@pytest.mark.parametrize("option", ["forward_prefetch", "backward_prefetch", "check_order"])
@pytest.mark.parametrize("strategy", ["full", "zero2"])
def test_switching_prefetch_or_agreement_off_changes_no_numbers(rank, world, strategy, option):
    Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy, **{option: False}).train(square_loss)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("synced_last", [True, False])
def test_accumulation_equals_the_concatenated_batch(rank, world, strategy, synced_last):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy)
    for step in range(3):
        twins.zero(set_to_none=step % 2 == 0)
        for micro in range(3):

            def loss(model, r, s, micro=micro):
                return square_loss(model, r, 10 * s + micro) / 3

            if synced_last and micro < 2:
                with twins.model.no_sync():
                    twins.backward(loss)
            else:
                twins.backward(loss)
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_accumulation_on_a_hybrid_mesh_equals_the_concatenated_batch(rank, world, shape):
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy="hybrid", device_mesh=mesh(*shape))
    for _ in range(2):
        twins.zero()
        with twins.model.no_sync():
            twins.backward(square_loss)
        twins.backward(lambda model, r, s: square_loss(model, r, 50 + s))
        twins.check_grads()
        twins.update()
    twins.check_weights()


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("foreach", [True, False])
def test_adam_trains_as_in_one_process(rank, world, strategy, foreach):
    """Adam divides by the root of the second moment, which turns noise in a gradient near zero into a whole step: one
    step of lr 0.01 times 1e-3 is allowed."""
    twins = Twins(rank, world, Net, policy={Block}, sharding_strategy=strategy,
                  optim=lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=foreach))  # fmt: skip
    for _ in range(5):
        twins.zero()
        twins.backward(square_loss)
        twins.update()
    twins.check_weights(rtol=2e-5)


def _lm(tied):
    return lambda: LM(tied=tied)


# ------------------------------------------------------------------------------------------------ transformers


VOCAB = 37
EAGER = dict(attn_implementation="eager")


def _llama(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=tied, pad_token_id=0, **EAGER,
    ))  # fmt: skip


def _gpt2(tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=tied, **EAGER,
    ))  # fmt: skip


def _bert(tied):
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied, **EAGER,
    ))  # fmt: skip


def _t5(tied):
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=tied, **EAGER,
    ))  # fmt: skip


def _mixtral(tied):
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=32,
        output_router_logits=True, tie_word_embeddings=tied, pad_token_id=0, **EAGER,
    ))  # fmt: skip


MODELS = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "t5": _t5, "mixtral": _mixtral}


def hf_loss(model, rank, step):
    x = ids(100 * step + rank, VOCAB - 1, 2, 6) + 1  # 0 is padding
    return model(input_ids=x, labels=x.roll(1, 1) if model.config.is_encoder_decoder else x).loss


@ranks(2, 4)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MODELS)
def test_a_transformers_model_trains_as_in_one_process(rank, world, name, tied):
    twins = Twins(rank, world, lambda: MODELS[name](tied)).train(hf_loss)
    assert isinstance(twins.model, type(twins.ref)) and type(twins.model).__name__ == type(twins.ref).__name__
    assert list(twins.model.state_dict()) == list(twins.ref.state_dict())


@ranks(2)
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "full"])
@pytest.mark.parametrize("name", MODELS)
def test_a_transformers_model_trains_alike_under_every_strategy(rank, world, name, strategy):
    Twins(rank, world, lambda: MODELS[name](True), sharding_strategy=strategy).train(hf_loss, steps=3)


@ranks(4)
@pytest.mark.parametrize("strategy", ["hybrid", "grad_op"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_transformers_model_trains_alike_under_a_hybrid(rank, world, name, strategy):
    Twins(rank, world, lambda: MODELS[name](True), sharding_strategy=strategy, device_mesh=mesh(2, 2)).train(hf_loss, 3)


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("strategy", ["full"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_of_a_transformers_model_trains_as_in_one_process(
    rank, world, name, strategy, reentrant
):
    """The twin checkpoints, too: a reentrant checkpoint loses the gradient of Mixtral's collected router logits there
    as well (transformers records them in the forward without grad mode)."""
    kwargs = {"use_reentrant": reentrant}

    def build():
        model = MODELS[name](True)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return model.train()

    def late(model):
        model.gradient_checkpointing_disable()
        model = shardkit.auto_wrap(model, sharding_strategy=strategy)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        return model

    Twins(rank, world, build, sharding_strategy=strategy).train(hf_loss, steps=2)
    Twins(rank, world, build, wrap=late).train(hf_loss, steps=2)


@ranks(2)
@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_generates_as_in_one_process_between_steps(rank, world, tied):
    twins = Twins(rank, world, lambda: _llama(tied))
    for _ in range(2):
        prompt = ids(rank, VOCAB - 1, 2, 3) + 1
        options = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert torch.equal(twins.model.generate(prompt, **options), twins.ref.generate(prompt, **options))
        twins.zero()
        twins.backward(hf_loss)
        twins.check_grads()
        twins.update()


@ranks(2)
def test_adapters_of_peft_train_and_the_base_stays(rank, world):
    from peft import LoraConfig, get_peft_model

    def build():
        return get_peft_model(_llama(True), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    twins = Twins(rank, world, build, optim=lambda ps: sgd([p for p in ps if p.requires_grad]))
    twins.train(hf_loss)
