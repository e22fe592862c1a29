"""What Accelerate's FSDP settings mean to shardkit, in both of their vocabularies, and how they are presented."""

import json
import os
import unittest.mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import CPUOffload as TorchCPUOffload
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

import shardkit
from shardkit import api
from shardkit.errors import ConfigError


@pytest.fixture(autouse=True)
def ours():
    """Every FSDP setting means shardkit, and the environment says nothing."""
    import shardkit.accelerate

    with unittest.mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("FSDP_", "SHARDKIT_", "ACCELERATE_"))]:
            del os.environ[name]
        shardkit.accelerate.install()
        yield shardkit.accelerate
        shardkit.accelerate.uninstall()


def from_environment(**variables):
    """The plugin that Accelerate makes of `FSDP_*` variables."""
    from accelerate import FullyShardedDataParallelPlugin

    os.environ.update({f"FSDP_{name}": value for name, value in variables.items()})
    return FullyShardedDataParallelPlugin()


def stock(**fields):
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(**fields)


def own(**options):
    from shardkit.accelerate import ShardkitPlugin

    return ShardkitPlugin(**options)


def checked(plugin, model=None, precision="no"):
    """The options that a model would be sharded with, after all checks."""
    options = plugin.options_for(model or nn.Linear(2, 2), torch.device("cpu"), precision)
    options.pop("ignored_modules", None)
    options.pop("process_group", None)
    return api._options(options)


# ------------------------------------------------------------------------------------------------------ strategy

NAMES = {
    "FULL_SHARD": "full", "1": "full", "full_shard": "full",
    "SHARD_GRAD_OP": "grad_op", "2": "grad_op", "shard_grad_op": "grad_op",
    "NO_SHARD": "none", "3": "none",
    "HYBRID_SHARD": "hybrid", "4": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid_grad_op", "5": "hybrid_grad_op", "_HYBRID_SHARD_ZERO2": "hybrid_grad_op",
    "zero1": "zero1", "zero2": "zero2", "none": "none", "hybrid": "hybrid",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_has_any_of_its_names(name):
    assert checked(from_environment(SHARDING_STRATEGY=name)).strategy.name == NAMES[name]
    assert checked(stock(sharding_strategy=name)).strategy.name == NAMES[name]
    assert checked(own(sharding_strategy=name)).strategy.name == NAMES[name]


@pytest.mark.parametrize("member", list(ShardingStrategy))
def test_a_strategy_may_be_torchs(member):
    for make in (stock, own):
        assert checked(make(sharding_strategy=member)).strategy.name == NAMES[member.name]
        assert checked(make(reshard_after_forward=member)).strategy.name == NAMES[member.name]


# The launcher exports FULL_SHARD and true for whatever the YAML leaves out.
RESHARDING = [
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "true"}, "full", True),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "false"}, "full", False),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "False"}, "full", False),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "full_shard"}, "full", True),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, "grad_op", False),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "2"}, "grad_op", False),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "NO_RESHARD"}, "full", False),
    ({"SHARDING_STRATEGY": "FULL_SHARD", "RESHARD_AFTER_FORWARD": "hybrid_shard"}, "hybrid", True),
    ({"SHARDING_STRATEGY": "SHARD_GRAD_OP", "RESHARD_AFTER_FORWARD": "true"}, "grad_op", False),
    ({"SHARDING_STRATEGY": "HYBRID_SHARD", "RESHARD_AFTER_FORWARD": "false"}, "hybrid", False),
    ({"SHARDING_STRATEGY": "None", "RESHARD_AFTER_FORWARD": "true"}, "full", True),
    ({}, "full", True),
]


@pytest.mark.parametrize("variables, strategy, drops", RESHARDING)
def test_both_vocabularies_say_whether_parameters_are_dropped_after_forward(variables, strategy, drops):
    plugin = from_environment(**variables)
    options = checked(plugin)
    assert (options.strategy.name, options.drop_after_forward) == (strategy, drops)
    assert plugin.reshard_after_forward is drops


def test_resharding_over_neighbours_is_a_number_of_ranks():
    assert checked(own(reshard_after_forward=4)).near == 4
    os.environ["SHARDKIT_OPTIONS"] = '{"reshard_after_forward": 2}'
    assert checked(stock()).near == 2


@pytest.mark.parametrize("name", ["bogus", "6", "0"])
def test_a_strategy_that_nobody_knows_is_refused(name):
    with pytest.raises(ConfigError, match="not known"):
        from_environment(SHARDING_STRATEGY=name)
    with pytest.raises(ConfigError, match="not known"):
        own(sharding_strategy=name)


# ------------------------------------------------------------------------------------- offload, prefetch, recompute


@pytest.mark.parametrize(
    "value, offloads",
    [
        (True, True), (False, False), (TorchCPUOffload(offload_params=True), True), (TorchCPUOffload(), False),
        (CPUOffloadPolicy(), True), (OffloadPolicy(), False), (shardkit.CPUOffload(pin_memory=False), True),
    ],
)  # fmt: skip
def test_offload_is_a_switch_or_an_object_of_anybodys(value, offloads):
    plugin = own(cpu_offload=value)
    assert bool(checked(plugin).cpu_offload) is offloads
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy if offloads else OffloadPolicy)
    if isinstance(value, shardkit.CPUOffload):
        assert checked(plugin).cpu_offload == value


@pytest.mark.parametrize("text, offloads", [("true", True), ("True", True), ("false", False), ("1", True)])
def test_offload_comes_from_the_environment(text, offloads):
    assert bool(checked(from_environment(OFFLOAD_PARAMS=text)).cpu_offload) is offloads


@pytest.mark.parametrize(
    "value, prefetches",
    [
        ("BACKWARD_PRE", True), ("BACKWARD_POST", True), ("1", True), ("NO_PREFETCH", False), ("no_prefetch", False),
        (BackwardPrefetch.BACKWARD_PRE, True), (True, True), (False, False), (None, True),
    ],
)  # fmt: skip
def test_backward_prefetch(value, prefetches):
    assert checked(own(backward_prefetch=value)).backward_prefetch is prefetches
    assert checked(stock(backward_prefetch=value)).backward_prefetch is prefetches
    if isinstance(value, str):
        assert checked(from_environment(BACKWARD_PREFETCH=value)).backward_prefetch is prefetches


def test_forward_prefetch_is_shardkits_where_shardkit_is_asked():
    assert checked(from_environment(FORWARD_PREFETCH="false")).forward_prefetch  # what the launcher always exports
    assert not checked(own(forward_prefetch=False)).forward_prefetch
    os.environ["SHARDKIT_OPTIONS"] = '{"forward_prefetch": false}'
    assert not checked(stock()).forward_prefetch


def test_activation_checkpointing():
    def recomputed(plugin):
        return checked(plugin).activation_checkpointing

    assert recomputed(from_environment(ACTIVATION_CHECKPOINTING="false")) is None
    assert recomputed(from_environment(ACTIVATION_CHECKPOINTING="true")) == shardkit.ActivationCheckpointing()
    with_offload = from_environment(ACTIVATION_CHECKPOINTING="true", ACTIVATION_CHECKPOINTING_OFFLOAD="true")
    assert recomputed(with_offload) == shardkit.ActivationCheckpointing(offload_to_cpu=True)
    del os.environ["FSDP_ACTIVATION_CHECKPOINTING"], os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
    assert recomputed(own(activation_checkpointing=0.5)).where == 0.5
    assert recomputed(own(activation_checkpointing={nn.Linear})).where == {nn.Linear}
    mine = shardkit.ActivationCheckpointing(use_reentrant=True)
    assert recomputed(own(activation_checkpointing=mine)) is mine
    assert own(activation_checkpointing=mine).activation_checkpointing is True


def test_activation_checkpointing_may_be_set_in_a_plugin_that_is_there():
    """As Trainer does before transformers 5.20 or so."""
    plugin = stock()
    plugin.activation_checkpointing = True
    assert checked(plugin).activation_checkpointing == shardkit.ActivationCheckpointing()
    plugin = own(activation_checkpointing=0.5)
    plugin.activation_checkpointing = "false"
    assert checked(plugin).activation_checkpointing is None


# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "variables, value",
    [
        ({}, True), ({"SYNC_MODULE_STATES": "true"}, True), ({"SYNC_MODULE_STATES": "false"}, False),
        ({"CPU_RAM_EFFICIENT_LOADING": "true", "SYNC_MODULE_STATES": "true"}, "differing"),
        ({"CPU_RAM_EFFICIENT_LOADING": "false", "SYNC_MODULE_STATES": "true"}, True),
    ],
)  # fmt: skip
def test_weights_come_from_the_first_rank_unless_that_is_switched_off(variables, value):
    plugin = from_environment(**variables)
    assert plugin.wrap_options["sync_module_states"] == value
    assert plugin.sync_module_states is None  # set, it needs an accelerator that is no CPU
    assert own(sync_module_states="differing").wrap_options["sync_module_states"] == "differing"


BF16, FP32 = torch.bfloat16, torch.float32
PRECISIONS = [
    ({"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32}, {"output_dtype": FP32}),
    ({"param_dtype": BF16, "reduce_dtype": FP32, "buffer_dtype": FP32}, {"buffer_dtype": FP32}),
    ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, {}),
    (TorchMixedPrecision(BF16, FP32, FP32), {"buffer_dtype": FP32, "cast_forward_inputs": False}),
    (MixedPrecisionPolicy(BF16, FP32, FP32), {"output_dtype": FP32}),
    (shardkit.MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, keep_fp32=(nn.LayerNorm,)),
     {"keep_fp32": (nn.LayerNorm,)}),
    ("bf16", {"reduce_dtype": BF16, "output_dtype": BF16}),
]  # fmt: skip


@pytest.mark.parametrize("policy, more", PRECISIONS, ids=lambda value: type(value).__name__)
def test_mixed_precision_is_text_a_dictionary_or_an_object_of_anybodys(policy, more):
    want = shardkit.MixedPrecision(**{"param_dtype": BF16, "reduce_dtype": FP32, **more})
    for plugin in (stock(mixed_precision_policy=policy), own(mixed_precision_policy=policy)):
        assert checked(plugin).mixed_precision == want
        plugin.set_mixed_precision("bf16")  # Accelerator(mixed_precision="bf16"): what was asked for stays
        assert checked(plugin, precision="bf16").mixed_precision == want
        assert isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy)


def test_mixed_precision_of_the_accelerator_only_concerns_computing():
    plugin = stock()
    plugin.set_mixed_precision("bf16")
    assert checked(plugin, precision="bf16").mixed_precision == shardkit.MixedPrecision(param_dtype=BF16)
    assert isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy)
    os.environ["SHARDKIT_OPTIONS"] = '{"mixed_precision": "bf16"}'
    assert checked(stock()).mixed_precision == shardkit.MixedPrecision(param_dtype=BF16)
    os.environ["SHARDKIT_OPTIONS"] = '{"mixed_precision": "bf17"}'
    with pytest.raises(ConfigError, match="bf17"):
        stock()


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_state_dict_types(kind):
    member = StateDictType[f"{kind}_STATE_DICT"]
    assert from_environment(STATE_DICT_TYPE=member.name).state_dict_type is member
    for value in (member.name, member.name.lower(), str(member.value), member):
        plugin = stock(state_dict_type=value)
        assert plugin.state_dict_type is member and plugin.fsdp_version == 2
        assert type(plugin.state_dict_config).__name__.startswith(kind.title())
    other = "SHARDED_STATE_DICT" if kind == "FULL" else "FULL_STATE_DICT"
    plugin.set_state_dict_type(other)
    assert plugin.state_dict_type.name == other and not type(plugin.state_dict_config).__name__.startswith(kind.title())


@pytest.mark.parametrize("value", ["LOCAL_STATE_DICT", "local_state_dict", "2", StateDictType.LOCAL_STATE_DICT])
def test_local_state_dicts_are_refused(value):
    with pytest.raises(ConfigError, match="SHARDED_STATE_DICT"):
        stock(state_dict_type=value)
    plugin = stock()
    with pytest.raises(ConfigError):
        plugin.set_state_dict_type(value)
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT  # without a word, as in version 2


# --------------------------------------------------------------------------------------------------------- units


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Head()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def units(plugin):
    from shardkit.wrap import find_units

    model = Net()
    return [name for name, _ in find_units(model, plugin.units(model), set())]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
FOUND = [*BLOCKS, "head.out"]  # by shardkit, which makes a unit of an output projection
WRAPPING = [
    ({}, FOUND),
    ({"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, FOUND),
    ({"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "Block"}, BLOCKS),
    ({"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "Block, Head"}, [*BLOCKS, "head"]),
    ({"AUTO_WRAP_POLICY": "transformer_based_wrap", "TRANSFORMER_CLS_TO_WRAP": "Head,Other"}, ["head"]),
    ({"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "35"}, BLOCKS),
    ({"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "0"}, FOUND),
    ({"AUTO_WRAP_POLICY": "NO_WRAP"}, []),
]


@pytest.mark.parametrize("variables, names", WRAPPING)
def test_units_are_what_the_policy_names_or_what_shardkit_finds(variables, names):
    plugin = from_environment(**variables)
    assert units(plugin) == names
    presented = {"TRAN": transformer_auto_wrap_policy, "SIZE": size_based_auto_wrap_policy}
    assert plugin.auto_wrap_policy is presented.get(variables.get("AUTO_WRAP_POLICY", "")[:4].upper())


def test_units_may_be_given_by_torchs_policy_or_shardkits():
    import functools

    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Head})
    assert units(stock(auto_wrap_policy=by_class)) == ["head"]
    assert units(stock(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Head"])) == ["head"]
    assert units(own(policy={Head})) == ["head"]
    assert units(own(policy="auto", auto_wrap_policy="NO_WRAP")) == FOUND


def test_class_names_that_no_module_has_are_refused_with_those_that_there_are():
    plugin = from_environment(AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", TRANSFORMER_CLS_TO_WRAP="LlamaLayer")
    with pytest.raises(ConfigError, match=r"LlamaLayer.*Net has no such.*Block, Head"):
        units(plugin)


def test_ignored_modules_are_named_by_a_pattern_or_given():
    def ignored(plugin, model):
        given = plugin.options_for(model, torch.device("cpu"), "no").get("ignored_modules")
        return given and [name for name, module in model.named_modules() if module in given]

    model = Net()
    assert ignored(from_environment(IGNORED_MODULES=r"blocks\.\d\.b"), model) == [f"{block}.b" for block in BLOCKS]
    assert ignored(stock(ignored_modules="head"), model) == ["head"]  # all of the name
    del os.environ["FSDP_IGNORED_MODULES"]
    assert ignored(own(ignored_modules=[model.head]), model) == ["head"]
    assert ignored(stock(), model) is None


# -------------------------------------------------------------------------------------------------- own options


def test_own_options_go_through_the_constructor_and_the_environment():
    plugin = own(sharding_strategy="zero2", activation_offload=True, check_order=False, no_sync=True)
    options = checked(plugin)
    assert options.strategy.name == "zero2" and options.activation_offload is not None and not options.check_order
    assert plugin.no_sync and not own().no_sync
    os.environ["SHARDKIT_OPTIONS"] = json.dumps(
        {"sharding_strategy": "zero1", "no_sync": True, "mixed_precision": {"param_dtype": "bfloat16"}}
    )
    plugin = from_environment(SHARDING_STRATEGY="FULL_SHARD", VERSION="shardkit")
    assert checked(plugin).strategy.name == "zero1" and plugin.no_sync
    assert checked(plugin).mixed_precision == shardkit.MixedPrecision(param_dtype=BF16)
    assert checked(own(sharding_strategy="zero2")).strategy.name == "zero2"  # the script has the last word


@pytest.mark.parametrize("text", ["[1]", "{sharding_strategy: zero2}", '"zero2"', "zero2"])
def test_options_that_are_no_json_object_are_refused(text):
    os.environ["SHARDKIT_OPTIONS"] = text
    with pytest.raises(ConfigError, match="SHARDKIT_OPTIONS must hold JSON such as"):
        stock()


@pytest.mark.parametrize("name", ["stage", "device_id"])
def test_options_that_shardkit_does_not_have_are_refused_with_those_that_it_has(name):
    with pytest.raises(ConfigError, match=f"no option {name} .*activation_offload"):
        own(**{name: 2})
    os.environ["SHARDKIT_OPTIONS"] = json.dumps({name: 2})
    with pytest.raises(ConfigError, match=f"no option {name} "):
        stock()


# ------------------------------------------------------------------------------- what the launcher makes of a YAML

COMMON = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "FSDP", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 2, "rdzv_backend": "static", "same_network": True, "tpu_env": [],
    "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
# As `accelerate config` writes them.
VERSION_1 = {
    "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True, "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False, "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "Block,Head", "fsdp_use_orig_params": True, "fsdp_version": 1,
}  # fmt: skip
BEFORE_1_6 = {**VERSION_1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "NO_PREFETCH"}
del BEFORE_1_6["fsdp_version"], BEFORE_1_6["fsdp_reshard_after_forward"]
VERSION_2 = {
    "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False, "fsdp_reshard_after_forward": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_transformer_layer_cls_to_wrap": "Block,Head", "fsdp_version": 2,
}  # fmt: skip


def launched(folder, fsdp, **changes):
    """The variables that `accelerate launch` starts the processes with."""
    import yaml
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    (folder / "fsdp.yaml").write_text(yaml.safe_dump({**COMMON, "fsdp_config": fsdp, **changes}))
    args = launch.launch_command_parser().parse_args(["--config_file", str(folder / "fsdp.yaml"), "train.py"])
    args, *_ = launch._validate_launch_command(args)
    assert args.use_fsdp
    return prepare_multi_gpu_env(args)


@pytest.mark.parametrize(
    "fsdp, strategy, prefetches",
    [(VERSION_1, "grad_op", True), (BEFORE_1_6, "grad_op", False), (VERSION_2, "full", True)],
    ids=["1", "before 1.6", "2"],
)
@pytest.mark.parametrize("word", [False, True])
def test_yaml_files_as_accelerate_config_writes_them(ours, tmp_path, fsdp, strategy, prefetches, word):
    if word:
        fsdp = {**fsdp, "fsdp_version": "shardkit"}
        ours.uninstall()
        ours.install(always=False)
    os.environ.update(launched(tmp_path, fsdp))
    assert os.environ["FSDP_VERSION"] == str(fsdp.get("fsdp_version", 1))
    plugin = stock()
    options = checked(plugin)
    assert isinstance(plugin, ours.ShardkitPlugin)
    assert (options.strategy.name, options.drop_after_forward) == (strategy, False)
    assert options.backward_prefetch is prefetches and options.forward_prefetch
    assert options.activation_checkpointing == shardkit.ActivationCheckpointing()
    assert options.sync_module_states == "differing" and not options.cpu_offload
    assert units(plugin) == [*BLOCKS, "head"]
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT


def test_what_is_presented_is_version_2_in_torchs_types_without_a_warning(ours, caplog, recwarn):
    os.environ.update({"FSDP_VERSION": "shardkit", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"})
    from_environment(
        SHARDING_STRATEGY="SHARD_GRAD_OP", FORWARD_PREFETCH="true", USE_ORIG_PARAMS="true", SYNC_MODULE_STATES="true",
        OFFLOAD_PARAMS="true", CPU_RAM_EFFICIENT_LOADING="true",
    )  # fmt: skip
    plugin = stock(
        sharding_strategy="SHARD_GRAD_OP", forward_prefetch=True, use_orig_params=True, sync_module_states=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE, cpu_offload=TorchCPUOffload(offload_params=True),
        limit_all_gathers=True, mixed_precision_policy=TorchMixedPrecision(BF16),
    )  # fmt: skip
    plugin.set_mixed_precision("bf16")
    assert not caplog.records and not [str(w.message) for w in recwarn if "torch" not in str(w.category)]
    assert plugin.fsdp_version == 2 and type(plugin.fsdp_version) is int
    assert plugin.reshard_after_forward is False and plugin.sharding_strategy is None
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy)
    assert plugin.backward_prefetch is plugin.forward_prefetch is plugin.use_orig_params is None
    assert plugin.param_init_fn is None and plugin.cpu_ram_efficient_loading is True


# ---------------------------------------------------------------------------------------- by way of TrainingArguments


@pytest.mark.parametrize(
    "config, strategy, drops, prefetches",
    [
        ({}, "full", True, True),
        ({"reshard_after_forward": False}, "full", False, True),
        ({"fsdp_reshard_after_forward": "shard_grad_op", "backward_prefetch": "NO_PREFETCH"}, "grad_op", False, False),
        ({"sharding_strategy": "zero2", "backward_prefetch": "backward_pre"}, "zero2", False, True),
        ({"reshard_after_forward": "hybrid_shard", "sync_module_states": "true"}, "hybrid", True, True),
    ],
)
def test_fsdp_config_has_both_vocabularies_and_shardkits(tmp_path, config, strategy, drops, prefetches):
    from transformers import TrainingArguments

    from shardkit.accelerate.trainer import process_fsdp_args

    if not hasattr(TrainingArguments, "_process_fsdp_args"):
        pytest.skip("these releases pass fsdp_config on in the environment, when the Trainer is made")
    arguments = TrainingArguments(output_dir=str(tmp_path))
    arguments.fsdp, arguments.fsdp_config = True, {**config, "version": "shardkit", "activation_offload": True}
    plugin = stock(**process_fsdp_args(TrainingArguments._process_fsdp_args.__wrapped__, arguments))
    options = checked(plugin)
    assert (options.strategy.name, options.drop_after_forward) == (strategy, drops)
    assert options.backward_prefetch is prefetches and options.activation_offload is not None
    assert arguments.fsdp_config["version"] == "shardkit"
