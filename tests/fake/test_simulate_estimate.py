"""`estimate` and `plan`: the engine under fake tensors, at world sizes that no test machine has."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from shardkit.errors import ConfigError, StateError
from shardkit.simulate import planner
from shardkit.simulate.ledger import ACTIVATIONS, FULL, GRADIENTS, OPTIMIZER, PARAMETERS, REDUCTION
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
    assert report.peak > 0 and set(report.phases) == {"init", "forward", "backward", "step"}
    assert report.extra["reserved_bytes"] >= report.training_peak


def test_a_model_without_padding_uses_no_mask_as_it_does_with_values():
    transformers = pytest.importorskip("transformers")
    fields = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=64)  # fmt: skip
    config = transformers.LlamaConfig(**fields)
    before = sys.modules["transformers.masking_utils"].is_tracing
    report = shardkit.estimate(config, (1, 512), "sgd", world_size=2)
    assert sys.modules["transformers.masking_utils"].is_tracing is before
    # A mask would be 512 x 512 for each of 4 heads.
    largest = max(n for unit in report.phases["forward"].units.values() for n in unit.values())
    assert largest < 4 * 512 * 512 * 4


# ------------------------------------------------------------------------------------------------------------- plan


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
    assert "auto_wrap(model" in found.call() and "fsdp_config:" in found.yaml()
    assert "fastest that fits" in str(found) and found.to_dict()["fits"] is True


def test_a_plan_checkpoints_where_activations_do_not_fit():
    found = make_plan("t4-0.2g", precision="fp32")
    assert found.best is not None and found.best.choice.recomputed > 0
    assert any("over" in row.reason for row in found.rows)


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
    (("estimate", "--help"), 0, "examples:"),
])  # fmt: skip
def test_the_command_line_says_by_its_status_what_happened(arguments, status, words):
    ran = shell(*arguments)
    assert ran.returncode == status, ran.stderr
    assert words in ran.stdout + ran.stderr
