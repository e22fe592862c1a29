"""What a checkpoint takes: the memory of `save_checkpoint`, `async_save` and `full_state_dict`, in the simulated world.

What runs is the checkpoints' own code: it collects the pieces, copies them, agrees and plans who writes what. Left out
is what needs values or other ranks: no file is written, and where ranks exchange objects, all others are said to have
sent what this one sent.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..checkpoint import save
from ..checkpoint.agreement import together
from ..checkpoint.full import full_state_dict, steps_of
from ..checkpoint.metadata import Written
from ..checkpoint.snapshot import Snapshot, take, world_of
from ..errors import ConfigError
from ..runtime.flat_param import home_of
from .ledger import Ledger
from .observe import Observer
from .world import is_simulated

KINDS = ("sharded", "async", "full")


def check(kind: Any) -> None:
    """Raises ConfigError for a kind of saving that there is not."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"save={kind!r} is not known. Use one of {', '.join(KINDS)}, or None for no saving.")


def run(ledger: Ledger, model: nn.Module, optim: torch.optim.Optimizer, kind: str, gpu: bool) -> int:
    """Saves once, as the phase "save" of the ledger: what is allocated is for the checkpoint, or gathered parameters.

    gpu: copies go to host memory that does not count. Returns the bytes of host memory that they take there at a time.
    """
    with ledger.phase("save"):
        if kind == "full":
            with _gathers_on_device(ledger, model), ledger.on_host(gpu):
                return _bytes(full_state_dict(model, rank0_only=True).values())
        ranks = _Everyone(world_of(steps_of(model)))
        state: Any = _Sharded(optim)
        snapshot = together(ranks, "collecting what to save", lambda: take(model, state, {}))  # type: ignore[arg-type]
        if kind == "async":
            with ledger.on_host(gpu):  # the thread's messages as well: it talks over host connections
                together(ranks, "copying the state to host memory", snapshot.to_host)  # type: ignore[arg-type]
                _write(snapshot, ranks)
            return _bytes([p.local for p in snapshot.pieces] + [w.value for w in snapshot.wholes])
        return _write(snapshot, ranks)


@contextlib.contextmanager
def _gathers_on_device(ledger: Ledger, model: nn.Module) -> Iterator[None]:
    observer = Observer(ledger, model)
    observer.attach()
    for step in observer.steps:
        for flat in step.flats:
            gather = flat.gather_like_shard

            def gathered(shard, gather=gather):
                with ledger.on_host(False):
                    return gather(shard)

            flat.__dict__["gather_like_shard"] = gathered  # detach() takes it away
    try:
        yield
    finally:
        observer.detach()


class _Sharded:
    """An optimizer without the state that is no shard (factored moments, say): it is pickled, which takes values, and
    is written from there, so that it takes no tensor's memory."""

    def __init__(self, optim: torch.optim.Optimizer):
        self.param_groups = optim.param_groups
        self.state = {
            param: {key: value for key, value in state.items() if not _is_odd(param, value)}
            for param, state in optim.state.items()
        }


def _is_odd(param: torch.Tensor, value: Any) -> bool:
    home = home_of(param)
    sized = isinstance(value, torch.Tensor) and value.dim() > 0
    return home is not None and sized and tuple(value.shape) != home[0].infos[home[1]].local_shape


def _write(snapshot: Snapshot, ranks: _Everyone) -> int:
    """The steps of `checkpoint.save.write`, without the file. Returns the bytes of the largest piece."""
    plan = save.Plan.agree(snapshot, ranks)  # type: ignore[arg-type]
    together(ranks, "preparing", lambda: None)  # type: ignore[arg-type]
    writer = _Unwritten()
    writer.everything(snapshot, plan, rank=0)
    done = save.Done(writer.file, {}, writer.written, [])
    together(ranks, "writing", lambda: None)  # type: ignore[arg-type]
    ranks.gather_object(done)
    together(ranks, "publishing", lambda: None)  # type: ignore[arg-type]
    return writer.largest


class _Unwritten(save.Writer):
    """A file that takes notes of what would be written to it."""

    def __init__(self):
        super().__init__(Path(), "__0_0.distcp")
        self.stream, self.largest = io.BytesIO(), 0

    def whole(self, path: tuple, value: Any) -> None:
        if is_simulated(value) and value.layout == torch.strided:
            shape = tuple(value.shape)
            self.tensor(path, shape, value.detach().reshape(-1), [((0,) * len(shape), shape)])
        else:
            super().whole(path, value)

    def tensor(self, path, shape, flat, boxes) -> None:
        at = 0
        for offsets, sizes in (part for box in boxes for part in save.small_enough(box, flat.element_size())):
            n = prod(sizes)
            flat[at : at + n].cpu().contiguous()
            nbytes = n * flat.element_size()
            self.written.append(Written(path, self.file, 0, nbytes, flat.dtype, shape, offsets, tuple(sizes)))
            self.largest = max(self.largest, nbytes)
            at += n


class _Everyone:
    """Stands for the ranks that agree about a checkpoint, where there is one. Its messages are as large as real ones:
    torch sends objects as bytes in tensors, as long as the longest, on the device of the process group."""

    def __init__(self, group):
        self.rank, self.size = group.rank, group.size

    def all_gather_object(self, value: Any) -> list:
        return self._exchange(value, True)

    def gather_object(self, value: Any) -> list:
        return self._exchange(value, self.rank == 0)

    def _exchange(self, value: Any, receives: bool) -> list:
        if self.size > 1:
            n = len(pickle.dumps(value))
            sent = torch.empty(n, dtype=torch.uint8)
            received = torch.empty(n * self.size, dtype=torch.uint8) if receives else None
            del sent, received
        return [value] * self.size if receives else []


def _bytes(values) -> int:
    """Of the tensors among some values, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in values if isinstance(t, torch.Tensor)}
    return sum(storages.values())
