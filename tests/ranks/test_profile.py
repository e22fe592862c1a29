"""`shardkit.profile` on real ranks: the same figures as predicted, and sentences about a failure."""

import contextlib
import gc
import json
import time
import unittest.mock

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import ConfigError, StateError
from shardkit.simulate.ledger import ACTIVATIONS, FULL, GRADIENTS, OPTIMIZER, PARAMETERS, SAVING
from tests.accelerate_runs import accelerate, tiny_llama, token_rows
from tests.harness import ranks, run_ranks

WIDTH = 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build():
    return nn.Sequential(*(Block() for _ in range(4)))


def batch():
    return torch.zeros(32, WIDTH)


OPTIONS = [
    {},
    {"sharding_strategy": "zero2"},
    {"sharding_strategy": "none"},
    {"activation_checkpointing": True},
    {"mixed_precision": shardkit.MixedPrecision(param_dtype=torch.bfloat16)},
]


def measured(rank, world, options, folder=None):
    model = shardkit.auto_wrap(build(), policy={Block}, **options)
    optim = torch.optim.AdamW(model.parameters(), foreach=False)
    with shardkit.profile(model, optim) as prof:
        x = batch()
        for _ in range(2):
            loss = model(x).float().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            del loss
    if folder is not None and rank == 0:
        prof.report.save(folder / "report.json")
    return prof.report.to_dict()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "full")
@pytest.mark.parametrize("world", [2, 4])
def test_predicted_and_measured_agree_in_every_category_at_the_peaks(world, options):
    real = shardkit.simulate.Report.from_dict(run_ranks(measured, world, options)[0])
    options = {"policy": {Block}, **options}
    predicted = shardkit.estimate(build, batch, world_size=world, device="cpu", **options)
    for phase in ("forward", "backward", "step"):
        a, b = predicted.phases[phase], real.phases[phase]
        assert abs(a.total - b.total) <= 0.03 * b.total, shardkit.simulate.compare(predicted, real)
        for category in (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS):
            x, y = a.categories.get(category, 0), b.categories.get(category, 0)
            assert abs(x - y) <= 0.03 * b.total, (phase, category)


SAVES = {
    "sharded": shardkit.save_checkpoint,
    "async": shardkit.async_save,
    "full": lambda path, model, optim: shardkit.full_state_dict(model, rank0_only=True),
}


@contextlib.contextmanager
def settled_collectives():
    """gloo's threads let go of a finished collective's tensors a little late. A sleep after each wait lets them."""
    work = torch._C._distributed_c10d.Work
    wait = work.wait

    def wait_and_settle(self, *args, **kwargs):
        out = wait(self, *args, **kwargs)
        time.sleep(0.02)
        return out

    with unittest.mock.patch.object(work, "wait", wait_and_settle):
        yield


def measured_saving(rank, world, kind, options, folder):
    model = shardkit.auto_wrap(build(), policy={Block}, **options)
    optim = torch.optim.AdamW(model.parameters(), foreach=False)
    with shardkit.profile(model, optim) as prof:
        model(batch()).float().mean().backward()
        optim.step()
        optim.zero_grad()
        with settled_collectives(), prof.phase("save"):
            saved = SAVES[kind](folder / "step_1", model, optim)
        later = torch.zeros(1 << 20)  # the next batch, say: no part of saving
    if kind == "async":
        saved.wait()
    del saved, later
    return prof.report.to_dict()


@pytest.mark.parametrize("options", [{}, {"sharding_strategy": "zero2"}, {"sharding_strategy": "none"}], ids=str)
@pytest.mark.parametrize("kind", ["sharded", "async", "full"])
def test_what_saving_takes_is_predicted_by_category(kind, options, tmp_path):
    real = shardkit.simulate.Report.from_dict(run_ranks(measured_saving, 2, kind, options, tmp_path)[0])
    predicted = shardkit.estimate(build, batch, world_size=2, device="cpu", policy={Block}, save=kind, **options)
    a, b = predicted.phases["save"], real.phases["save"]
    assert abs(a.total - b.total) <= 0.03 * b.total, shardkit.simulate.compare(predicted, real)
    for category in (PARAMETERS, FULL, GRADIENTS, OPTIMIZER, SAVING):
        x, y = a.categories.get(category, 0), b.categories.get(category, 0)
        assert abs(x - y) <= 0.03 * b.total, (category, x, y)
    states = b.categories[PARAMETERS] + b.categories[OPTIMIZER]
    expected = {"sharded": 0, "async": states, "full": sum(p.numel() * 4 for p in build().parameters())}[kind]
    assert abs(b.categories[SAVING] - expected) <= 0.03 * states + 50_000, "messages are small"


def test_a_phase_of_ones_own_is_one_of_a_running_profile():
    prof = shardkit.profile(build())
    with pytest.raises(StateError, match="outside of the profile"), prof.phase("save"):
        pass
    with prof, pytest.raises(ConfigError, match="init, forward"), prof.phase("lunch"):
        pass


@ranks(2)
def test_a_profile_names_units_and_phases_and_changes_nothing(rank, world):
    torch.manual_seed(0)
    plain = shardkit.auto_wrap(build(), policy={Block})
    torch.manual_seed(0)
    model = shardkit.auto_wrap(build(), policy={Block})
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH)
    with shardkit.profile(model, optim) as prof:
        model(x).sum().backward()
    plain(x).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert set(prof.report.phases) >= {"forward", "backward"}
    assert {"0", "1", "2", "3"} <= set(prof.report.units)
    unit = model[0]._shardkit_unit
    assert "_enter" not in unit.__dict__ and "gather" not in unit.flats[0].__dict__, "the engine is as it was"


@ranks(2)
def test_an_out_of_memory_error_is_explained_by_unit_category_and_setting(rank, world):
    model = shardkit.auto_wrap(build(), policy={Block})
    x = torch.randn(4096, WIDTH)
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    with shardkit.profile(model) as prof:
        loss = model(x).sum()
        text = shardkit.explain_oom(error)
        loss.backward()
    assert "2.68 GB" in text and "activations" in text and "activation_checkpointing=True" in text
    assert any(f"{i} " in text for i in range(4)), "a unit is named"
    assert shardkit.explain_oom(error, prof).startswith("Out of memory while asking for")


def test_an_error_without_a_profile_says_how_to_know_more():
    from shardkit.simulate import profiler

    before, profiler._current = profiler._current, None
    try:
        assert "shardkit.profile" in shardkit.explain_oom(MemoryError("no"))
    finally:
        profiler._current = before


def test_a_model_that_is_not_sharded_is_measured_as_well():
    model = build()
    with shardkit.profile(model) as prof:
        with pytest.raises(StateError, match="still running"):
            prof.report  # noqa: B018
        model(batch()).sum().backward()
    assert prof.report.phases["backward"].total > prof.report.phases["backward"].categories[PARAMETERS] > 0
    json.dumps(prof.report.to_dict())
    with pytest.raises(StateError, match="has been used"):
        prof.__enter__()


def test_the_trainers_callback_measures_some_steps(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = tiny_llama()
    prof = shardkit.profile(model)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 12
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=6, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    callback = prof.callback(first=1, last=2)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    steps = {row["step"] for row in prof.report.timeline if row["phase"] == "backward"}
    assert steps == {0, 1}, "two steps, counted from the first that was measured"
    held = prof.report.phases["step"].categories
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert held[PARAMETERS] == held[GRADIENTS] == weights and held[OPTIMIZER] >= 2 * weights


@ranks(2)
def test_a_loop_of_accelerate_is_measured_over_its_batches(rank, world):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    with accelerate(shardkit=True):
        model = tiny_llama()
        optim = torch.optim.AdamW(model.parameters())
        prof = shardkit.profile(model)  # before the model is sharded
        accelerator = Accelerator()
        model, optim, loader = accelerator.prepare(model, optim, DataLoader(token_rows(), batch_size=1))
        for batch in prof.over(loader, first=1, last=1):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optim.step()
            optim.zero_grad()
    assert {row["step"] for row in prof.report.timeline if row["phase"] == "step"} == {0}
    assert any("layers" in unit for unit in prof.report.units), prof.report.units.keys()
    weights = 4 * sum(p.numel() for p in tiny_llama().parameters())
    assert prof.report.phases["step"].categories[PARAMETERS] < 0.6 * weights, "a half, and padding"


def test_a_loop_that_ends_early_ends_its_profile():
    model = build()
    prof = shardkit.profile(model)
    for _ in prof.over([batch()] * 3, first=2, last=9):
        model(batch()).sum().backward()
    assert "backward" in prof.report.phases
    prof = shardkit.profile(model)
    for _ in prof.over([batch()] * 3, first=0):
        model(batch()).sum().backward()
        break
    gc.collect()
    assert "backward" in prof.report.phases
