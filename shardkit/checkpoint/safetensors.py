"""The safetensors format: read any part of a tensor without reading the rest, write a tensor from several processes.

A file is a length (8 bytes), a JSON header with each tensor's dtype, shape and place, and the tensors' elements,
row-major, one after another. Several files share an index that maps names to files, in the form `transformers` reads.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from math import prod
from pathlib import Path

import torch

from ..errors import CheckpointError
from .records import Extent, Reader, strides_of
from .saved import Record, SavedTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5_000_000_000  # of tensors in one file, as the hub's tools cut them

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclasses.dataclass
class Place:
    """Where a tensor's elements go: `nbytes` from byte `offset` of `file`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass
class Layout:
    """Files to write: for each its header, and its length; `index` is the contents of the index, None for one file."""

    places: list[Place]
    headers: dict[str, bytes]
    lengths: dict[str, int]
    index: bytes | None


def plan(tensors: list[Place], file_bytes: int = FILE_BYTES) -> Layout:
    """Lays out tensors, in their order, in files of at most `file_bytes` (one tensor at least). Deterministic.

    Raises CheckpointError for a dtype that the format does not have.
    """
    for t in tensors:
        if t.dtype not in _NAMES:
            raise CheckpointError(f"safetensors has no name for {t.dtype}, the dtype of {t.name}. Convert it first.")
    groups: list[list[Place]] = [[]]
    size = 0
    for t in tensors:
        if groups[-1] and size + t.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(t)
        size += t.nbytes
    many = len(groups)
    names = [SINGLE] if many == 1 else [f"model-{i + 1:05}-of-{many:05}.safetensors" for i in range(many)]
    headers, lengths = {}, {}
    for name, group in zip(names, groups, strict=True):
        # Wide elements first keeps every tensor aligned; the sort keeps the order otherwise.
        entries, at = {}, 0
        for t in sorted(group, key=lambda t: -t.dtype.itemsize):
            entries[t.name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
            t.file, t.offset = name, at
            at += t.nbytes
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[name] = struct.pack("<Q", len(text)) + text
        lengths[name] = len(headers[name]) + at
        for t in group:
            t.offset += len(headers[name])
    index = None
    if len(groups) > 1:
        total = {"total_size": sum(t.nbytes for t in tensors)}
        index = json.dumps({"metadata": total, "weight_map": {t.name: t.file for t in tensors}}, indent=2).encode()
    return Layout(tensors, headers, lengths, index)


class SafetensorsFolder:
    """A folder of safetensors files (or one file), open for reading, with the interface of `metadata.Checkpoint`."""

    index = None

    def __init__(self, path: Path):
        self.folder = path if path.is_dir() else path.parent
        self.reader = Reader(self.folder)
        self.tensors: dict[str, SavedTensor] = {}
        self.objects: dict[str, Record] = {}
        for file in self._files(path):
            self._read_header(file)

    def close(self) -> None:
        self.reader.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def tensor(self, name: str) -> SavedTensor:
        return self.tensors[name]

    def _files(self, path: Path) -> list[str]:
        if path.is_file():
            return [path.name]
        if (path / INDEX).is_file():
            return sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        if (path / SINGLE).is_file():
            return [SINGLE]
        found = sorted(p.name for p in path.glob("*.safetensors"))
        if not found:
            raise CheckpointError(
                f"{path} holds no *.safetensors. Pass a folder that save_pretrained or shardkit.save_safetensors "
                "wrote, or convert the checkpoint: shardkit convert."
            )
        return found

    def _read_header(self, file: str) -> None:
        _, size = self.reader._file(file)
        (length,) = struct.unpack("<Q", bytes(self.reader.read(file, 0, 8)))
        try:
            if length > size:
                raise ValueError("its header is longer than the file")
            header = json.loads(bytes(self.reader.read(file, 8, length)))
        except ValueError as error:
            raise CheckpointError(f"{self.folder / file} is no safetensors file, or is damaged: {error}.") from error
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            origin = tuple(0 for _ in shape)
            extent = Extent(file, 8 + length + start, stop - start, dtype, shape, strides_of(shape))
            record = Record(origin, shape, file, extent.offset, extent.nbytes, extent)
            self.tensors[name] = SavedTensor(name, shape, dtype, [record])
