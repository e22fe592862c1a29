"""Mixed precision, masters, offload: what computes, travels and is kept in which dtype, against one process."""

import copy
import warnings

import pytest
import torch
import torch.nn as nn

import shardkit
from tests.harness import ranks
from tests.oracle import Block, Net, data


class Recorder(nn.Module):
    """Passes its input on and remembers the dtypes it saw."""

    def __init__(self, d=5):
        super().__init__()
        self.norm, self.lin, self.seen = nn.LayerNorm(d), nn.Linear(d, d), {}
        self.norm.register_forward_hook(lambda m, a, o: self.seen.update(norm=(a[0].dtype, m.weight.dtype, o.dtype)))
        self.lin.register_forward_hook(lambda m, a, o: self.seen.update(lin=(a[0].dtype, m.weight.dtype, o.dtype)))

    def forward(self, x):
        return self.lin(self.norm(x))


@ranks(2)
def test_kept_modules_compute_in_float32_inside_a_bfloat16_unit(rank, world):
    model = shardkit.auto_wrap(
        nn.Sequential(Recorder(), Recorder()),
        policy={Recorder},
        mixed_precision=shardkit.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=(nn.LayerNorm,)),
    )
    model(data(rank, 4, 5)).float().sum().backward()
    low, high = torch.bfloat16, torch.float32
    assert model[1].seen["lin"] == (low, low, low)
    assert model[1].seen["norm"] == (high, high, high)  # the output is lowered after the hooks, for what follows
    assert all(p.dtype == high and p.grad.dtype == high for p in model.parameters())


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_bfloat16_gradients_equal_one_process_casting_by_hand(rank, world, reduce_dtype):
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    masters = model.weight.detach().clone()
    shardkit.auto_wrap(
        model, mixed_precision=shardkit.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    )
    model(data(rank, 4, 8)).float().square().sum().backward()
    total = torch.zeros(8, 8)
    for r in range(world):
        w = masters.bfloat16().requires_grad_()
        nn.functional.linear(data(r, 4, 8).bfloat16(), w).float().square().sum().backward()
        total += w.grad.float()  # both wires carry bfloat16 values here; the sum is in float32 either way
    assert torch.equal(model.weight.grad.full_tensor(), total / world)


@ranks(2)
def test_a_bfloat16_model_gets_float32_masters_and_says_so_once(rank, world):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = shardkit.auto_wrap(Net().bfloat16())
    assert sum("float32 masters" in str(w.message) for w in caught) == (rank == 0)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert model(data(rank, 2, 5).bfloat16()).dtype == torch.bfloat16
    kept = shardkit.auto_wrap(
        Net().bfloat16(), mixed_precision=shardkit.MixedPrecision(master_dtype=torch.bfloat16), sync_module_states=True
    )
    assert all(p.dtype == torch.bfloat16 for p in kept.parameters())


@ranks(2)
def test_outputs_and_nested_inputs_are_cast_and_integers_are_not(rank, world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 5)

        def forward(self, batch, *, scale):
            self.seen = (batch["x"][0].dtype, batch["ids"].dtype, scale.dtype)
            return {"y": self.lin(batch["x"][0]) * scale, "ids": batch["ids"]}

    mp = shardkit.MixedPrecision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = shardkit.auto_wrap(Model(), mixed_precision=mp, sync_module_states=True)
    out = model({"x": [data(0, 2, 5)], "ids": torch.arange(3)}, scale=torch.tensor(2.0))
    assert model.seen == (torch.bfloat16, torch.int64, torch.bfloat16)
    assert out["y"].dtype == torch.float32 and out["ids"].dtype == torch.int64


@ranks(2)
@pytest.mark.parametrize("accumulate", [False, True])
def test_offloaded_training_equals_training_on_the_device(rank, world, accumulate):
    torch.manual_seed(0)
    plain, offloaded = Net(), Net()
    offloaded.load_state_dict(plain.state_dict())
    shardkit.auto_wrap(plain, policy={Block})
    shardkit.auto_wrap(offloaded, policy={Block}, cpu_offload=True)
    for model in (plain, offloaded):
        optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step in range(3):
            optim.zero_grad()
            if accumulate:
                with model.no_sync():
                    model(data(50 + step, 4, 5)).square().mean().backward()
            model(data(10 * step + rank, 4, 5)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optim.step()
    for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(p, q) and q.device.type == "cpu"


@ranks(2)
def test_fp16_with_a_gradient_scaler_trains_and_an_overflow_on_one_rank_skips_the_step_everywhere(rank, world):
    torch.manual_seed(0)
    model = shardkit.auto_wrap(
        Net(), policy={Block}, mixed_precision=shardkit.MixedPrecision(param_dtype=torch.float16)
    )
    optim, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
    before = copy.deepcopy(shardkit.full_state_dict(model))

    def step(bad):
        optim.zero_grad()
        loss = model(data(rank, 4, 5)).float().square().mean()
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.step(optim)
        scaler.update()

    step(bad=rank == 1)
    assert scaler.get_scale() == 128.0
    after = shardkit.full_state_dict(model)
    assert all(torch.equal(before[k], after[k]) for k in before)
    step(bad=False)
    moved = shardkit.full_state_dict(model)
    assert any(not torch.equal(after[k], moved[k]) for k in after)
    assert scaler.get_scale() == 128.0
