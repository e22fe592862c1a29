"""Collectives of one step, counted in one process with torch's fake process group, at any world size.

The formula: with parameters P (bytes, padding included), "full" moves 3 P (N-1)/N per rank and step: gathered in
forward, gathered in backward, reduced. Less what backward finds still there (the root's own parameters, and the unit
that ran last in forward), and what backward can do without (a unit of embeddings only).
"""

import contextlib

import pytest
import torch
import torch.nn as nn

import shardkit
from shardkit import comm
from tests.harness import fake_world
from tests.oracle import LM, Block, Net, ids, seeded

WORLDS = [2, 8, 64]


@contextlib.contextmanager
def recorded(model):
    """List of (what, unit, bytes of the whole buffer) in order of issue."""
    events, units = [], {}
    for unit in model._shardkit_step.units:
        for flat in unit.flats:
            units[flat] = unit.name or "(root)"

    gather, reduce = comm.Group.all_gather, comm.Group.reduce_scatter

    def spy(name, original):
        def run(self, buffer, *rest):
            owner = [units[f] for f in units if f.layout.numel == buffer.numel()]
            events.append((name, owner, buffer.numel() * buffer.element_size()))
            return original(self, buffer, *rest)

        return run

    comm.Group.all_gather, comm.Group.reduce_scatter = spy("gather", gather), spy("reduce", reduce)
    try:
        yield events
    finally:
        comm.Group.all_gather, comm.Group.reduce_scatter = gather, reduce


def _names(events, what):
    """Units of different sizes are told apart by size; `_uneven` makes them so."""
    return [owner[0] for name, owner, _ in events if name == what]


def _moved(events, what, world):
    return sum(size for name, _, size in events if name == what) * (world - 1) // world


class Uneven(nn.Module):
    """Every unit has another size, so that a collective's size tells the unit."""

    def __init__(self, count=4):
        super().__init__()
        self.inp, self.out = nn.Linear(5, 5), nn.Linear(5, 2)
        self.b = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 40 + 8 * i), nn.Tanh(), nn.Linear(40 + 8 * i, 5)) for i in range(count)
        )

    def forward(self, x):
        x = self.inp(x)
        for b in self.b:
            x = x + b(x)
        return self.out(x)


def _uneven(**options):
    model = seeded(Uneven)
    return shardkit.auto_wrap(model, policy=lambda m: isinstance(m, nn.Sequential), **options)


def _steps(model, count=1):
    for _ in range(count):
        model(torch.randn(4, 5)).pow(2).mean().backward()


def _bytes(model):
    return {u.name or "(root)": sum(f.layout.numel * 4 for f in u.flats) for u in model._shardkit_step.units}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy, gathers", [("full", 2), ("grad_op", 1), ("hybrid", 2), ("hybrid_grad_op", 1)])
def test_a_step_gathers_and_reduces_what_the_formula_says(world, strategy, gathers):
    with fake_world(world):
        options = {} if "hybrid" not in strategy else dict(process_group=(torch.distributed.group.WORLD, None))
        model = _uneven(sharding_strategy=strategy, **options)
        _steps(model, 2)
        with recorded(model) as events:
            _steps(model)
        size = _bytes(model)
        total = sum(size.values())
        kept = size["(root)"] + size["b.3"] if gathers == 2 else 0  # found in place by backward
        assert _moved(events, "gather", world) == (gathers * total - kept) * (world - 1) // world
        assert _moved(events, "reduce", world) == total * (world - 1) // world
        assert len(_names(events, "reduce")) == len(size)


@pytest.mark.parametrize("world", WORLDS)
def test_padding_is_at_most_one_percent_and_one_granule_a_rank(world):
    with fake_world(world):
        model = _uneven()
        for unit in model._shardkit_step.units:
            for flat in unit.flats:
                assert flat.layout.padding <= 0.01 * flat.layout.used + world - 1
                assert flat.layout.numel == flat.layout.shard_numel * world


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("world", WORLDS)
def test_kept_parameters_are_refreshed_once_after_the_optimizer(world, strategy):
    with fake_world(world):
        model = _uneven(sharding_strategy=strategy)
        optim = torch.optim.SGD(model.parameters(), 0.1)
        _steps(model, 2)
        optim.step()
        total = sum(_bytes(model).values())
        with recorded(model) as events:
            _steps(model)
        assert _moved(events, "gather", world) == total * (world - 1) // world
        assert _moved(events, "reduce", world) == total * (world - 1) // world
        with torch.no_grad():
            model.eval()(torch.randn(4, 5))  # the mode changed: loops exchange weights around that
            with recorded(model) as events:
                optim.zero_grad()
                model(torch.randn(4, 5))
        assert _moved(events, "gather", world) == 0


def test_nothing_is_gathered_or_scattered_under_none():
    with fake_world(8):
        model = _uneven(sharding_strategy="none")
        assert all(f.mesh.shard.size == 1 and f.mesh.replicate.size == 8 for f in model._shardkit_step.flats)
        _steps(model)
        with recorded(model) as events:
            _steps(model)
        assert _moved(events, "gather", 1) == 0


@pytest.mark.parametrize("world", WORLDS)
def test_a_unit_of_embeddings_is_not_gathered_in_backward(world):
    with fake_world(world):
        model = seeded(lambda: LM(vocab=501, tied=False))
        model.more = nn.Parameter(torch.zeros(501))  # so that the root's size is another than the embedding's
        shardkit.auto_wrap(model, policy={nn.Embedding, Block})
        for _ in range(2):
            model(ids(0, 501, 2, 3)).sum().backward()
        with recorded(model) as events:
            model(ids(0, 501, 2, 3)).sum().backward()
        assert _names(events, "gather").count("emb") == 1 and _names(events, "reduce").count("emb") == 1


def test_accumulation_without_sync_reduces_nothing():
    with fake_world(8):
        model = _uneven()
        _steps(model, 2)
        with recorded(model) as events:
            with model.no_sync():
                _steps(model, 2)
            assert not _names(events, "reduce")
            _steps(model)
        assert len(_names(events, "reduce")) == 5


def test_an_evaluation_gathers_every_parameter_once():
    with fake_world(8):
        model = _uneven()
        _steps(model, 2)
        with torch.no_grad():
            model(torch.randn(2, 5))
            with recorded(model) as events:
                model(torch.randn(2, 5))
        assert sorted(_names(events, "gather")) == ["(root)", "b.0", "b.1", "b.2", "b.3"]


def test_frozen_units_are_gathered_for_backward_and_not_reduced():
    with fake_world(8):
        model = seeded(Uneven)
        model.b[1].requires_grad_(False)
        shardkit.auto_wrap(model, policy=lambda m: isinstance(m, nn.Sequential))
        _steps(model, 2)
        with recorded(model) as events:
            _steps(model)
        assert _names(events, "gather").count("b.1") == 2 and "b.1" not in _names(events, "reduce")


def test_the_next_units_gather_starts_before_this_unit_computes():
    """In forward, and the other way round in backward; a unit's reduction starts before the next but one's gather."""
    with fake_world(8):
        model = _uneven()
        _steps(model, 2)
        with recorded(model) as events:
            for name, module in model.named_modules():
                if name in ("b.0", "b.1", "b.2", "b.3"):
                    module.register_forward_pre_hook(lambda m, a, n=name: events.append(("compute", [n], 0)))
                    module.register_full_backward_pre_hook(lambda m, g, n=name: events.append(("backward", [n], 0)))
            _steps(model)
        order = [f"{what} {owner[0]}" for what, owner, _ in events]
        for this, following in (("b.0", "b.1"), ("b.1", "b.2"), ("b.2", "b.3")):
            assert order.index(f"gather {following}") < order.index(f"compute {this}")
        back = order[order.index("backward b.3") :]
        for this, before in (("b.2", "b.1"), ("b.1", "b.0")):
            assert back.index(f"gather {before}") < back.index(f"reduce {this}")
            assert back.index(f"reduce {this}") < back.index(f"reduce {before}")
        assert [n for n in order if n.startswith("reduce")] == [
            f"reduce {n}" for n in ("b.3", "b.2", "b.1", "b.0", "(root)")
        ]


def test_without_prefetch_a_unit_is_gathered_when_it_is_called():
    with fake_world(8):
        model = _uneven(forward_prefetch=False, backward_prefetch=False)
        _steps(model, 2)
        with recorded(model) as events:
            for name, module in model.named_modules():
                if name in ("b.0", "b.1", "b.2", "b.3"):
                    module.register_forward_pre_hook(lambda m, a, n=name: events.append(("compute", [n], 0)))
            _steps(model)
        order = [f"{what} {owner[0]}" for what, owner, _ in events]
        for this, following in (("b.0", "b.1"), ("b.1", "b.2"), ("b.2", "b.3")):
            assert order.index(f"gather {following}") > order.index(f"compute {this}")


@pytest.mark.parametrize("world", WORLDS)
def test_each_rank_holds_its_share(world):
    with fake_world(world, rank=world - 1):
        model = shardkit.auto_wrap(seeded(lambda: Net(d=32, blocks=4)), policy={Block})
        held = sum(f.shard.numel() for f in model._shardkit_step.flats)
        whole = sum(p.numel() for p in Net(d=32, blocks=4).parameters())
        assert held <= 1.01 * whole / world + 16 * len(model._shardkit_step.flats)
