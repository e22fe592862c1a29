"""What is in a checkpoint, without loading it."""

from __future__ import annotations

import dataclasses
import datetime
import re
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import files
from .metadata import Checkpoint
from .safetensors import SafetensorsFolder


@dataclasses.dataclass
class Tensor:
    """One saved tensor. ranks: those that wrote a part of it; None where its files do not say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    ranks: list[int] | None


@dataclasses.dataclass
class Contents:
    """`facts`: versions, number of ranks, time, step, as far as they are known. `str()` is a table."""

    path: str
    kind: str
    facts: dict[str, Any]
    tensors: list[Tensor]
    objects: list[str]

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.kind}"]
        lines += [f"  {key}: {value}" for key, value in self.facts.items()]
        rows = [("tensor", "dtype", "shape", "bytes", "ranks")]
        for t in self.tensors:
            shape = "x".join(map(str, t.shape)) or "scalar"
            rows.append((t.name, t.dtype, shape, f"{t.nbytes:,}", _ranks(t.ranks)))
        width = [max(len(row[i]) for row in rows) for i in range(5)]
        for name, dtype, shape, nbytes, ranks in rows:
            cells = (name.ljust(width[0]), dtype.ljust(width[1]), shape.ljust(width[2]), nbytes.rjust(width[3]), ranks)
            lines.append("  ".join(cells).rstrip())
        lines.append(f"{len(self.tensors)} tensors, {sum(t.nbytes for t in self.tensors):,} bytes")
        if self.objects:
            lines.append(f"{len(self.objects)} objects: {', '.join(self.objects)}")
        return "\n".join(lines)


def inspect(path) -> Contents:
    """The contents of a distributed checkpoint (or of the newest in a folder of them) or of safetensors files.

    Reads descriptions only, and objects only where they may be the step. Runs in one process. Raises CheckpointError.
    """
    path = Path(path).absolute()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.is_file() or any(path.glob("*.safetensors")):
        with SafetensorsFolder(path) as folder:
            tensors = [Tensor(t.name, _dtype(t.dtype), t.shape, t.nbytes, None) for t in folder.tensors.values()]
            return Contents(str(path), "safetensors", {}, tensors, [])
    with Checkpoint(files.resolve(path)) as checkpoint:
        checkpoint.check_files()
        tensors = [
            Tensor(t.name, _dtype(t.dtype), t.shape, t.nbytes, _writers(t.records)) for t in checkpoint.tensors.values()
        ]
        kind = "checkpoint of torch.distributed.checkpoint"
        if checkpoint.index is not None:
            kind = "checkpoint of shardkit"
        return Contents(str(checkpoint.folder), kind, _facts(checkpoint), tensors, sorted(checkpoint.objects))


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if checkpoint.index is not None:
        index = checkpoint.index
        saved = datetime.datetime.fromtimestamp(index["saved"], datetime.timezone.utc)
        facts |= {"saved": f"{saved:%Y-%m-%d %H:%M:%S} UTC", "ranks": index["world_size"]}
        facts |= {"shardkit": index["shardkit"], "torch": index["torch"], "format": index["format"]}
    step = _step(checkpoint)
    return facts if step is None else {"step": step, **facts}


def _step(checkpoint: Checkpoint) -> Any:
    """The extra called "step", or how often the optimizer has stepped."""
    if "step" in checkpoint.objects:
        return checkpoint.read_object("step")
    for name, tensor in checkpoint.tensors.items():
        if re.search(r"state\..*\.step$", name) and prod(tensor.shape) == 1:
            return int(checkpoint.tensor(name).read(checkpoint.reader).item())
    return None


def _writers(records) -> list[int] | None:
    """The ranks in the names of a tensor's files, which are `__<rank>_<number>.distcp`."""
    found = [re.match(r"__(\d+)_\d+\.distcp$", file) for file in {record.file for record in records}]
    return None if None in found else sorted({int(match[1]) for match in found if match is not None})


def _ranks(ranks: list[int] | None) -> str:
    if ranks is None:
        return ""
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if whole else ", ".join(map(str, ranks))


def _dtype(dtype) -> str:
    return str(dtype).removeprefix("torch.")
