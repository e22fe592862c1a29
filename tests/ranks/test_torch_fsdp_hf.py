"""A model of transformers, wrapped as FSDP1's scripts do, trains as in a single process and keeps its own methods."""

import functools

import pytest
import torch

from shardkit.integrations.torch_fsdp import FullyShardedDataParallel as FSDP
from shardkit.integrations.torch_fsdp import transformer_auto_wrap_policy
from tests.harness import ranks
from tests.oracle import Twins, compare, ids


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loss(model, rank, step):
    batch = ids(10 * step + rank, 32, 2, 8)
    return model(input_ids=batch, labels=batch).loss


@ranks(2, timeout=300.0)
def test_a_llama_trains_generates_and_is_saved(rank, world, tmp_path):
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    twins = Twins(rank, world, llama, wrap=lambda m: FSDP(m, auto_wrap_policy=policy))
    twins.train(loss, 2, rtol=5e-6)
    assert isinstance(twins.model.module, LlamaForCausalLM) and len(FSDP.fsdp_modules(twins.model)) == 3
    compare("state dict", dict(twins.model.state_dict()), dict(twins.ref.state_dict()), 5e-5)
    prompt = ids(5, 32, 1, 4)
    with torch.no_grad():
        got, want = (m.generate(prompt, max_new_tokens=3, do_sample=False) for m in (twins.model, twins.ref))
    assert torch.equal(got, want)
    twins.model.save_pretrained(tmp_path / "saved")
    torch.distributed.barrier()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    compare("saved", dict(again.state_dict()), dict(twins.model.state_dict()), rtol=0)
