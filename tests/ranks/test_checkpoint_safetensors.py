"""Hugging Face weights: read in pieces, written in pieces, opened with from_pretrained."""

import json
import os

import pytest
import torch
import torch.distributed as dist

import shardkit
from shardkit.checkpoint import safetensors as format
from tests.harness import ranks
from tests.ranks.checkpoint_models import Block, assert_same, build, whole, wrap


def llama(seed=0, tie=True, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tie,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens():
    return torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(3))


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("how", ["save_safetensors", "save_pretrained"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@ranks(2)
def test_from_pretrained_opens_what_a_sharded_model_saved_and_gives_the_same_logits(rank, world, how, tie, tmp_path):
    from transformers import AutoModelForCausalLM

    plain = llama(0, tie)
    want = logits(plain)
    model = shardkit.auto_wrap(llama(0, tie))
    if how == "save_safetensors":
        shardkit.save_safetensors(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened).__name__ == "LlamaForCausalLM"
    assert_same(opened.state_dict(), plain.state_dict())
    assert torch.equal(logits(opened.eval()), want)
    names = set(format.SafetensorsFolder(tmp_path).tensors)
    assert ("lm_head.weight" in names) is not tie
    torch.testing.assert_close(logits(model), want)


@ranks(4)
def test_weights_load_from_several_files_with_an_index_in_pieces(rank, world, tmp_path):
    plain = llama(0)
    if rank == 0:
        plain.save_pretrained(tmp_path, max_shard_size="20KB")
    dist.barrier()
    assert (tmp_path / format.INDEX).exists()
    model = shardkit.auto_wrap(llama(1))
    shardkit.load_safetensors(model, tmp_path)
    assert_same(shardkit.full_state_dict(model), plain.state_dict())


@ranks(2)
def test_several_files_are_written_with_an_index_and_old_ones_go(rank, world, tmp_path):
    from transformers import AutoModelForCausalLM

    model = shardkit.auto_wrap(llama(0))
    shardkit.save_safetensors(model, tmp_path)
    shardkit.save_safetensors(model, tmp_path, file_bytes=8000)
    index = json.loads((tmp_path / format.INDEX).read_text())
    assert set(index["weight_map"].values()) == {p.name for p in tmp_path.glob("*.safetensors")}
    assert not (tmp_path / format.SINGLE).exists()
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), llama(0).state_dict())
    dist.barrier()
    shardkit.save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == [format.SINGLE]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.bfloat16
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@ranks(2)
def test_any_model_round_trips_and_safetensors_reads_it(rank, world, tmp_path):
    from safetensors.torch import load_file

    model = wrap(0)
    shardkit.save_safetensors(model, tmp_path)
    want = {k: v for k, v in build(0).state_dict().items() if k != "head.weight"}
    assert_same(load_file(tmp_path / format.SINGLE), want)
    other = wrap(1, units=(torch.nn.Linear,))
    shardkit.load_safetensors(other, tmp_path)
    assert_same(whole(other), whole(model))


@ranks(4)
def test_replicas_and_subgroups_write_every_byte_once(rank, world, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    model = wrap(0, sharding_strategy="hybrid", device_mesh=mesh)
    shardkit.save_safetensors(model, tmp_path)
    other = wrap(1)
    shardkit.load_safetensors(other, tmp_path)
    assert_same(whole(other), whole(model))


@ranks(2)
def test_a_meta_model_is_filled_from_safetensors(rank, world, tmp_path):
    plain = llama(0)
    if rank == 0:
        plain.save_pretrained(tmp_path)
    dist.barrier()
    with torch.device("meta"):
        model = llama(1)
    model = shardkit.auto_wrap(model)  # the model's own initialiser sets what no checkpoint holds
    shardkit.load_safetensors(model, tmp_path)
    assert_same(shardkit.full_state_dict(model), plain.state_dict())
    torch.testing.assert_close(logits(model), logits(plain))


@ranks(2)
def test_a_rank_reads_only_its_byte_ranges(rank, world, tmp_path):
    from shardkit.checkpoint.load import load_model

    model = shardkit.auto_wrap(
        torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))), policy={torch.nn.Linear}
    )
    shardkit.save_safetensors(model, tmp_path)
    total = (tmp_path / format.SINGLE).stat().st_size
    with format.SafetensorsFolder(tmp_path) as opened:
        load_model(opened, model, True)
        assert opened.reader.bytes_read < 1.03 * total / world, (opened.reader.bytes_read, total)


@ranks(2)
def test_names_that_do_not_fit_are_an_error_on_every_rank(rank, world, tmp_path):
    shardkit.save_safetensors(wrap(0), tmp_path)
    other = build(0)
    del other.cube
    other = shardkit.auto_wrap(other, policy={Block})
    with pytest.raises(shardkit.ConfigError, match="cube"):
        shardkit.load_safetensors(other, tmp_path)
    with pytest.raises(shardkit.CheckpointError, match=r"holds no \*.safetensors"):
        shardkit.load_safetensors(other, tmp_path / "nowhere")


@ranks(2)
def test_save_pretrained_with_a_state_dict_is_a_call_of_one_rank(rank, world, tmp_path):
    model = shardkit.auto_wrap(llama(0))
    state = shardkit.full_state_dict(model, rank0_only=True)
    if rank == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        assert set(format.SafetensorsFolder(tmp_path).tensors) >= {"model.embed_tokens.weight"}
    dist.barrier()
