"""`estimate` and `plan`: the engine under fake tensors, at world sizes that no test machine has."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardkit
from shardkit.errors import ConfigError, StateError
from shardkit.simulate import padding, planner, settings
from shardkit.simulate.choice import AUTO, ONE, Choice, Units, granularity
from shardkit.simulate.ledger import ACTIVATIONS, FULL, GRADIENTS, OPTIMIZER, PARAMETERS, REDUCTION, SAVING
from shardkit.simulate.world import no_memory
from shardkit.wrap import find_units
from tests.harness import fake_world

WIDTH, LAYERS, BATCH = 64, 4, 8
P = LAYERS * WIDTH * WIDTH  # parameters


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.relu(self.linear(x))


def build():
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def batch():
    return torch.zeros(BATCH, WIDTH)


def run(**options):
    options = {"world_size": 8, "optimizer": "adamw-fused", "policy": {Block}, **options}
    return shardkit.estimate(build, batch, **options)


@pytest.mark.parametrize("world", [1, 8, 64, 4096])
def test_shards_gradients_and_states_take_their_share_of_the_parameters(world):
    at_step = run(world_size=world).phases["step"].categories
    padded = -(-WIDTH * WIDTH // world) * LAYERS
    assert at_step[PARAMETERS] == at_step[GRADIENTS] == 4 * padded
    # two states a parameter, and a float32 step count for each of its tensors that has elements here
    assert 0 <= at_step[OPTIMIZER] - 8 * padded <= 4 * LAYERS


def test_strategies_hold_what_their_names_promise():
    kept = {
        name: run(sharding_strategy=name).phases["step"].categories for name in ("full", "grad_op", "zero2", "none")
    }
    assert FULL not in kept["full"] and FULL not in kept["grad_op"]
    # The shard lies in the kept buffer and is told apart from it.
    assert (kept["zero2"][PARAMETERS], kept["zero2"][FULL]) == (4 * P // 8, 4 * P * 7 // 8)
    assert kept["none"][PARAMETERS] == 4 * P and kept["none"][OPTIMIZER] >= 8 * P


def test_full_parameters_in_flight_are_a_few_units():
    backward = run().phases["backward"].categories
    assert backward[FULL] <= 3 * 4 * WIDTH * WIDTH
    assert run(sharding_strategy="grad_op").phases["forward"].categories[FULL] == 4 * P


def test_whole_gradients_stay_while_micro_batches_are_accumulated():
    forward = run(accumulate=2, device="cuda").phases["forward"].categories
    assert forward[GRADIENTS] >= 4 * P


def test_checkpointing_keeps_fewer_activations():
    def held(**options):
        # Blocks worth checkpointing: their hidden layer is wide and their input narrow.
        wide = lambda: nn.Sequential(*(Wide() for _ in range(4)))  # noqa: E731
        report = shardkit.estimate(wide, batch, "sgd", policy={Wide}, **options)
        return report.phases["forward"].categories[ACTIVATIONS]

    assert held(activation_checkpointing=True) < 0.5 * held(activation_checkpointing=0.5) < 0.5 * held()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def test_offloaded_shards_gradients_and_states_take_no_gpu_memory():
    report = run(cpu_offload=True)
    for phase in ("forward", "backward", "step"):
        assert not {PARAMETERS, OPTIMIZER} & set(report.phases[phase].categories)
    assert report.phases["step"].total < run().phases["step"].total / 4


def test_a_cpu_rank_reduces_without_a_buffer_and_a_gpu_with_one():
    wide = {"world_size": 2, "policy": {Wide}}
    make = lambda: nn.Sequential(*(Wide() for _ in range(4)))  # noqa: E731
    gpu = shardkit.estimate(make, batch, "sgd", device="cuda", **wide).phases["backward"].categories
    cpu = shardkit.estimate(make, batch, "sgd", device="cpu", **wide).phases["backward"].categories
    assert cpu.get(REDUCTION, 0) < gpu[REDUCTION]


def test_deferred_initialisation_never_holds_the_whole_model():
    assert run(deferred_init=False).phases["init"].total >= 4 * P
    assert run(deferred_init=True, world_size=64).phases["init"].total <= 4 * P / 64 + 2 * 4 * WIDTH * WIDTH


def test_a_mesh_of_replicas_and_shards_splits_by_the_shards():
    at_step = run(sharding_strategy="hybrid", device_mesh=(2, 4)).phases["step"].categories
    assert at_step[PARAMETERS] == 4 * P // 4
    with pytest.raises(ConfigError, match="world_size=8"):
        run(sharding_strategy="hybrid", device_mesh=(3, 4))
    with pytest.raises(ConfigError, match="device_mesh"):
        run(sharding_strategy="hybrid")


def test_mixed_precision_halves_what_is_gathered():
    full = run(sharding_strategy="grad_op").phases["forward"].categories[FULL]
    low = run(sharding_strategy="grad_op", mixed_precision="bf16").phases["forward"].categories[FULL]
    assert low * 2 == full


def test_saving_shards_takes_messages_alone_and_the_first_rank_more_with_more_ranks():
    few, many = run(world_size=8).phases["save"], run(world_size=512).phases["save"]
    assert few.categories[PARAMETERS] == 4 * P // 8 and few.categories[OPTIMIZER] >= 8 * P // 8
    assert GRADIENTS not in few.categories and FULL not in few.categories
    assert 0 < few.categories[SAVING] < many.categories[SAVING], "what every rank wrote is gathered on the first"
    assert run(world_size=512, rank=1).phases["save"].categories[SAVING] < many.categories[SAVING] / 8
    assert SAVING not in run(world_size=1).phases["save"].categories, "nobody to agree with"


def test_an_asynchronous_save_copies_the_state_to_the_host():
    on_gpu, on_cpu = (run(save="async", device=device) for device in ("cuda", "cpu"))
    state = sum(on_gpu.phases["step"].categories[c] for c in (PARAMETERS, OPTIMIZER))
    assert on_gpu.extra["save_host_bytes"] == state
    assert on_gpu.phases["save"].categories.get(SAVING, 0) < 0.1 * state
    assert on_cpu.phases["save"].categories[SAVING] >= state and "save_host_bytes" not in on_cpu.extra


def test_a_whole_state_dict_gathers_one_unit_at_a_time_and_fills_the_first_ranks_host():
    first, other = (run(save="full", rank=rank) for rank in (0, 1))
    assert first.phases["save"].categories[FULL] == other.phases["save"].categories[FULL] == 4 * WIDTH * WIDTH
    assert (first.extra["save_host_bytes"], other.extra["save_host_bytes"]) == (4 * P, 0)
    assert run(save="full", device="cpu").phases["save"].categories[SAVING] == 4 * P


def test_without_saving_the_other_phases_are_the_same():
    without, having = run(save=None).phases, run().phases
    assert {**without, "save": having["save"]} == having
    with pytest.raises(ConfigError, match="save='everything'.*sharded, async, full"):
        run(save="everything")


@pytest.mark.parametrize("optimizer", ["adafactor", "sgd"])
def test_optimizers_whose_state_is_no_shard_or_none_are_saved_as_well(optimizer):
    assert run(optimizer=optimizer).phases["save"].total > 0


def test_units_and_categories_add_up_to_the_total_in_every_phase():
    report = run()
    for moment in report.phases.values():
        assert sum(moment.categories.values()) == moment.total
        assert sum(sum(parts.values()) for parts in moment.units.values()) == moment.total
    assert {"0", "3"} <= set(report.units)
    assert max(sum(row["bytes"].values()) for row in report.timeline) == report.peak
    assert "peak" in str(report)


def test_an_estimate_leaves_nothing_behind():
    run()
    assert not dist.is_initialized()
    first, second = run(), run()
    assert first.phases == second.phases


def test_a_process_that_trains_already_is_told_to_use_another():
    with fake_world(2):
        with pytest.raises(StateError, match="another process"):
            run()
    assert not dist.is_initialized()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


def test_a_model_that_asks_for_values_gets_a_sentence_with_the_line():
    with pytest.raises(
        ConfigError, match=r"Branch asks for the values.*test_simulate_estimate.py:\d+.*shardkit.profile"
    ):
        shardkit.estimate(Branch, torch.zeros(2, 4), world_size=2)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("options", "message"), [
    (dict(rank=8), "rank=8"),
    (dict(device="tpu"), "cuda"),
    (dict(optimizer="adamx"), "adamx"),
    (dict(mixed_precision="int4"), "int4"),
    (dict(sharding_strategy="most"), "most"),
    (dict(overrides={"a": 1}), "overrides"),
])  # fmt: skip
def test_arguments_that_cannot_work_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        run(**options)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("preset", "size", "fields"), [
    ("llama-7b", (1, 64), dict(num_hidden_layers=2)),
    ("mixtral-8x7b", (1, 64), dict(num_hidden_layers=1)),
    ("gpt2", (1, 64), dict(n_layer=2)),
    ("t5-small", (1, 64), dict(num_layers=1)),
    ("vit-base", 2, dict(num_hidden_layers=1)),
    ("resnet-18", 2, {}),
])  # fmt: skip
def test_presets_run_forward_backward_and_step(preset, size, fields):
    pytest.importorskip("transformers")
    options = dict(overrides=fields, deferred_init=True, mixed_precision="bf16", steps=1)
    report = shardkit.estimate(preset, size, world_size=16, **options)
    assert report.peak > 0 and set(report.phases) == {"init", "forward", "backward", "step", "save"}
    assert report.extra["reserved_bytes"] >= report.training_peak


def test_a_model_without_padding_uses_no_mask_as_it_does_with_values():
    transformers = pytest.importorskip("transformers")
    fields = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=64)  # fmt: skip
    config = transformers.LlamaConfig(**fields)
    masking = importlib.import_module("transformers.masking_utils")
    before = masking.is_tracing
    report = shardkit.estimate(config, (1, 512), "sgd", world_size=2)
    assert masking.is_tracing is before
    # A mask would be 512 x 512 for each of 4 heads.
    largest = max(n for unit in report.phases["forward"].units.values() for n in unit.values())
    assert largest < 4 * 512 * 512 * 4


def test_only_masks_of_the_simulation_are_said_to_hide_nothing():
    pytest.importorskip("transformers")
    masking = importlib.import_module("transformers.masking_utils")
    with no_memory() as ours, padding.nothing_masked(ours):
        mask = torch.ones(2, 2)
        assert not masking.is_tracing(mask)
    with FakeTensorMode() as another:
        mask_of_another = torch.ones(2, 2)
        with padding.nothing_masked(ours):
            assert masking.is_tracing(mask_of_another) and not masking.is_tracing(None)
    assert another is not ours


# ------------------------------------------------------------------------------------------------------------- plan


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(q * k * v)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))

    def forward(self, x):
        return x + self.mlp(self.attention(self.norm(x)))


class Language(nn.Module):
    def __init__(self, width=32, layers=4):
        super().__init__()
        self.tokens = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 1000, bias=False)


def test_units_may_be_blocks_alone_parts_of_blocks_or_everything():
    found = granularity(Language())
    assert found.coarser == (Units("blocks alone", classes=("Layer",)), ONE)
    model = Language()
    names = {
        units.name: [name for name, _ in find_units(model, units.policy)]
        for units in (AUTO, found.finer, *found.coarser)
    }
    layers = [f"layers.{i}" for i in range(4)]
    assert sorted(names["auto"]) == ["head", *layers, "tokens"]
    assert names["blocks alone"] == layers and names["the whole model"] == []
    assert len(names["parts of blocks"]) > len(names["auto"]) and "layers.0" not in names["parts of blocks"]
    assert granularity(nn.Linear(4, 4)).coarser == (), "there is nothing to choose"


def test_several_blocks_are_a_unit_where_a_module_holds_them():
    groups, everything = granularity(Stages()).coarser
    assert [name for name, _ in find_units(Stages(), groups.policy)] == ["first", "second"] and everything == ONE


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(*(Wide() for _ in range(4))) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x))


def make_plan(gpu, gpus=4, **options):
    # 0.4 MB of parameters against 200 MB of activations, on GPUs with as much memory as the test says
    return shardkit.plan(
        lambda: nn.Sequential(*(Wide() for _ in range(4))), torch.zeros(8192, WIDTH), gpus, gpu, **options
    )


def test_a_plan_is_ordered_by_time_and_what_it_names_first_fits():
    found = make_plan("t4-16g")
    fitting = [row for row in found.rows if row.fits]
    assert fitting and found.best is fitting[0]
    assert [r.seconds.total for r in fitting] == sorted(r.seconds.total for r in fitting)
    assert all(r.reserved <= found.gpu.usable for r in fitting)
    assert "auto_wrap(model" in found.call() and "fsdp_version: shardkit" in found.yaml()
    assert "fastest that fits" in str(found) and found.to_dict()["fits"] is True


def test_a_plan_checkpoints_where_activations_do_not_fit():
    found = make_plan("t4-0.2g", precision="fp32")
    assert found.best is not None and found.best.choice.recomputed > 0
    assert any("over" in row.reason for row in found.rows)


def test_a_plan_takes_activations_to_the_host_where_that_alone_helps(monkeypatch):
    simulated = []
    monkeypatch.setattr(planner._Search, "_simulate", simulation(simulated, fits=lambda c: c.offload_activations))
    found = make_plan("t4-16g")
    assert found.best.choice.offload_activations and found.best.choice.recomputed < 1
    assert found.best.seconds.activations > 0 and found.best.seconds.total > found.rows[-1].seconds.arithmetic
    assert "activation_offload=True" in found.call() and '"activation_offload": true' in found.launch()
    assert not any(c.offload for c in simulated), "shards went to the host although it was not needed"
    assert simulated[0].strategy != "full" and simulated[1] == dataclasses.replace(simulated[0], strategy="full")
    skipped = [r.choice for r in found.rows if not r.fits and r.live is None]
    assert skipped and not set(skipped) & set(simulated), "what takes more than full sharding is not simulated"


def test_a_plan_makes_units_smaller_where_what_is_in_flight_is_too_much(monkeypatch):
    simulated = []
    fits = lambda c: c.units.name == "parts of blocks"  # noqa: E731
    monkeypatch.setattr(planner._Search, "_simulate", simulation(simulated, fits, activations=0))
    found = shardkit.plan(Runs, torch.zeros(2, 8, dtype=torch.long), 4, "t4-16g")
    assert found.best.choice == dataclasses.replace(found.best.choice, strategy="full", units=found.best.choice.units)
    assert f"shardkit.size_policy({found.best.choice.units.at_least})" in found.call()
    assert f"fsdp_min_num_params: {found.best.choice.units.at_least}" in found.yaml()


def test_a_plan_takes_larger_units_where_messages_are_many_and_small(monkeypatch):
    monkeypatch.setattr(planner._Search, "_simulate", simulation([], fits=lambda c: True))
    found = shardkit.plan(Stages, torch.zeros(1, WIDTH), 4, "b200-180g", keep=1)
    assert found.best.choice.units in granularity(Stages()).coarser
    auto = next(r for r in found.rows if r.choice == dataclasses.replace(found.best.choice, units=AUTO))
    assert found.best.traffic.collectives < auto.traffic.collectives
    assert found.best.seconds.latency < auto.seconds.latency


class Runs(Language):
    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def simulation(simulated, fits, activations=1 << 30):
    """Stands for `_simulate`: 16 GB and the activations, unless `fits`."""

    def simulate(self, choice, gpus, time, sent):
        simulated.append(choice)
        self._activations[choice.recomputed] = activations
        over = 0 if fits(choice) else 1 << 20
        return planner.Row(choice, not over, time, sent, 1, self.card.usable + over, "", activations, 1 << 30)

    return simulate


def test_where_nothing_fits_the_smallest_cluster_that_would_is_named(monkeypatch):
    def simulate(self, choice, gpus, time, sent):
        fits = gpus >= 24 and choice.strategy == "full" and choice.recomputed == 1
        return planner.Row(choice, fits, time, sent, 1, 1, "")

    monkeypatch.setattr(planner._Search, "_simulate", simulate)
    found = make_plan("t4-16g", gpus=2)
    assert found.best is None and found.smallest == (24, planner.Choice("full", 1.0))
    assert "smallest cluster that would: 24 of them, with full, checkpoint all blocks" in str(found)


def test_where_no_cluster_is_large_enough_the_plan_says_what_is_too_large():
    found = make_plan("t4-0.001g", gpus=512, keep=1)
    assert found.best is None and found.smallest is None
    assert "Use a smaller batch" in str(found) and found.to_dict()["fits"] is False
    with pytest.raises(ConfigError, match="Nothing fits"):
        found.call()


CHOICES = [
    Choice("full"),
    Choice("zero2", 0.5, offload_activations=True),
    Choice("grad_op", 1.0, offload=True, units=Units("blocks alone", classes=("Layer", "Linear"))),
    Choice("hybrid_grad_op", mesh=(2, 4), units=Units("parts of blocks", at_least=5000)),
    Choice("none", units=ONE),
]
READ = """
import json, os, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from shardkit.accelerate import ShardkitPlugin
from shardkit.simulate.world import no_memory
from shardkit.wrap import find_units
from tests.fake.test_simulate_estimate import Language

for file, options in json.loads(sys.argv[1]):
    arguments = launch_command_parser().parse_args(["--config_file", file, "train.py"])
    asked = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    for name in [n for n in os.environ if n.startswith("FSDP_")]:
        del os.environ[name]
    os.environ.update({**asked, "SHARDKIT_OPTIONS": options})
    plugin, model = ShardkitPlugin(), Language()
    units = [name for name, _ in find_units(model, plugin.units(model))]
    print(json.dumps({**plugin.wrap_options, "cpu_offload": plugin.wrap_options["cpu_offload"] is not None, "units":
        units, "precision": os.environ["ACCELERATE_MIXED_PRECISION"], "version": asked["FSDP_VERSION"]}))
"""


def test_accelerates_launcher_and_plugin_read_from_the_file_what_was_planned(tmp_path):
    pytest.importorskip("accelerate")
    files = []
    for number, choice in enumerate(CHOICES):
        file = tmp_path / f"{number}.yaml"
        file.write_text(settings.yaml(choice, "bf16", 8, 1) + "\n")
        files.append((str(file), json.dumps(settings.environment(choice))))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_", "ACCELERATE_", "SHARDKIT_"))}
    ran = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(files)], capture_output=True, text=True, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    read = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    spelled = ["FULL_SHARD", "zero2", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]
    assert [r["sharding_strategy"] for r in read] == spelled
    for choice, said in zip(CHOICES, read, strict=True):
        wanted = choice.options()
        for option in ("activation_checkpointing", "activation_offload"):
            assert said.get(option) == wanted.get(option), (choice, option)
        assert said["cpu_offload"] == choice.offload
        assert said["units"] == [name for name, _ in find_units(Language(), choice.units.policy)]
        assert (said["precision"], said["version"]) == ("bf16", "shardkit")


def test_the_line_to_launch_with_names_what_the_file_cannot():
    assert (
        settings.launch(Choice("full"), "a.yaml") == "accelerate launch --config_file a.yaml -m shardkit.run train.py"
    )
    assert settings.launch(Choice("zero2", 0.5), "a.yaml").startswith(
        """SHARDKIT_OPTIONS='{"sharding_strategy": "zero2", "activation_checkpointing": 0.5}' accelerate"""
    )


# ----------------------------------------------------------------------------------------------------- command line


def shell(*arguments):
    return subprocess.run([sys.executable, "-m", "shardkit", *arguments], capture_output=True, text=True, check=False)


def test_the_command_line_estimates_a_function_and_prints_json(tmp_path):
    page = tmp_path / "memory.html"
    here = "tests.fake.test_simulate_estimate"
    ran = shell(
        "estimate", f"{here}:build", "--batch-function", f"{here}:batch",
        "--world-size", "2", "4", "--json", "--output", str(page),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    first, second = json.loads(ran.stdout)
    assert (first["about"]["world_size"], second["about"]["world_size"]) == (2, 4)
    assert page.read_text().count("data:image/png") == 3


@pytest.mark.parametrize(("arguments", "status", "words"), [
    (("estimate", "no-such-preset"), 1, "no preset"),
    (("plan", "gpt2", "--gpu", "h100"), 1, "h100-80g"),
    (("estimate", "gpt2", "--strategy", "most"), 2, "invalid choice"),
    (("estimate", "gpt2", "--save", "most"), 2, "invalid choice"),
    (("estimate", "--help"), 0, "examples:"),
])  # fmt: skip
def test_the_command_line_says_by_its_status_what_happened(arguments, status, words):
    ran = shell(*arguments)
    assert ran.returncode == status, ran.stderr
    assert words in ran.stdout + ran.stderr
