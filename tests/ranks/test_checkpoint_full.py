"""Whole states are put together one flat parameter at a time, and are copies."""

import time
import weakref

import torch

import shardkit
from shardkit.runtime.flat_param import FlatParam
from tests.harness import ranks
from tests.ranks.checkpoint_models import assert_same, build, step, whole, wrap


class Watch:
    """How many gathered buffers are alive at a time, and how large they are."""

    def __enter__(self):
        self.alive, self.most, self.largest, self.gather = [], 0, 0, FlatParam.gather_like_shard

        def gather(flat, shard):
            deadline = time.monotonic() + 2
            while any(ref() is not None for ref in self.alive) and time.monotonic() < deadline:
                time.sleep(0.001)  # a thread of gloo may hold what it has sent for a moment longer
            out = self.gather(flat, shard)
            self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(out)]
            self.most = max(self.most, len(self.alive))
            self.largest = max(self.largest, out.numel())
            return out

        FlatParam.gather_like_shard = gather
        return self

    def __exit__(self, *exc):
        FlatParam.gather_like_shard = self.gather


@ranks(2)
def test_a_full_state_on_the_first_rank_gathers_one_unit_at_a_time(rank, world):
    model = wrap(0)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim, 1)
    units = sum(1 for name in model.state_dict() if name.endswith("ln.weight")) + 1
    with Watch() as watch:
        state = shardkit.full_state_dict(model, rank0_only=True)
        optim_state = shardkit.full_optim_state_dict(model, optim, rank0_only=True)
    assert watch.most == 1
    total = sum(p.numel() for p in build(0).parameters())
    assert watch.largest < total / units * 1.5
    assert bool(state) == bool(optim_state) == (rank == 0)


@ranks(2)
def test_what_a_full_state_holds_does_not_change_when_training_goes_on(rank, world):
    model = wrap(0)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optim, 1)
    state = whole(model, optim)
    kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    step(model, optim, 2)
    assert_same(state, kept)
    assert not torch.equal(whole(model, optim)["model.emb.weight"], kept["model.emb.weight"])
