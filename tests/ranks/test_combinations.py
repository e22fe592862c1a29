"""The product of the features: drawn combinations, each against single-process training of the unwrapped model.

A draw names everything about a run: strategy, precision, where and how activations are recomputed, offload,
accumulation, frozen parts, tied weights, compiled blocks, wrapping. The seed is printed with a failure; one draw again:

    COMBINATION=17 python -m pytest -q tests/ranks/test_combinations.py
"""

import itertools
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardkit
from tests.harness import ranks
from tests.oracle import data

SEED, DRAWS, BATCH = 20240607, 240, 20

AXES = {
    "strategy": ("full", "grad_op", "zero1", "zero2", "none", "hybrid"),
    "precision": ("float32", "float32", "bfloat16", "bfloat16 norms kept", "autocast"),
    "recompute": ("none", "units", "half of the units", "inside", "around"),
    "reentrant": (False, True),
    "offload": (None, "shards", "activations"),
    "accumulate": ("none", "no_sync", "every"),
    "frozen": ("none", "first block", "biases", "all but norms"),
    "tied": (False, True),
    "compiled": (False, False, False, True),
    "wrapping": ("auto", "blocks", "one unit", "every layer"),
    "optimizer": ("sgd", "adamw", "adamw fused"),
    "clip": (False, True),
}


class Layer(nn.Module):
    def __init__(self, d, recompute, reentrant):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d + 1), nn.Linear(2 * d + 1, d)
        self.recompute, self.reentrant = recompute, reentrant

    def inner(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        y = self.norm(x)
        if self.recompute == "inside" and torch.is_grad_enabled():
            return x + checkpoint(self.inner, y, use_reentrant=self.reentrant)
        return x + self.inner(y)


class Model(nn.Module):
    def __init__(self, draw, d=6, vocab=13):
        super().__init__()
        self.around = draw["recompute"] == "around"
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.layers = nn.ModuleList(Layer(d, draw["recompute"], draw["reentrant"]) for _ in range(3))
        if draw["tied"]:
            self.head.weight = self.emb.weight

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=layer.reentrant) if self.around else layer(x)
        return self.head(x)


def drawn(number):
    dice = random.Random(SEED + number)
    draw = {axis: dice.choice(values) for axis, values in AXES.items()}
    if draw["offload"] == "shards" and draw["strategy"] in ("zero1", "zero2", "none"):
        draw["offload"] = None  # refused at wrap time
    if draw["offload"] == "activations" and draw["recompute"] in ("inside", "around"):
        draw["offload"] = None
    if draw["recompute"] == "around" and draw["reentrant"] and draw["frozen"] == "all but norms":
        draw["frozen"] = "none"  # torch's reentrant kind needs an input that requires grad, here the embedding's output
    return draw


def freeze(model, which):
    for name, p in model.named_parameters():
        frozen = {
            "none": False,
            "first block": "layers.0." in name,
            "biases": name.endswith("bias"),
            "all but norms": "norm" not in name,
        }[which]
        p.requires_grad_(not frozen)


def wrap(model, draw, world):
    options = {"sharding_strategy": draw["strategy"]}
    if draw["strategy"] == "hybrid":
        shape = (1, world) if draw["tied"] else (world, 1)  # either axis of length one
        options["device_mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", shape)
    if draw["precision"].startswith("bfloat16"):
        kept = (nn.LayerNorm,) if "kept" in draw["precision"] else ()
        options["mixed_precision"] = shardkit.MixedPrecision(param_dtype=torch.bfloat16, keep_fp32=kept)
    if draw["recompute"] in ("units", "half of the units"):
        share = True if draw["recompute"] == "units" else 0.5
        options["activation_checkpointing"] = share
        if draw["reentrant"]:
            where = share if share is True else 0.5
            options["activation_checkpointing"] = shardkit.ActivationCheckpointing(where=where, use_reentrant=True)
    if draw["offload"] == "shards":
        options["cpu_offload"] = shardkit.CPUOffload(pin_memory=False)
    elif draw["offload"] == "activations":
        options["activation_offload"] = shardkit.ActivationOffload(min_bytes=0)
    if draw["compiled"]:
        for layer in model.layers:
            layer.compile(backend="eager")
    policy = {"auto": "auto", "blocks": {Layer}, "one unit": None, "every layer": {Layer, nn.Linear}}[draw["wrapping"]]
    return shardkit.auto_wrap(model, policy=policy, **options)


def make_optimizer(model, draw):
    params = [p for p in model.parameters() if p.requires_grad]
    if draw["optimizer"] == "sgd":
        return torch.optim.SGD(params, 0.1, momentum=0.9)
    return torch.optim.AdamW(params, 0.01, weight_decay=0.1, eps=1e-3, fused="fused" in draw["optimizer"])


def in_bfloat16(twin, draw):
    """What mixed precision means, by hand: float32 weights, cast before use; kept norms get and give what they need.

    Where two units share a weight, each casts it, and their bfloat16 gradients are added in float32; inside one unit
    there is one cast, and autograd adds the uses in bfloat16.
    """
    apart = draw["wrapping"] == "every layer"
    kept = "kept" in draw["precision"]
    if kept:
        for norm in (layer.norm for layer in twin.layers):
            norm.register_forward_pre_hook(lambda m, args: tuple(a.float() for a in args))
            norm.register_forward_hook(lambda m, args, out: out.bfloat16())

    def forward(ids):
        named = twin.named_parameters(remove_duplicate=not apart)
        cast = {n: p if kept and "norm" in n else p.bfloat16() for n, p in named}
        return torch.func.functional_call(twin, cast, (ids,), tie_weights=not apart)

    return forward


def loss_of(model, draw, rank, step):
    ids = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    with torch.autocast("cpu", torch.bfloat16, enabled=draw["precision"] == "autocast"):
        out = model(ids)
    return F.cross_entropy(out.float().flatten(0, 1), ids.roll(1, 1).flatten()) + 0.01 * data(step, 1).item()


def train(draw, rank, world):
    torch.manual_seed(1)
    twin = Model({**draw, "recompute": "none"})
    model = Model(draw)
    model.load_state_dict(twin.state_dict())
    freeze(twin, draw["frozen"]), freeze(model, draw["frozen"])
    forward = in_bfloat16(twin, draw) if draw["precision"].startswith("bfloat16") else twin
    model = wrap(model, draw, world)
    optim, twin_optim = make_optimizer(model, draw), make_optimizer(twin, draw)
    steps = itertools.count()
    for _ in range(3):
        optim.zero_grad(), twin_optim.zero_grad()
        micro = [next(steps) for _ in range(1 if draw["accumulate"] == "none" else 2)]
        for step in micro[:-1]:
            if draw["accumulate"] == "no_sync":
                with model.no_sync():
                    loss_of(model, draw, rank, step).backward()
            else:
                loss_of(model, draw, rank, step).backward()
        loss_of(model, draw, rank, micro[-1]).backward()
        for step in micro:
            for r in range(world):
                (loss_of(forward, draw, r, step) / world).backward()
        if draw["clip"]:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            twin_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.2)
            torch.testing.assert_close(norm, twin_norm, rtol=1e-5, atol=1e-6)
        optim.step(), twin_optim.step()
        with torch.no_grad():
            model(torch.arange(4)[None])
    return shardkit.full_state_dict(model), twin.state_dict()


def check(draw, rank, world):
    state, want = train(draw, rank, world)
    # Sums of the same terms in another order, through three optimizer steps whose eps keeps them from dividing by
    # rounding errors. In low precision the twin rounds at the same places, so the same bound holds.
    for name, value in want.items():
        got = state[name].float()
        scale = value.abs().max()
        error = (got - value).abs().max()
        assert error <= 2e-5 * scale, f"{name}: off by {error:.2e} of {scale:.2e}"


def run_draws(rank, world, numbers):
    for number in numbers:
        draw = drawn(number)
        torch._dynamo.reset()
        try:
            check(draw, rank, world)
        except Exception as error:
            raise AssertionError(
                f"COMBINATION={number} (seed {SEED}): {draw}\n{type(error).__name__}: {error}"
            ) from error


def _numbers():
    only = os.environ.get("COMBINATION")
    return [[int(only)]] if only else [list(range(i, i + BATCH)) for i in range(0, DRAWS, BATCH)]


def pytest_generate_tests(metafunc):
    if "numbers" in metafunc.fixturenames:
        metafunc.parametrize("numbers", _numbers(), ids=lambda n: f"{n[0]}-{n[-1]}")


@ranks(2, timeout=300)
def test_a_drawn_combination_of_features_trains_as_one_process_does(rank, world, numbers):
    run_draws(rank, world, numbers)


def test_the_draws_cover_every_value_of_every_axis():
    draws = [drawn(i) for i in range(DRAWS)]
    for axis, values in AXES.items():
        assert {d[axis] for d in draws} == set(values), axis
