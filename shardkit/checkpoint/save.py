"""Saving: every rank writes its own bytes into one folder, which becomes visible when all of them are there.

    collect    each rank names what it has; ranks compare (one object gather)
    prepare    the first rank makes the folder, under a temporary name
    write      each rank writes one file, forces it to the disk, checks it, and tells the first rank what is where
    publish    the first rank writes the descriptions, renames the folder, moves `latest`, removes old checkpoints

Ranks agree after each, so that what goes wrong on one is an error, with the same words, on all. No tensor is gathered.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..comm import Group
from ..errors import CheckpointError, ConfigError
from ..layout import rectangles
from . import files, records
from .agreement import together
from .full import steps_of
from .metadata import Written, describe_file, description_of, make_index, make_metadata, name_of
from .saved import Box
from .snapshot import Piece, Snapshot, Whole, pickled, take, world_of

RANK_STATE = "shardkit_rank_state"
_AHEAD = 16 << 20  # bytes that are handed to the disk together while the next ones are prepared


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    keep: int | None = None,
    verify: bool = False,
    **extra: Any,
) -> None:
    """Saves a sharded model, its optimizer and whatever else to the folder `path`, which all ranks must see.

    The folder is what `torch.distributed.checkpoint` writes and reads, for any number of ranks. It appears, or
    replaces the checkpoint of that name, in one step, once all ranks have written; whatever happens before, the
    previous one stays. Then the file `latest` beside it names it.

    Args:
        path: folder of this checkpoint, as `run/step_200`.
        optim: its state is saved under parameter names; those of frozen or ignored parameters included.
        keep: number of complete checkpoints to keep beside `path`, this one included, of those whose names differ
            from its name in numbers only (`step_100`, `step_200`); older ones are removed. None: all of them.
        verify: read everything back from the file system and compare checksums before the folder becomes visible.
            Lengths are compared in any case.
        **extra: anything with `state_dict()` (a scheduler, a scaler), or that can be pickled (the position in the
            data, random states). LocalShards in dictionaries, an average of the weights say, are saved sharded. What
            is not the same on all ranks is saved for each of them.

    Collective over the model's ranks: six small object gathers; no tensor is communicated.

    Raises, on every rank: CheckpointError where a rank could not write, ConfigError for an optimizer of another model,
    a `keep` below 1, or extras that ranks do not all have; StateError where nothing is sharded, or inside a forward.
    """
    from .background import finish

    finish(model)
    write(path, take_agreed(model, optim, extra, keep), world_of(steps_of(model)), keep, verify)


def take_agreed(model: nn.Module, optim, extra: dict[str, Any], keep: int | None) -> Snapshot:
    """`take`, with the ranks agreeing that it worked. One object gather."""

    def collect():
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}, expected at least 1: the checkpoint that is being saved counts.")
        return take(model, optim, extra)

    return together(world_of(steps_of(model)), "collecting what to save", collect)


def write(
    path, snapshot: Snapshot, group: Group, keep: int | None = None, verify: bool = False, latest: bool = True
) -> None:
    """Everything after the collection. `group`: all ranks of the model. `latest`: also write the file of that name
    beside it. See the module docstring."""
    path = Path(path).absolute()
    plan = Plan.agree(snapshot, group)
    temporary = files.temporary_of(path, plan.token)
    first = group.rank == 0

    def prepare():
        if first:
            if path.exists() and any(path.iterdir()) and not files.is_complete(path):
                raise CheckpointError(f"{path} exists and is not a checkpoint. Save under another name, or remove it.")
            files.remove_leftovers(path, keep is not None)
            files.make_folder(temporary)

    together(group, f"preparing {path}", prepare)
    try:
        done = together(group, f"writing {path}", lambda: _write_file(temporary, plan, snapshot, group.rank, verify))
        everything = group.gather_object(done)

        def publish():
            if first:
                _publish(temporary, path, everything, plan.per_rank, group.size)
                if latest:
                    files.point_latest(path)
                if keep is not None:
                    files.remove_old(path, keep)

        together(group, f"publishing {path}", publish)
    except BaseException:
        if first and temporary.exists():
            files.remove_folder(temporary)
        raise


@dataclasses.dataclass
class Plan:
    """What ranks agreed on: who writes what. `token`: of the temporary folder."""

    token: str
    per_rank: set[str]  # extras that differ between ranks, and are saved for each
    wholes: list[Whole]  # what this rank writes of the things that are the same everywhere

    @classmethod
    def agree(cls, snapshot: Snapshot, group: Group) -> Plan:
        names = [name_of(whole.path) for whole in snapshot.wholes]
        digests = {name: (len(data), zlib.crc32(data)) for name, data in snapshot.extra.items()}
        mine = (files.new_token(), digests, zlib.crc32("\n".join(names).encode()))
        said = group.all_gather_object(mine)
        missing = {name for _, other, _ in said for name in set(other) ^ set(said[0][1])}
        if missing:
            raise ConfigError(f"extra values {sorted(missing)} were given on some ranks only. Pass them on every rank.")
        per_rank = {name for name in digests if any(other[name] != said[0][1][name] for _, other, _ in said)}
        wholes = snapshot.wholes if group.rank == 0 else []
        if any(crc != said[0][2] for _, _, crc in said):
            # A rank has what the first one has not: the first that has a thing writes it.
            before = {name for other in group.all_gather_object(names)[: group.rank] for name in other}
            wholes = [w for w, name in zip(snapshot.wholes, names, strict=True) if name not in before]
        return cls(said[0][0], per_rank, wholes)


@dataclasses.dataclass
class Done:
    """What a rank has written."""

    file: str
    facts: dict[str, int]
    written: list[Written]
    aliases: list[tuple[tuple, tuple]]  # (path, path it shares its records with)


def _write_file(folder: Path, plan: Plan, snapshot: Snapshot, rank: int, verify: bool) -> Done:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} was made by the first rank and is not there: a checkpoint needs a file system that all ranks "
            "share."
        )
    writer = Writer(folder, f"__{rank}_0.distcp")
    with writer:
        writer.everything(snapshot, plan, rank)
        files.flush(writer.stream)
    facts = writer.finish(verify)
    aliases = [(p.path, p.alias_of) for p in snapshot.pieces if p.alias_of is not None]
    return Done(writer.file, facts, writer.written, aliases if rank == 0 else [])


class Writer:
    """One data file."""

    def __init__(self, folder: Path, file: str):
        self.folder, self.file = folder, file
        self.written: list[Written] = []
        self.extents: dict[int, records.Extent] = {}
        self._flushing = 0  # bytes that the system was told to write out

    def __enter__(self):
        self.stream = open(self.folder / self.file, "wb", buffering=1 << 20)
        return self

    def __exit__(self, *exc):
        self.length = self.stream.tell() if exc[0] is None else 0
        self.stream.close()

    def everything(self, snapshot: Snapshot, plan: Plan, rank: int) -> None:
        """Writes what is this rank's to write."""
        for number, piece in enumerate(snapshot.pieces):
            if piece.alias_of is None and number % piece.replicas == piece.replica:
                self.piece(piece)
        for whole in plan.wholes:
            self.whole(whole.path, whole.value)
        for name, data in snapshot.extra.items():
            if name in plan.per_rank:
                self.content((f"{name}.rank{rank}",), data)
            elif rank == 0:
                self.content((name,), data)
        if snapshot.local_state is not None:
            self.content((f"{RANK_STATE}.rank{rank}",), snapshot.local_state)

    def piece(self, piece: Piece) -> None:
        info, local = piece.info, piece.local.reshape(-1)
        run = info.piece
        if 0 in info.shape and info.rank == 0:
            self.tensor(piece.path, info.shape, local, [(tuple(0 for _ in info.shape), info.shape)])
        elif run[1] > run[0]:
            self.tensor(piece.path, info.shape, local, rectangles(info.shape, *run))

    def whole(self, path: tuple, value: Any) -> None:
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
        if plain and not value.is_quantized and value.device.type != "meta":
            shape = tuple(value.shape)
            self.tensor(path, shape, value.detach().reshape(-1), [(tuple(0 for _ in shape), shape)])
        else:
            self.content(path, pickled(value))

    def tensor(self, path: tuple, shape: tuple[int, ...], flat: torch.Tensor, boxes: list[Box]) -> None:
        """Writes boxes of a tensor of `shape`, which follow one another in `flat` (1-D)."""
        at = 0
        for offsets, sizes in (part for box in boxes for part in small_enough(box, flat.element_size())):
            n = prod(sizes)
            host = flat[at : at + n].cpu().contiguous()
            start = self.stream.tell()
            length, self.extents[start] = records.write_tensor(self.stream, host.resolve_conj().resolve_neg(), sizes)
            self.written.append(Written(path, self.file, start, length, flat.dtype, shape, offsets, sizes))
            at += n
            if start + length - self._flushing > _AHEAD:
                files.start_flushing(self.stream, self._flushing, start + length)
                self._flushing = start + length

    def content(self, path: tuple, data: bytes) -> None:
        start = self.stream.tell()
        length, self.extents[start] = records.write_bytes(self.stream, data)
        self.written.append(Written(path, self.file, start, length))

    def finish(self, verify: bool) -> dict[str, int]:
        """Checks the closed file, and writes its description."""
        size = (self.folder / self.file).stat().st_size
        if size != self.length:
            raise CheckpointError(f"{self.folder / self.file} has {size} bytes after writing {self.length}.")
        description = describe_file(self.extents)
        files.write_file(self.folder / description_of(self.file), description)
        if verify:
            buffer = bytearray(records.BLOCK)
            with records.Reader(self.folder) as reader:
                for extent in self.extents.values():
                    for at in range(0, extent.nbytes, records.BLOCK):
                        part = memoryview(buffer)[: min(records.BLOCK, extent.nbytes - at)]
                        reader.read_extent(part, dataclasses.replace(extent, file=self.file), at)
        return {"bytes": size, "crc": zlib.crc32(description), "records": len(self.extents)}


def small_enough(box: Box, itemsize: int):
    """The box in runs of at most LARGEST bytes."""
    offsets, sizes = box
    if prod(sizes) * itemsize <= records.LARGEST:
        yield box
        return
    dim = next(d for d, n in enumerate(sizes) if n > 1)
    rows = max(1, records.LARGEST // (prod(sizes[dim + 1 :]) * itemsize))
    for start in range(0, sizes[dim], rows):
        n = min(rows, sizes[dim] - start)
        part = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), (*sizes[:dim], n, *sizes[dim + 1 :])
        yield from small_enough(part, itemsize)


def _publish(temporary: Path, path: Path, everything: list[Done], per_rank: set[str], world: int) -> None:
    written = [record for done in everything for record in done.written]
    by_path: dict[tuple, list[Written]] = {}
    for record in written:
        by_path.setdefault(record.path, []).append(record)
    for alias, target in everything[0].aliases:
        written.extend(dataclasses.replace(record, path=alias) for record in by_path.get(target, ()))
    for done in everything:
        size = (temporary / done.file).stat().st_size
        if size != done.facts["bytes"]:
            raise CheckpointError(f"{temporary / done.file} has {size} bytes; its rank wrote {done.facts['bytes']}.")
    metadata = make_metadata(written)
    facts = {"world_size": world, "per_rank": sorted(per_rank)}
    files.write_file(temporary / files.METADATA, metadata)
    files.write_file(temporary / files.INDEX, make_index(metadata, {d.file: d.facts for d in everything}, facts))
    files.publish(temporary, path)
