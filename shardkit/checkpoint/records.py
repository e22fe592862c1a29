"""Tensors as bytes in a file: what `torch.distributed.checkpoint` reads, written and read without its copies.

A record is what `torch.save(tensor)` makes, a zip archive without compression:

    [header][data.pkl: dtype, shape, strides] [header][pad][data/0: the elements, 64-byte aligned] [version][directory]

Written straight from the tensor's memory; read straight into it, only the elements that are wanted. The checksum that
zip asks for (CRC-32) is taken once and kept at every BLOCK on the way: `crc(block k, start=crc k-1) == crc k` checks
any block by itself, so that a rank that needs a part of a record can still tell that the part is what was written.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

BLOCK = 4 << 20  # bytes between two checksums
LARGEST = 1 << 30  # bytes of a record's elements; more would need zip's 64-bit form, which we do not write
_ALIGN = 64
_NAME = "archive"


@dataclasses.dataclass(frozen=True)
class Extent:
    """Where a record's elements lie: `nbytes` from `offset` in `file`, a tensor of `sizes` and `strides` (elements)."""

    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    crcs: tuple[int, ...] | None = None  # at the end of every BLOCK; None where nobody took them


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy. The tensor must outlive the view."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


# ----------------------------------------------------------------------------------------------------- writing


class _Storage:
    """Stands for the storage in the pickle, which refers to it by name."""

    def __init__(self, dtype: torch.dtype, numel: int, nbytes: int):
        names = torch.storage._dtype_to_storage_type_map()
        self.typed = dtype in names and dtype not in torch.storage._new_dtypes()
        self.reference: tuple[Any, ...]
        if self.typed:
            self.reference = ("storage", getattr(torch, names[dtype]), "0", "cpu", numel)
        else:
            self.reference = ("storage", torch.UntypedStorage, "0", "cpu", nbytes)


class _Tensor:
    def __init__(self, storage: _Storage, dtype: torch.dtype, sizes: tuple[int, ...]):
        self.storage, self.dtype, self.sizes = storage, dtype, sizes

    def __reduce__(self):
        arguments: tuple[Any, ...] = (self.storage, 0, self.sizes, strides_of(self.sizes), False, OrderedDict())
        if self.storage.typed:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, self.dtype, {})


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.reference if isinstance(obj, _Storage) else None


def strides_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _entry(name: str, crc: int, size: int, at: int, align: bool) -> tuple[bytes, bytes]:
    """(local header with padding, directory entry) of a file of the archive whose header starts at `at`."""
    encoded = f"{_NAME}/{name}".encode()
    extra = b""
    if align:
        room = -(at + 30 + len(encoded) + 4) % _ALIGN
        extra = struct.pack("<HH", 0x4246, room) + b"Z" * room
    common = struct.pack("<HHHHHIIIH", 20, 0, 0, 0, 0, crc, size, size, len(encoded))
    local = b"PK\3\4" + common + struct.pack("<H", len(extra)) + encoded + extra
    entry = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHHII", 0, 0, 0, 0, 0, at) + encoded
    return local, entry


def write_tensor(stream, tensor: torch.Tensor, sizes: tuple[int, ...]) -> tuple[int, Extent]:
    """Appends a record with the elements of `tensor` (contiguous, on the host) as a tensor of `sizes`.

    Returns the record's length and where its elements are, relative to the start of the file. At most LARGEST bytes.
    """
    start, data = stream.tell(), memory_of(tensor)
    crcs, crc = [], 0
    for at in range(0, len(data), BLOCK):
        crc = zlib.crc32(data[at : at + BLOCK], crc)
        crcs.append(crc)
    described = io.BytesIO()
    storage = _Storage(tensor.dtype, tensor.numel(), len(data))
    _Pickler(described, protocol=2).dump(_Tensor(storage, tensor.dtype, sizes))
    at, directory, where = 0, [], 0
    parts = (("data.pkl", described.getvalue()), ("byteorder", b"little"), ("data/0", data), ("version", b"3\n"))
    for name, content in parts:
        is_data = name == "data/0"
        local, entry = _entry(name, crc if is_data else zlib.crc32(content), len(content), at, is_data)
        stream.write(local)
        stream.write(content)
        where = at + len(local) if is_data else where
        at += len(local) + len(content)
        directory.append(entry)
    tail = b"".join(directory)
    stream.write(tail + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(directory), len(directory), len(tail), at, 0))
    extent = Extent("", start + where, len(data), tensor.dtype, sizes, strides_of(sizes), tuple(crcs))
    return stream.tell() - start, extent


def write_bytes(stream, content: bytes) -> tuple[int, Extent]:
    """Appends `content` as it is: what `torch.save` made of an object."""
    start, crcs, crc = stream.tell(), [], 0
    for at in range(0, len(content), BLOCK):
        crc = zlib.crc32(content[at : at + BLOCK], crc)
        crcs.append(crc)
    stream.write(content)
    return len(content), Extent("", start, len(content), torch.uint8, (len(content),), (1,), tuple(crcs))


# ----------------------------------------------------------------------------------------------------- reading


class Reader:
    """The files of one checkpoint, open for reading. `bytes_read` counts what was asked of the file system."""

    def __init__(self, folder: Path):
        self.folder, self.bytes_read = folder, 0
        self._open: dict[str, tuple[int, int]] = {}

    def close(self) -> None:
        for descriptor, _ in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def _file(self, name: str) -> tuple[int, int]:
        if name not in self._open:
            try:
                descriptor = os.open(self.folder / name, os.O_RDONLY)
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.folder / name} is missing: the checkpoint is not complete. Restore the file, or load "
                    "another checkpoint."
                ) from None
            self._open[name] = descriptor, os.fstat(descriptor).st_size
        return self._open[name]

    def read_into(self, view: memoryview, file: str, offset: int) -> None:
        """Fills `view` from a file, from `offset` on."""
        descriptor, size = self._file(file)
        if offset + len(view) > size:
            raise CheckpointError(
                f"{self.folder / file} is damaged: it has {size} bytes, and bytes {offset} to {offset + len(view)} "
                "belong to the checkpoint. It was cut short; restore it, or load another checkpoint."
            )
        done = 0
        while done < len(view):
            n = os.preadv(descriptor, [view[done : done + (256 << 20)]], offset + done)
            if n == 0:
                raise CheckpointError(f"{self.folder / file} ended while it was being read.")
            done += n
        self.bytes_read += done

    def read(self, file: str, offset: int, nbytes: int) -> bytearray:
        out = bytearray(nbytes)
        self.read_into(memoryview(out), file, offset)
        return out

    def read_extent(self, view: memoryview, extent: Extent, start: int) -> None:
        """Fills `view` with bytes of an extent from its byte `start` on, and checks the blocks they lie in."""
        if extent.crcs is None:
            self.read_into(view, extent.file, extent.offset + start)
            return
        stop = start + len(view)
        for k in range(start // BLOCK, -(-stop // BLOCK)):
            low, high = k * BLOCK, min((k + 1) * BLOCK, extent.nbytes)
            inside = start <= low and high <= stop
            block = view[low - start : high - start] if inside else memoryview(bytearray(high - low))
            self.read_into(block, extent.file, extent.offset + low)
            if zlib.crc32(block, extent.crcs[k - 1] if k else 0) != extent.crcs[k]:
                raise CheckpointError(
                    f"{self.folder / extent.file} is damaged: bytes {extent.offset + low} to {extent.offset + high} "
                    "are not those that were written (their checksum differs). Restore the file, or load another "
                    "checkpoint."
                )
            if not inside:
                first, last = max(low, start), min(high, stop)
                view[first - start : last - start] = block[first - low : last - low]

    def parse(self, file: str, offset: int, length: int) -> Extent:
        """Finds the elements of a record that `torch.save` wrote at `offset`."""
        window = _Window(self, file, offset, length)
        try:
            with zipfile.ZipFile(io.BufferedReader(window, 4096)) as archive:
                root = archive.namelist()[0].split("/")[0]
                found = _Unpickler(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
                entry = archive.getinfo(f"{root}/data/{found.key}")
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise pickle.UnpicklingError("it is compressed")
                header = bytes(self.read(file, offset + entry.header_offset, 30))
        except (zipfile.BadZipFile, KeyError, IndexError, pickle.UnpicklingError, struct.error) as error:
            raise CheckpointError(
                f"{self.folder / file} is damaged, or of a kind that shardkit does not read: bytes {offset} to "
                f"{offset + length} are not a tensor written by torch.save ({error})."
            ) from error
        skip = 30 + sum(struct.unpack("<HH", header[26:30])) + found.offset * found.dtype.itemsize
        nbytes = entry.file_size - found.offset * found.dtype.itemsize
        return Extent(file, offset + entry.header_offset + skip, nbytes, found.dtype, found.sizes, found.strides)


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, reader: Reader, file: str, offset: int, length: int):
        self._reader, self._file, self._offset, self._length, self._at = reader, file, offset, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        n = max(0, min(len(buffer), self._length - self._at))
        if n:
            self._reader.read_into(memoryview(buffer)[:n], self._file, self._offset + self._at)
            self._at += n
        return n


_STORAGE_DTYPES = {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}


@dataclasses.dataclass
class _Described:
    key: str
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Reads what a record says about its tensor, and nothing that could run code."""

    def persistent_load(self, pid):
        return pid

    def find_class(self, module, name):
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _described
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, requires_grad, hooks: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.storage"):
            value = _STORAGE_DTYPES.get(name, getattr(torch, name, None))
            if isinstance(value, torch.dtype) or name == "UntypedStorage":
                return value
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _described(storage, offset, sizes, strides, requires_grad, hooks, dtype=None, metadata=None) -> _Described:
    dtype = storage[1] if dtype is None else dtype
    return _Described(storage[2], dtype, offset, tuple(sizes), tuple(strides))
