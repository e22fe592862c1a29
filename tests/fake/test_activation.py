"""Counts and bytes of checkpointed and offloaded models: one process, torch's fake process group, any world size."""

import dataclasses
import weakref
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardkit
from shardkit.runtime import saved_offload
from shardkit.runtime.flat_param import FlatParam
from tests.harness import fake_world
from tests.oracle import LM, Block

WORLD = 8
both_kinds = pytest.mark.parametrize("reentrant", [True, False])


@pytest.fixture
def gathers(monkeypatch):
    """How often each flat parameter was gathered, by the name of its first parameter's unit."""
    counts, gather = Counter(), FlatParam.gather

    def counted(flat):
        counts[flat.unit.name] += 1
        return gather(flat)

    monkeypatch.setattr(FlatParam, "gather", counted)
    return counts


def _model(**options):
    return shardkit.auto_wrap(LM(vocab=16, d=8, blocks=4), policy={Block}, **options)


def _steps(model, count=3):
    for _ in range(count):
        model(torch.randint(0, 16, (2, 3))).sum().backward()


@pytest.mark.parametrize("how", ["none", "before", "after", "parts", "option", "around", "torch", "offload"])
@both_kinds
def test_recomputation_gathers_a_block_once(gathers, how, reentrant):
    """Twice in all, in forward and in backward; the last block's parameters stay in between, from the second step on
    (in the first it is not known to be the last), and if its forward runs with grad mode. The one exception: a
    reentrant checkpoint around several units runs all of them forward again before backward begins with the last."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as torchs

    with fake_world(WORLD):
        model = LM(vocab=16, d=8, blocks=4)
        options = dict(policy={Block})
        if how == "before":
            for block in model.blocks:
                shardkit.checkpoint_wrapper(block, use_reentrant=reentrant)
        elif how == "torch":
            kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torchs(block, kind)
        elif how in ("option", "offload"):
            options["activation_checkpointing"] = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
            if how == "offload":
                options["activation_offload"] = shardkit.ActivationOffload(min_bytes=0)
        shardkit.auto_wrap(model, **options)
        if how == "after":
            for block in model.blocks:
                shardkit.checkpoint_wrapper(block, use_reentrant=reentrant)
        elif how == "parts":
            for block in model.blocks:
                shardkit.checkpoint_wrapper(block.up, use_reentrant=reentrant)
        elif how == "around":
            shardkit.checkpoint_wrapper(model, use_reentrant=reentrant)
        _steps(model, 2)
        gathers.clear()
        _steps(model, 1)
    expected = {("torch", True): [2, 2, 2, 2], ("around", True): [3, 3, 3, 2]}.get((how, reentrant), [2, 2, 2, 1])
    assert [count for name, count in sorted(gathers.items()) if name] == expected


class Live(TorchDispatchMode):
    """Bytes of the memory that operators made under this mode and that is still held: on the device, and what the
    offload holds on the host."""

    def __init__(self):
        super().__init__()
        self.storages, self.kept = {}, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                known = self.storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self):
        """(device, host)"""
        total = sum(size for ref, size in self.storages.values() if not ref.expired())
        host = sum(kept.host.untyped_storage().nbytes() for kept in self.kept)
        return total - host, host


@pytest.fixture
def live(monkeypatch):
    mode, init = Live(), saved_offload._Kept.__init__

    def noted(kept, *args):
        init(kept, *args)
        mode.kept.add(kept)

    monkeypatch.setattr(saved_offload._Kept, "__init__", noted)
    return mode


D, TOKENS = 16, 32
INPUT = 4 * D * TOKENS  # bytes of a block's input


def _held_after_forward(live, blocks, **options):
    """(device, host) bytes that the third forward leaves behind, and the same after backward."""
    with fake_world(WORLD):
        model = shardkit.auto_wrap(LM(vocab=16, d=D, blocks=blocks), policy={Block}, **options)
        _steps(model, 2)  # in the first two, weights are compared with the shards, which would count
        model.zero_grad()
        tokens = torch.randint(0, 16, (2, TOKENS // 2))
        with live:
            loss = model(tokens).sum()
            device, host = live.bytes()
            loss.backward()
            del loss
            model.zero_grad()
        return device, host, *live.bytes()


def _per_block(live, **options):
    """What each further block adds to `_held_after_forward`."""
    few, many = (_held_after_forward(live, blocks, **options) for blocks in (3, 5))
    return [(b - a) / 2 for a, b in zip(few, many, strict=True)]


ALL = shardkit.ActivationOffload(min_bytes=0)


@both_kinds
def test_a_checkpointed_block_costs_its_input_and_an_offloaded_one_nothing_on_the_device(live, reentrant):
    chosen = shardkit.ActivationCheckpointing(use_reentrant=reentrant)
    assert _per_block(live, activation_checkpointing=chosen) == [INPUT, 0, 0, 0]
    offloaded = dataclasses.replace(chosen, offload_to_cpu=True)
    assert _per_block(live, activation_checkpointing=offloaded) == [0, INPUT, 0, 0]
    assert _per_block(live, activation_checkpointing=chosen, activation_offload=ALL) == [0, INPUT, 0, 0]


def test_offload_moves_what_a_block_saves_to_the_host_and_copies_nothing_twice(live):
    """A block of the oracle saves its input, its norm's output and two statistics per token, and two inner activations
    of 2 d + 1 (before and after gelu); its weights are recipes."""
    saved = INPUT + INPUT + 2 * 4 * TOKENS + 2 * 4 * (2 * D + 1) * TOKENS
    assert _per_block(live) == [saved, 0, 0, 0]
    assert _per_block(live, activation_offload=ALL) == [0, saved, 0, 0]


def test_at_most_two_groups_are_back_on_the_device_during_backward(monkeypatch):
    """The unit that backward is in, and the one before it."""
    groups, reach = [], saved_offload._Tape.reach

    def noted(tape, group):
        reach(tape, group)
        back = {g for g, all_kept in tape._groups.items() for kept in all_kept if kept._back is not None}
        groups.append((group, back))

    monkeypatch.setattr(saved_offload._Tape, "reach", noted)
    with fake_world(WORLD):
        model = _model(activation_offload=ALL)
        _steps(model, 1)
        model(torch.randint(0, 16, (2, 3))).sum().backward(retain_graph=True)  # so that nothing goes with the graph
    assert len({group for group, _ in groups}) >= 4
    assert all(back <= {group, group - 1} for group, back in groups)
