"""From one form of weights to another, one process, one tensor at a time: memory is bounded by the largest tensor.

Read: distributed checkpoints (shardkit, FSDP2, FSDP1, DDP), safetensors, files of torch.save, fairscale's shards.
Written: safetensors, as `transformers` opens them, and distributed checkpoints.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import CheckpointError, ConfigError
from . import files, save
from .foreign import FairscaleShards, TorchFile
from .load import MODEL_PREFIXES
from .metadata import Checkpoint, description_of
from .records import memory_of
from .safetensors import FILE_BYTES, INDEX, Place, SafetensorsFolder, plan


class Source(Protocol):
    """Weights that can be read one by one."""

    def places(self) -> list[Place]: ...
    def aliases(self) -> dict[str, str]: ...
    def read(self, name: str) -> torch.Tensor: ...


class _Saved:
    """The model's tensors of a distributed checkpoint, or of safetensors files, without the prefix of their names."""

    def __init__(self, opened: Checkpoint | SafetensorsFolder):
        self.opened = opened
        names = list(opened.tensors)
        prefix = next((p for p in MODEL_PREFIXES if p and any(n.startswith(p) for n in names)), "")
        # Safetensors names are a model's own, whatever they begin with. A checkpoint without a known prefix is a model.
        self.prefix = prefix if isinstance(opened, Checkpoint) and _is_top(opened, prefix) else ""
        self._names = {n[len(self.prefix) :]: n for n in names if n.startswith(self.prefix)}

    def places(self) -> list[Place]:
        tensors = self.opened.tensors
        return [Place(n, tensors[full].dtype, tensors[full].shape) for n, full in self._names.items()]

    def aliases(self) -> dict[str, str]:
        """Names whose records are those of a name before: a tied weight that was saved once."""
        first: dict[tuple, str] = {}
        out = {}
        for name, full in self._names.items():
            where = tuple((r.file, r.offset) for r in self.opened.tensors[full].records)
            if self.opened.tensors[full].nbytes and first.setdefault(where, name) != name:
                out[name] = first[where]
        return out

    def read(self, name: str) -> torch.Tensor:
        return self.opened.tensor(self._names[name]).read(self.opened.reader)


def _is_top(checkpoint: Checkpoint, prefix: str) -> bool:
    """True where the prefix is a key of the saved dictionary, and not the first part of parameter names."""
    depth = prefix.count(".")
    key = prefix[:-1]
    return any(".".join(map(str, path[:depth])) == key for path in checkpoint.paths.values() if len(path) > depth)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[str, Source]]:
    """(kind, source) for a path. Raises CheckpointError for what is none of the forms that can be read."""
    if path.is_file() and path.suffix != ".safetensors":
        yield "torch", TorchFile(path)
        return
    if path.is_dir() and not any(path.glob("*.safetensors")):
        if any(p.suffix in (".pt", ".pth", ".bin") for p in path.iterdir()) and not files.is_complete(path):
            yield "fairscale", FairscaleShards(path)
            return
        with Checkpoint(files.resolve(path)) as checkpoint:
            checkpoint.check_files()
            yield "dcp", _Saved(checkpoint)
        return
    with SafetensorsFolder(path) as folder:
        yield "safetensors", _Saved(folder)


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str | None = None,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> str:
    """Converts weights, and returns what was written: "safetensors" or "dcp".

    Args:
        source: a distributed checkpoint or a folder of them, a folder or file of safetensors, a file of torch.save, or
            a folder of fairscale's sharded files. Optimizer state is not converted.
        target: a folder. It appears when it is complete; one that holds a checkpoint is replaced, any other must be
            empty or not exist.
        to: "safetensors" or "dcp". None: safetensors from a distributed checkpoint, which is what all others become.
        dtype: of floating-point tensors in the target; None: as they are.
        file_bytes: of tensors in one file of safetensors.

    Runs in one process; no process group is needed. Shows a progress bar where tqdm is installed. Raises
    CheckpointError for damaged sources, ConfigError for targets that cannot be.
    """
    source, target = Path(source).absolute(), Path(target).absolute()
    if to not in (None, "safetensors", "dcp"):
        raise ConfigError(f"to={to!r}, expected 'safetensors' or 'dcp'.")
    if not source.exists():
        raise CheckpointError(f"{source} does not exist.")
    if target.exists() and any(target.iterdir()) and not files.is_complete(target):
        raise ConfigError(f"{target} is not empty. Convert into a folder that does not exist.")
    with opened(source) as (kind, read):
        to = to or ("safetensors" if kind == "dcp" else "dcp")
        temporary = files.temporary_of(target, files.new_token())
        files.make_folder(temporary)
        try:
            (_to_safetensors if to == "safetensors" else _to_dcp)(read, temporary, target, dtype, file_bytes)
        except BaseException:
            files.remove_folder(temporary)
            raise
    return to


def _to_safetensors(source: Source, temporary: Path, target: Path, dtype, file_bytes: int) -> None:
    aliases = source.aliases()
    places = [p for p in source.places() if p.name not in aliases]
    for place in places:
        place.dtype = _dtype(place, dtype)
    layout = plan(places, file_bytes)
    with contextlib.ExitStack() as stack, _progress(sum(p.nbytes for p in places), f"-> {target.name}") as done:
        out = {name: stack.enter_context(open(temporary / name, "wb")) for name in layout.headers}
        for name, file in out.items():
            file.write(layout.headers[name])
            file.truncate(layout.lengths[name])
        for place in places:
            tensor = source.read(place.name).to(place.dtype).contiguous()
            out[place.file].seek(place.offset)
            out[place.file].write(memory_of(tensor))
            done(place.nbytes)
        for file in out.values():
            files.flush(file)
    if layout.index is not None:
        files.write_file(temporary / INDEX, layout.index)
    if target.exists() and not any(target.iterdir()):
        target.rmdir()
    if target.exists():
        raise ConfigError(f"{target} holds a distributed checkpoint. Convert into a folder that does not exist.")
    files.flush_folder(temporary)
    files.rename(temporary, target)


def _to_dcp(source: Source, temporary: Path, target: Path, dtype, file_bytes: int) -> None:
    places, aliases = source.places(), source.aliases()
    writer = save.Writer(temporary, "__0_0.distcp")
    with writer, _progress(sum(p.nbytes for p in places if p.name not in aliases), f"-> {target.name}") as done:
        for place in places:
            if place.name not in aliases:
                writer.whole(("model", place.name), source.read(place.name).to(_dtype(place, dtype)))
                done(place.nbytes)
        files.flush(writer.stream)
    facts = writer.finish(False)
    assert (temporary / description_of(writer.file)).is_file()
    shared = [(("model", name), ("model", other)) for name, other in aliases.items()]
    part = save.Done(writer.file, facts, writer.written, shared)
    save._publish(temporary, target, [part], set(), 1)


def _dtype(place: Place, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and place.dtype.is_floating_point else place.dtype


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], Any]]:
    """A bar that counts bytes, where tqdm is installed; nothing elsewhere."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda n: None
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update
