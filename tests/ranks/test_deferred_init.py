"""Models built on the meta device: the values of an unsharded build, one unit at a time, nothing left to chance."""

import pytest
import torch
import torch.nn as nn

import shardkit
from tests.harness import ranks
from tests.oracle import Block, Net


@ranks(2)
def test_values_equal_those_of_a_model_built_with_the_same_seed(rank, world):
    torch.manual_seed(3)
    built = Net()
    with torch.device("meta"):
        model = Net()
    torch.manual_seed(3)
    shardkit.auto_wrap(model, policy={Block})
    for name, value in shardkit.full_state_dict(model).items():
        assert torch.equal(value, built.state_dict()[name]), name


@ranks(2)
def test_a_transformers_model_gets_its_own_initial_values_and_rotary_tables(rank, world):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shardkit.auto_wrap(model)
    state = shardkit.full_state_dict(model)
    assert torch.equal(state["model.norm.weight"], torch.ones(16))
    assert 0.5 * config.initializer_range < state["model.embed_tokens.weight"].std() < 2 * config.initializer_range
    assert torch.equal(model.model.rotary_emb.inv_freq, LlamaForCausalLM(config).model.rotary_emb.inv_freq)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_parameters_keep_their_identity_so_that_an_optimizer_built_before_trains(rank, world):
    with torch.device("meta"):
        model = Net()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    shardkit.auto_wrap(model, policy={Block})
    before = shardkit.full_state_dict(model)
    model(torch.ones(2, 5)).square().mean().backward()
    optim.step()
    assert any(not torch.equal(v, before[k]) for k, v in shardkit.full_state_dict(model).items())


@ranks(2)
def test_at_most_one_unit_is_whole_at_a_time(rank, world):
    class Watched(nn.Linear):
        whole: list = []

        def reset_parameters(self):
            super().reset_parameters()
            mine = self.weight.numel()
            self.whole.append(sum(p.numel() == mine and not p.is_meta for p in everything))

    everything: list = []
    with torch.device("meta"):
        model = nn.Sequential(*(Watched(64, 64) for _ in range(4)))
    everything += [m.weight for m in model]
    Watched.whole.clear()
    shardkit.auto_wrap(model, policy={Watched})
    assert Watched.whole == [1, 1, 1, 1]


@ranks(2)
def test_what_an_initialiser_forgets_is_an_error(rank, world):
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))

        def reset_parameters(self):
            nn.init.zeros_(self.a)

        def forward(self, x):
            return x * self.a + self.b

    with torch.device("meta"):
        model = Forgetful()
    with pytest.raises(shardkit.ConfigError, match=r"Forgetful\.b .* was not initialised"):
        shardkit.auto_wrap(model)
