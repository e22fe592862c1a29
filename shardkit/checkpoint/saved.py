"""What a checkpoint holds, whoever wrote it: tensors as boxes in files, read a run of elements at a time.

A rank's piece of a parameter is a run of its flattened elements; a saved tensor is a set of boxes, one for each record.
`read_run` reads the parts of the boxes that lie in the run, straight into the memory of the piece where dtypes agree.
No rank reads bytes that it does not need, except to the next checksum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import prod

import torch

from ..errors import CheckpointError
from ..layout import rectangles
from .records import Extent, Reader, memory_of, strides_of

_SCRATCH = 32 << 20  # bytes that are read at a time where elements have to be converted or picked out

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offsets, lengths)


@dataclasses.dataclass
class Record:
    """One box of a tensor in a file: a record of `length` bytes at `offset`. `extent` is found when it is needed."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int
    extent: Extent | None = None

    def locate(self, reader: Reader) -> Extent:
        if self.extent is None:
            self.extent = reader.parse(self.file, self.offset, self.length)
        if self.extent.sizes != self.sizes:
            raise CheckpointError(
                f"{reader.folder / self.file} is damaged: the tensor at byte {self.offset} has shape "
                f"{self.extent.sizes}, and the checkpoint's metadata says {self.sizes}."
            )
        return self.extent


@dataclasses.dataclass
class SavedTensor:
    """A whole tensor of a checkpoint: its shape and dtype, and the records that hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    records: list[Record]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read_run(self, reader: Reader, start: int, stop: int, out: torch.Tensor) -> None:
        """Fills `out` (1-D, contiguous, `stop - start` elements, any dtype and device) with elements [start, stop).

        Raises CheckpointError for a missing or damaged file, and where no record holds some of the elements.
        """
        if out.device.type != "cpu":
            host = torch.empty(out.shape, dtype=out.dtype)
            self.read_run(reader, start, stop, host)
            out.copy_(host)
            return
        at = found = 0
        for offsets, lengths in rectangles(self.shape, start, stop):
            n = prod(lengths)
            target = out[at : at + n].view(lengths)
            for record in self.records:
                common = _intersection((offsets, lengths), (record.offsets, record.sizes))
                if common is not None:
                    _copy_box(reader, record, common, _part(target, offsets, common))
                    found += prod(common[1])
            at += n
        if found != stop - start:
            raise CheckpointError(
                f"{reader.folder}: {self.name} is not complete: its records hold {found} of the {stop - start} "
                f"elements [{start}, {stop}). The checkpoint was not finished, or its writer lost a rank."
            )

    def read(self, reader: Reader) -> torch.Tensor:
        """The whole tensor, on the host."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read_run(reader, 0, out.numel(), out.view(-1))
        return out


def _intersection(first: Box, second: Box) -> Box | None:
    offsets, lengths = [], []
    for (a, n), (b, m) in zip(zip(*first, strict=True), zip(*second, strict=True), strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        offsets.append(low)
        lengths.append(high - low)
    return tuple(offsets), tuple(lengths)


def _part(whole: torch.Tensor, origin: tuple[int, ...], box: Box) -> torch.Tensor:
    for dim, (first, start, length) in enumerate(zip(origin, *box, strict=True)):
        whole = whole.narrow(dim, start - first, length)
    return whole


def _copy_box(reader: Reader, record: Record, box: Box, target: torch.Tensor) -> None:
    """Reads a box (of the whole tensor) of a record into `target`, of the box's lengths."""
    extent = record.locate(reader)
    size = extent.dtype.itemsize
    for offsets, lengths, slab in _slabs(box, target, extent):
        inner = [a - b for a, b in zip(offsets, record.offsets, strict=True)]
        first = sum(i * stride for i, stride in zip(inner, extent.strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(lengths, extent.strides, strict=True)) + 1
        dense = last - first == prod(lengths) and _is_dense(lengths, extent.strides)
        if dense and slab.is_contiguous() and slab.dtype == extent.dtype:
            reader.read_extent(memory_of(slab), extent, first * size)
            continue
        scratch = torch.empty(last - first, dtype=extent.dtype)
        reader.read_extent(memory_of(scratch), extent, first * size)
        slab.copy_(scratch.as_strided(lengths, extent.strides))


def _slabs(box: Box, target: torch.Tensor, extent: Extent) -> Iterator[tuple[tuple, tuple, torch.Tensor]]:
    """The box in pieces along dimension 0 that bound the scratch memory; as it is where it needs none."""
    offsets, lengths = box
    if not lengths:
        yield offsets, lengths, target
        return
    direct = target.dtype == extent.dtype and target.is_contiguous() and _is_dense(lengths, extent.strides)
    row = max(1, extent.strides[0]) * extent.dtype.itemsize
    rows = lengths[0] if direct else max(1, _SCRATCH // row)
    for start in range(0, lengths[0], rows):
        n = min(rows, lengths[0] - start)
        yield (offsets[0] + start, *offsets[1:]), (n, *lengths[1:]), target.narrow(0, start, n)


def _is_dense(lengths: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True where a box of these lengths in a tensor of these strides is one run in memory, in row-major order."""
    return all(n == 1 or a == b for n, a, b in zip(lengths, strides, strides_of(lengths), strict=True))
