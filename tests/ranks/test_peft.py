"""LoRA through `peft`: adapters and frozen base weights in the same units."""

import copy

import torch

import shardkit
from tests.harness import ranks


def _llama_with_adapters():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), adapters)


@ranks(2)
def test_adapters_train_and_merge_as_in_one_process_and_only_they_cost_gradients(rank, world):
    twin = _llama_with_adapters()
    model = shardkit.auto_wrap(copy.deepcopy(twin))
    optims = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 0.01) for m in (model, twin)]
    for step in range(3):
        for optim in optims:
            optim.zero_grad()
        ids = [torch.arange(6)[None] + 3 * step + r for r in range(world)]
        model(input_ids=ids[rank], labels=ids[rank]).loss.backward()
        for r in range(world):
            (twin(input_ids=ids[r], labels=ids[r]).loss / world).backward()
        for optim in optims:
            optim.step()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    state = shardkit.full_state_dict(model)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7, msg=name)

    with torch.no_grad():
        apart = model(input_ids=ids[0]).logits
    with model.summon_full_params():
        model.merge_adapter()
    twin.merge_adapter()
    with torch.no_grad():
        merged, want = model(input_ids=ids[0]).logits, twin(input_ids=ids[0]).logits
    torch.testing.assert_close(merged, want, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(merged, apart, rtol=1e-5, atol=1e-5)
