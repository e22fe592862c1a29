"""Which modules become units, on models built here and on tiny models of transformers; nothing is trained.

The expected names are written out by hand: they are what a person who knows the architecture would shard.
"""

import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from shardkit.wrap import find_units, size_policy


def names(model, policy="auto", ignored=frozenset()):
    return [name for name, _ in find_units(model, policy, ignored)]


def mlp(*widths):
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))


class Called(nn.Module):
    """A module with a forward and the given children."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return x


class Block(Called):
    def __init__(self, dim=16, hidden=32):
        super().__init__(norm=nn.LayerNorm(dim), up=nn.Linear(dim, hidden), down=nn.Linear(hidden, dim))


class Expert(Called):
    def __init__(self):
        super().__init__(up=nn.Linear(16, 64), down=nn.Linear(64, 16))


class MoELayer(Called):
    def __init__(self):
        super().__init__(attention=nn.Linear(16, 16), gate=nn.Linear(16, 4),
                         experts=nn.ModuleList(Expert() for _ in range(4)))


class Bottleneck(Called):
    def __init__(self, inside, outside, width):
        super().__init__(conv1=nn.Conv2d(inside, width, 1), bn1=nn.BatchNorm2d(width),
                         conv2=nn.Conv2d(width, width, 3), bn2=nn.BatchNorm2d(width),
                         conv3=nn.Conv2d(width, outside, 1), bn3=nn.BatchNorm2d(outside))
        if inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1), nn.BatchNorm2d(outside))


def resnet(depths=(2, 2), classes=10):
    stages, width, inside = {}, 8, 8
    for number, depth in enumerate(depths, 1):
        stages[f"layer{number}"] = nn.Sequential(
            *(Bottleneck(inside if i == 0 else 4 * width, 4 * width, width) for i in range(depth)))
        inside, width = 4 * width, 2 * width
    return Called(conv1=nn.Conv2d(3, 8, 3), bn1=nn.BatchNorm2d(8), **stages, fc=nn.Linear(inside, classes))


def transformer(cls, config_cls, **kwargs):
    pytest.importorskip("transformers")
    import transformers

    return getattr(transformers, cls)(getattr(transformers, config_cls)(**kwargs))


DECODER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TRANSFORMERS = {
    "LlamaForCausalLM": ("LlamaConfig", {**DECODER, "num_key_value_heads": 2, "vocab_size": 128}),
    "MixtralForCausalLM": ("MixtralConfig", {**DECODER, "num_key_value_heads": 2, "vocab_size": 512,
                                             "num_local_experts": 4}),
    "BertForMaskedLM": ("BertConfig", {**DECODER, "vocab_size": 128, "max_position_embeddings": 16}),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 128}),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
                                                "vocab_size": 128}),
}
T5_BLOCKS = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]


@pytest.mark.parametrize(("cls", "tied", "expected"), [
    ("LlamaForCausalLM", True, ["model.layers.0", "model.layers.1"]),
    ("LlamaForCausalLM", False, ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]),
    ("MixtralForCausalLM", True, ["model.layers.0", "model.layers.1"]),
    ("MixtralForCausalLM", False, ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]),
    ("GPT2LMHeadModel", True, ["transformer.h.0", "transformer.h.1"]),
    ("GPT2LMHeadModel", False, ["transformer.wte", "transformer.h.0", "transformer.h.1", "lm_head"]),
    ("BertForMaskedLM", True, ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    ("BertForMaskedLM", False, ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1",
                                "cls.predictions.decoder"]),
    ("T5ForConditionalGeneration", True, T5_BLOCKS),
])
def test_auto_takes_blocks_and_untied_embeddings_of_transformers(cls, tied, expected):
    config_cls, kwargs = TRANSFORMERS[cls]
    assert names(transformer(cls, config_cls, **kwargs, tie_word_embeddings=tied)) == expected


def test_auto_leaves_the_embedding_that_the_stacks_of_a_t5_share_to_the_model_and_takes_an_untied_head():
    config_cls, kwargs = TRANSFORMERS["T5ForConditionalGeneration"]
    model = transformer("T5ForConditionalGeneration", config_cls, **kwargs)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # its config ties, whatever one asks
    assert names(model) == [*T5_BLOCKS, "lm_head"]


def test_auto_takes_the_only_layer_of_a_one_layer_model():
    kwargs = {**TRANSFORMERS["LlamaForCausalLM"][1], "num_hidden_layers": 1}
    assert names(transformer("LlamaForCausalLM", "LlamaConfig", **kwargs, tie_word_embeddings=True)) == [
        "model.layers.0"]


def test_auto_finds_the_blocks_below_a_lora_wrapper():
    peft = pytest.importorskip("peft")
    model = transformer("LlamaForCausalLM", "LlamaConfig", **TRANSFORMERS["LlamaForCausalLM"][1],
                        tie_word_embeddings=True)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert names(model) == ["base_model.model.model.layers.0", "base_model.model.model.layers.1"]


def test_auto_finds_undeclared_blocks_beside_declared_ones():
    encoder = Called(layers=nn.ModuleList(Block() for _ in range(2)), head=nn.Linear(16, 2))
    encoder._no_split_modules = ["Block"]
    model = Called(encoder=encoder, decoder=nn.ModuleList(MoELayer() for _ in range(2)))
    assert names(model) == ["encoder.layers.0", "encoder.layers.1", "decoder.0", "decoder.1"]


def test_auto_looks_past_a_list_whose_elements_contain_declared_blocks():
    towers = nn.ModuleList(Called(layers=nn.ModuleList(Block() for _ in range(2)), head=nn.Linear(16, 2))
                           for _ in range(2))
    model = Called(towers=towers)
    assert names(model) == ["towers.0", "towers.1"]
    model._no_split_modules = {"Block"}
    assert names(model) == [f"towers.{i}.layers.{j}" for i in range(2) for j in range(2)]


def test_auto_takes_the_outermost_of_declared_classes():
    model = Called(layers=nn.ModuleList(MoELayer() for _ in range(2)))
    model._no_split_modules = ["Expert", "MoELayer"]
    assert names(model) == ["layers.0", "layers.1"]


def test_auto_takes_the_bottlenecks_of_a_resnet():
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert names(resnet()) == blocks
    assert names(resnet(classes=1000)) == [*blocks, "fc"]  # a head larger than the blocks
    assert names(resnet(depths=(1, 1))) == ["layer1.0", "layer2.0"]


def test_auto_takes_the_blocks_of_a_vit_and_leaves_its_small_parts_to_the_model():
    vit = Called(patch=nn.Conv2d(3, 16, 2), blocks=nn.Sequential(*(Block() for _ in range(3))), norm=nn.LayerNorm(16),
                 head=nn.Linear(16, 10))
    vit.position = nn.Parameter(torch.zeros(1, 65, 16))
    assert names(vit) == ["blocks.0", "blocks.1", "blocks.2"]


def test_auto_takes_whole_layers_of_a_mixture_of_experts():
    model = Called(layers=nn.ModuleList(MoELayer() for _ in range(3)))
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_auto_takes_layers_of_torch_transformers():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2)
    assert names(encoder) == ["layers.0", "layers.1"]
    assert names(nn.Transformer(16, 2, 1, 2, 32)) == ["encoder.layers.0", "decoder.layers.0", "decoder.layers.1"]


def test_auto_takes_the_linears_of_a_toy_mlp_and_leaves_its_norms():
    assert names(mlp(8, 8, 8)) == ["0", "2"]
    assert names(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))) == ["0", "2"]
    assert names(nn.Sequential(mlp(8, 8), mlp(8, 8))) == ["0.0", "1.0"]


def test_auto_takes_the_large_leaves_of_a_model_without_lists():
    model = Called(embed=nn.Embedding(1000, 16), norm=nn.LayerNorm(16), body=nn.Linear(16, 64), head=nn.Linear(16, 2))
    assert names(model) == ["embed", "body"]


def test_auto_sees_a_dictionary_of_parts_as_parts_not_as_blocks():
    # The layout of nanoGPT: the embeddings are neighbours of the list of blocks, and one of them is tied to the head.
    head = nn.Linear(16, 512, bias=False)
    parts = nn.ModuleDict({"wte": nn.Embedding(512, 16), "wpe": nn.Embedding(8, 16),
                           "h": nn.ModuleList(Block() for _ in range(2))})
    model = Called(transformer=parts, head=head)
    assert names(model) == ["transformer.wte", "transformer.h.0", "transformer.h.1", "head"]
    parts["wte"].weight = head.weight
    assert names(model) == ["transformer.h.0", "transformer.h.1"]


def test_auto_leaves_tied_elements_of_a_list_to_the_model():
    model = nn.Sequential(nn.Linear(16, 64, bias=False), Block(), Block(), nn.Linear(16, 64, bias=False))
    assert names(model) == ["0", "1", "2", "3"]
    model[3].weight = model[0].weight
    assert names(model) == ["1", "2"]


def test_auto_ignores_classes_that_hold_less_than_one_percent():
    adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    assert names(Called(blocks=nn.ModuleList(Block(64, 256) for _ in range(2)), adapters=adapters)) == [
        "blocks.0", "blocks.1"]


def test_a_block_that_is_listed_many_times_is_one_unit():
    shared = Block()
    assert names(Called(layers=nn.ModuleList([shared] * 4))) == ["layers.0"]


def test_a_list_that_is_registered_twice_is_not_a_repetition():
    body = nn.Sequential(Called(inner=nn.Linear(16, 16), other=nn.Linear(16, 16)))
    assert names(Called(first=Called(body=body), second=Called(body=body))) == names(Called(first=Called(body=body)))


def test_children_come_before_parents_and_each_module_once():
    shared = nn.Linear(16, 16)
    model = Called(first=shared, second=Called(inner=Called(again=shared, own=nn.Linear(16, 16)),
                                               weight=nn.Linear(4, 4)))
    units = find_units(model, lambda module: True)
    assert [name for name, _ in units] == ["first", "second.inner.own", "second.weight"]
    units = find_units(model, {Called, nn.Linear})
    position = {module: index for index, (_, module) in enumerate(units)}
    assert len(position) == len(units)
    assert all(position[below] <= position[module] for module in position for below in module.modules()
               if below in position)
    assert all(model.get_submodule(name) is module for name, module in units)


@pytest.mark.parametrize("policy", [{Block}, (Block,), [Block], frozenset({Block}), {Called},
                                    lambda module: isinstance(module, Block)])
def test_classes_and_predicates_select_every_instance_below_the_model(policy):
    model = nn.Sequential(Block(), nn.Linear(16, 16), nn.ModuleList([Block()]))
    assert names(model, policy) == ["0", "2.0"]
    assert names(Block(), policy) == []


def test_none_means_no_nested_units():
    assert names(resnet(), None) == []


def test_a_module_without_parameters_left_for_it_is_no_unit():
    model = Called(only_nested=Called(linear=nn.Linear(4, 4)), plain=nn.ReLU(), some=Block())
    assert names(model, lambda module: isinstance(module, Called | nn.Linear | nn.ReLU)) == [
        "only_nested.linear", "some.up", "some.down", "some"]
    assert names(model, {Called, nn.ReLU}) == ["only_nested", "some"]


@pytest.mark.parametrize("policy", ["auto", {Called, nn.Linear}, lambda module: True, size_policy(1)])
def test_ignored_modules_and_all_below_are_never_units_and_their_parameters_do_not_count(policy):
    model = Called(layers=nn.ModuleList(Block() for _ in range(3)), outer=Called(inner=nn.Linear(64, 64)))
    units = names(model, policy, {model.layers[1], model.outer.inner})
    assert units and not any(name.startswith(("layers.1", "outer")) for name in units)
    assert names(model, policy, {model}) == []


def test_containers_without_forward_are_never_units_but_sequentials_may_be():
    model = Called(lists=nn.ModuleList([nn.Linear(4, 4)]), table=nn.ModuleDict({"a": nn.Linear(4, 4)}),
                   params=nn.ParameterList([nn.Parameter(torch.zeros(4, 4))]), seq=mlp(4, 4))
    assert names(model, lambda module: not isinstance(module, nn.Linear)) == ["seq"]
    assert "params" not in names(model, size_policy(1))
    patched = nn.ModuleList([nn.Linear(4, 4)])
    patched.forward = lambda x: x
    assert names(Called(patched=patched), lambda module: module is patched) == ["patched"]


def test_modules_whose_weights_are_read_from_above_are_never_units():
    attention = Called(attention=nn.MultiheadAttention(8, 2))
    assert names(attention, {nn.Linear, nn.MultiheadAttention}) == ["attention"]
    assert names(attention, lambda module: True) == names(attention, size_policy(1)) == ["attention"]
    layer = Called(layer=nn.TransformerEncoderLayer(8, 2, 16))
    assert names(layer, lambda module: True) == ["layer"]
    normed = Called(normed=parametrizations.weight_norm(nn.Linear(8, 8)))
    assert names(normed, lambda module: True) == names(normed) == ["normed"]


def test_size_policy_adds_small_modules_up_leaves_first():
    # A Linear(10, 10) without bias has 100 parameters.
    linear = [nn.Linear(10, 10, bias=False) for _ in range(5)]
    model = Called(large=nn.Linear(30, 10, bias=False),
                   pair=Called(a=linear[0], b=linear[1], c=nn.Linear(20, 10, bias=False)),
                   single=Called(a=linear[2]), rest=Called(a=linear[3], b=linear[4]))
    assert names(model, size_policy(100)) == ["large", "pair.a", "pair.b", "pair.c", "single.a", "rest.a", "rest.b"]
    assert names(model, size_policy(200)) == ["large", "pair.c", "pair", "rest"]
    assert names(model, size_policy(300)) == ["large", "pair"]
    assert names(model, size_policy(401)) == []


def test_size_policy_counts_a_shared_parameter_once():
    embed, head = nn.Embedding(10, 10), nn.Linear(10, 10, bias=False)
    head.weight = embed.weight
    assert names(Called(embed=embed, head=head), size_policy(100)) == ["embed"]
    assert names(Called(both=Called(embed=embed, head=head)), size_policy(101)) == []


@pytest.mark.parametrize("number", [0, -5, 1.5, "1e8", None, float("nan"), float("inf")])
def test_size_policy_refuses_what_is_not_a_number_of_parameters(number):
    with pytest.raises(ValueError, match="whole number of parameters"):
        size_policy(number)


@pytest.mark.parametrize(("policy", "words"), [
    ("blocks", "'blocks' is not a policy"),
    ({"Block"}, "'Block', which is not a subclass of nn.Module"),
    ([Block()], "not their names or instances"),
    ({int}, "not a subclass"),
    (set(), "empty set"),
    (Block, r"put it into a set: \{Block\}"),
    ({"a": Block}, "is not a policy"),
    (3, "policy=3 is not a policy"),
    (nn.Linear(1, 1), "is not a policy"),
])
def test_other_policies_are_refused_with_the_choices(policy, words):
    with pytest.raises(ValueError, match=words) as caught:
        find_units(resnet(), policy)
    assert "shardkit.size_policy(n)" in str(caught.value)


def test_a_class_set_that_selects_nothing_warns_with_the_blocks_there_are():
    with pytest.warns(UserWarning, match=r"\{MoELayer\} selects no module of Called.*make units: Bottleneck"):
        assert names(resnet(), {MoELayer}) == []
    with pytest.warns(UserWarning, match="no repeated blocks"):
        assert names(nn.Linear(2, 2), {MoELayer}) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names(resnet(), {Bottleneck})
        names(Block(), {Block})  # the model itself is what was asked for


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_script_modules_are_refused_as_model_or_unit_only():
    scripted = torch.jit.script(nn.Linear(4, 4))
    model = Called(scripted=scripted, other=nn.Linear(4, 4))
    for refused in (scripted, torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))):
        with pytest.raises(ValueError, match="the model is a torch.jit.ScriptModule"):
            find_units(refused, None)
    for policy in (lambda module: True, size_policy(1)):
        with pytest.raises(ValueError, match="unit 'scripted' is a torch.jit.ScriptModule"):
            find_units(model, policy)
    assert names(model, lambda module: module is model.other) == ["other"]
    assert names(model, lambda module: True, {scripted}) == ["other"]


def test_parameters_on_the_meta_device_are_enough():
    with torch.device("meta"):
        assert names(resnet()) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
