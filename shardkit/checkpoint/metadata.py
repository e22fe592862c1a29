"""The two files that describe a checkpoint: `.metadata`, for `torch.distributed.checkpoint`, and `shardkit.json`.

`.metadata` alone is a checkpoint for every tool that reads DCP's. `shardkit.json` adds what DCP has no place for:
lengths and checksums of all files, versions, the number of ranks. Each data file `__<rank>_0.distcp` has a
description `__<rank>_0.json`: where in each record the elements are, and their checksums. A rank reads the descriptions
of the files it reads from, and no others.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .files import INDEX, METADATA
from .records import Extent, Reader, strides_of
from .saved import Record, SavedTensor

FORMAT = 1


@dataclasses.dataclass
class Written:
    """A record that a rank has written. `sizes` is None for an object."""

    path: tuple[Any, ...]
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


def name_of(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def make_metadata(records: list[Written]) -> bytes:
    """The contents of `.metadata` for all ranks' records."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths: dict[str, tuple] = {}
    for r in records:
        name = name_of(r.path)
        if paths.setdefault(name, r.path) != r.path:
            raise CheckpointError(f"two things to save have the name {name!r}: {paths[name]} and {r.path}. Rename one.")
        where = _StorageInfo(r.file, r.offset, r.length)
        if r.sizes is None or r.shape is None or r.offsets is None or r.dtype is None:
            tensors[name] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(name)] = where
            continue
        properties = dcp.TensorProperties(dtype=r.dtype)
        entry = tensors.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(r.shape), []))
        storage[dcp.MetadataIndex(name, r.offsets, len(entry.chunks))] = where
        entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)))
    return pickle.dumps(dcp.Metadata(tensors, paths, storage, dcp.StorageMeta(), "1.0.0"))


def make_index(metadata: bytes, files: dict[str, dict], facts: dict[str, Any]) -> bytes:
    """The contents of `shardkit.json`. `files`: for each, its length and the checksum of its description."""
    version = sys.modules[__name__.partition(".")[0]].__version__
    index = {"format": FORMAT, "shardkit": version, "torch": torch.__version__, "saved": time.time(), **facts}
    index |= {"metadata": {"bytes": len(metadata), "crc": zlib.crc32(metadata)}, "files": files}
    return _sealed(index)


def describe_file(extents: dict[int, Extent]) -> bytes:
    """The contents of a data file's description: where the elements of the record at each offset are, and checksums."""
    rows = {str(at): [e.offset, e.nbytes, list(e.crcs or ())] for at, e in extents.items()}
    return json.dumps({"records": rows}, separators=(",", ":")).encode()


def description_of(file: str) -> str:
    return file.rsplit(".", 1)[0] + ".json"


def _sealed(index: dict) -> bytes:
    text = json.dumps(index, indent=1)
    return json.dumps({**index, "crc": zlib.crc32(text.encode())}, indent=1).encode()


class Checkpoint:
    """A complete checkpoint, open for reading. Made by shardkit, or by `torch.distributed.checkpoint`.

    tensors: name -> SavedTensor. objects: name -> its record. paths: name -> path in the nested dictionary.
    index: the contents of `shardkit.json`; None where another tool wrote the checkpoint.
    """

    def __init__(self, folder: Path):
        self.folder, self.reader = folder, Reader(folder)
        self.index = self._read_index()
        raw = self._read_small(METADATA)
        if self.index is not None and _facts(raw) != self.index["metadata"]:
            raise CheckpointError(f"{folder / METADATA} is damaged: it is not what was written. Load another one.")
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, Record] = {}
        self._descriptions: dict[str, dict] = {}
        self._unpack(self._unpickle(raw))

    def close(self) -> None:
        self.reader.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def read_object(self, name: str) -> Any:
        """An object of the checkpoint. Unpickles it, as `dcp.load` does: load checkpoints that you trust."""
        record = self.objects[name]
        if self.index is None:
            data = self.reader.read(record.file, record.offset, record.length)
        else:
            extent = self._extent(record, torch.uint8, (record.length,), (1,))
            data = bytearray(record.length)
            self.reader.read_extent(memoryview(data), extent, 0)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)

    def tensor(self, name: str) -> SavedTensor:
        """A tensor of the checkpoint, its records located where shardkit wrote them."""
        saved = self.tensors[name]
        if self.index is not None:
            for r in saved.records:
                r.extent = r.extent or self._extent(r, saved.dtype, r.sizes, strides_of(r.sizes))
        return saved

    def check_files(self) -> None:
        """Raises CheckpointError where a data file is missing or has another length than was written."""
        for file, facts in (self.index or {}).get("files", {}).items():
            _, size = self.reader._file(file)
            if size != facts["bytes"]:
                raise CheckpointError(
                    f"{self.folder / file} is damaged: it has {size} bytes, and {facts['bytes']} were written. Restore "
                    "the file, or load another checkpoint."
                )

    def _read_small(self, name: str) -> bytes:
        _, size = self.reader._file(name)
        return bytes(self.reader.read(name, 0, size))

    def _read_index(self) -> dict | None:
        if not (self.folder / INDEX).exists():
            return None
        try:
            index = json.loads(self._read_small(INDEX))
            crc = index.pop("crc")
            if crc != zlib.crc32(json.dumps(index, indent=1).encode()):
                raise ValueError("its checksum differs")
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.folder / INDEX} is damaged ({error}). Load another checkpoint.") from error
        if index["format"] > FORMAT:
            raise CheckpointError(
                f"{self.folder} has format {index['format']}, written by shardkit {index['shardkit']}; this version "
                f"reads up to {FORMAT}. Upgrade shardkit."
            )
        return index

    def _unpickle(self, raw: bytes) -> Any:
        import torch.distributed.checkpoint.filesystem  # noqa: F401  what the pickle refers to

        try:
            return pickle.loads(raw)
        except Exception as error:
            raise CheckpointError(
                f"{self.folder / METADATA} is damaged, or was written by a version of torch that this one does not "
                f"read: {type(error).__name__}: {error}"
            ) from error

    def _unpack(self, metadata: Any) -> None:
        planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        names = metadata.state_dict_metadata
        self.paths: dict[str, tuple] = {name: tuple(planned.get(name, (name,))) for name in names}
        sizes: dict[str, dict[tuple, tuple]] = {}
        for name, entry in names.items():
            if hasattr(entry, "chunks"):
                self.tensors[name] = SavedTensor(name, tuple(entry.size), entry.properties.dtype, [])
                sizes[name] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        for index, where in metadata.storage_data.items():
            if getattr(where, "transform_descriptors", None):
                raise CheckpointError(
                    f"{self.folder}: {index.fqn} was written through {where.transform_descriptors} (compressed, say). "
                    "shardkit reads plain records; load it with torch.distributed.checkpoint."
                )
            saved = self.tensors.get(index.fqn)
            if saved is None:
                self.objects[index.fqn] = Record((), (), where.relative_path, where.offset, where.length)
                continue
            offsets = tuple(index.offset) if index.offset is not None else tuple(0 for _ in saved.shape)
            box = sizes[index.fqn][offsets]
            saved.records.append(Record(offsets, box, where.relative_path, where.offset, where.length))

    def _extent(self, record: Record, dtype: torch.dtype, sizes: tuple, strides: tuple) -> Extent:
        if record.file not in self._descriptions:
            name = description_of(record.file)
            raw = self._read_small(name)
            if self.index is not None and zlib.crc32(raw) != self.index["files"][record.file]["crc"]:
                raise CheckpointError(f"{self.folder / name} is damaged. Restore the file, or load another checkpoint.")
            self._descriptions[record.file] = json.loads(raw)["records"]
        offset, nbytes, crcs = self._descriptions[record.file][str(record.offset)]
        return Extent(record.file, offset, nbytes, dtype, sizes, strides, tuple(crcs))


def _facts(raw: bytes) -> dict[str, int]:
    return {"bytes": len(raw), "crc": zlib.crc32(raw)}
