"""Where every element of a unit's parameters lives: offsets, padding, and each rank's range of each parameter.

A unit's parameters lie end to end in one flat buffer. The buffer is cut into ``world_size`` slices of equal length,
one per rank, so that one all-gather fills it and full parameters are plain views of it. What is left over at the end
is padding. Pure arithmetic on shapes: nothing here touches a tensor, a device or a process group.

Three parameters, ``bias (4,)``, ``w (6, 4)``, ``v (4, 2)``, on 3 ranks. The order inside the buffer is ours to choose:
the longest rows come first, and the slice is a multiple of the row lengths where that costs little padding::

    36 elements in slices of 12, no padding; wN is row N of w (4 elements), vN row N of v (2 elements)

    offset      0           12          24          36
    buffer      |w0  w1  w2 |w3  w4  w5 |v0..v3 bias|
    rank        |---- 0 ----|---- 1 ----|---- 2 ----|

    parameter   rank 0   rank 1   rank 2
    w           (3, 4)   (3, 4)   (0, 4)
    v           (0, 2)   (0, 2)   (4, 2)
    bias        (0,)     (0,)     (4,)

On 4 ranks whole rows of w would need slices of 12, a third more memory. Beyond ``max_padding`` the cuts fall on a
smaller granule, down to one element, and a parameter that is cut within a row is a run of its flattened elements,
``(m, 1, ..., 1)``::

    36 elements in slices of 9, no padding

    offset      0            9            18           27           36
    buffer      |w[0:9]      |w[9:18]     |w[18:] v[:3]|v[3:] bias  |
    rank        |---- 0 -----|---- 1 -----|---- 2 -----|---- 3 -----|

    parameter   rank 0   rank 1   rank 2   rank 3
    w           (9, 1)   (9, 1)   (6, 1)   (0, 4)
    v           (0, 2)   (0, 2)   (3, 1)   (5, 1)
    bias        (0,)     (0,)     (0,)     (4,)

Rows are those of dimension 0: ``shape[1:]`` elements each, one element for vectors and scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm, prod

__all__ = ["FlatLayout", "plan_layout", "rectangles"]

# Elements that keep every slice 16-byte aligned for any dtype, as vectorised copies and NCCL's fast path want.
_ALIGNED = 16
# Where rows do not fit. Four elements align float32; one always fits.
_SMALL_GRANULES = (_ALIGNED, 4, 1)


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one flat parameter. Hashable; equal on all ranks when their shapes and world size are equal.

    All lengths are in elements. Make one with :func:`plan_layout`.

    Attributes:
        shapes: shape of each parameter, in the caller's order. ``index`` in the methods refers to it.
        world_size: number of slices.
        shard_numel: length of every rank's slice; rank r holds ``[r * shard_numel, (r + 1) * shard_numel)``.
        offsets: start of each parameter in the flat buffer, in the caller's order (the buffer's order may differ).
        whole_rows: True where every cut through the parameter falls between two rows of dimension 0, in particular
            where no cut falls inside it.
    """

    shapes: tuple[tuple[int, ...], ...]
    world_size: int
    shard_numel: int
    offsets: tuple[int, ...]
    whole_rows: tuple[bool, ...]

    @property
    def numel(self) -> int:
        """Length of the flat buffer, padding included."""
        return self.shard_numel * self.world_size

    @property
    def used(self) -> int:
        """Number of elements that belong to a parameter; they are the first ones of the buffer."""
        return sum(prod(shape) for shape in self.shapes)

    @property
    def padding(self) -> int:
        """Number of elements at the end of the buffer that belong to no parameter."""
        return self.numel - self.used

    def piece(self, index: int, rank: int) -> tuple[int, int]:
        """``(start, stop)``: the run of flattened parameter ``index`` that ``rank`` holds; ``(0, 0)`` if it has none.

        Raises:
            ValueError: ``rank`` is outside ``[0, world_size)``.
        """
        lower, upper = self._overlap(index, rank)
        offset = self.offsets[index]
        return (lower - offset, upper - offset) if lower < upper else (0, 0)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Shape of the piece of parameter ``index`` on ``rank``; it has the parameter's ndim, or 1 for a scalar.

        ``(rows, *shape[1:])`` where cuts fall on whole rows, ``(m, 1, ..., 1)`` where they do not,
        ``(0, *shape[1:])`` where the rank holds nothing. A scalar is ``(1,)`` on the rank that holds it, else ``(0,)``.
        """
        shape = self.shapes[index]
        start, stop = self.piece(index, rank)
        if start == stop:
            return (0, *shape[1:])
        if self.whole_rows[index]:
            return ((stop - start) // _row_numel(shape), *shape[1:])
        return (stop - start, *(1 for _ in shape[1:]))

    def local_offset(self, index: int, rank: int) -> int:
        """Where the piece of parameter ``index`` starts inside the slice of ``rank``; 0 if the rank has none."""
        lower, upper = self._overlap(index, rank)
        return lower - rank * self.shard_numel if lower < upper else 0

    def _overlap(self, index: int, rank: int) -> tuple[int, int]:
        """The parameter's range of the buffer cut down to the rank's slice; empty when the second is not larger."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside this layout's world of {self.world_size} ranks (0 to "
                             f"{self.world_size - 1}). Pass the rank within the shard group, not the global rank.")
        offset = self.offsets[index]
        lower = max(offset, rank * self.shard_numel)
        upper = min(offset + prod(self.shapes[index]), (rank + 1) * self.shard_numel)
        return lower, upper


def plan_layout(shapes: Iterable[Sequence[int]], world_size: int, *, max_padding: float = 0.01) -> FlatLayout:
    """Lay parameters of these ``shapes`` end to end and cut them into ``world_size`` equal slices.

    Deterministic, so every rank computes the same layout by itself. Of the slice lengths tried whose padding is at
    most ``max_padding`` of the elements, takes one that leaves most parameters on whole rows; where it leaves all of
    them so, the shortest one that keeps slices aligned. The cost does not depend on ``world_size``.

    Args:
        shapes: one shape per parameter; 0-dim and empty ones are fine, and so is an empty list.
        world_size: number of ranks, at least 1.
        max_padding: largest padding to accept for the sake of whole rows, as a fraction of the elements. Where
            nothing else fits, slices are cut at single elements and padding is less than ``world_size`` elements.

    Raises:
        ValueError: ``world_size`` is below 1, ``max_padding`` is negative, or a shape has a negative dimension.
    """
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    if world_size < 1:
        raise ValueError(f"world_size={world_size}, expected at least 1: the number of ranks to shard over.")
    if max_padding < 0:
        raise ValueError(f"max_padding={max_padding}, expected a fraction of at least 0 (0.01 allows 1 %).")
    for index, shape in enumerate(sizes):
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape} of parameter {index} has a negative dimension.")

    # Long rows first: where shorter rows divide longer ones, as they mostly do, every parameter then starts at a
    # multiple of its own row, which is what puts a cut at a multiple of the row between two rows. Vectors of odd
    # length come last, where they cannot put a matrix off its alignment. The sort keeps the caller's order otherwise.
    numels = [prod(shape) for shape in sizes]
    rows = [_row_numel(shape) for shape in sizes]
    order = sorted(range(len(sizes)), key=lambda index: -rows[index])
    offsets = [0] * len(sizes)
    used = 0
    for index in order:
        offsets[index] = used
        used += numels[index]

    candidates = [(shard_numel, tuple(map(partial(_cut_on_rows, shard_numel), offsets, numels, rows)))
                  for shard_numel in _slice_lengths(sizes, used, world_size, max_padding)]
    all_whole = [candidate for candidate in candidates if all(candidate[1])]
    if all_whole:
        shard_numel, whole = min(all_whole, key=lambda candidate: (candidate[0] % _ALIGNED != 0, candidate[0]))
    else:
        # The first of equals, the coarsest: what must be cut within a row is then at least cut between short runs.
        shard_numel, whole = max(candidates, key=lambda candidate: sum(candidate[1]))
    return FlatLayout(sizes, world_size, shard_numel, tuple(offsets), whole)


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements ``[start, stop)`` of a flattened tensor into boxes: ``[(offsets, lengths), ...]``.

    Each box is itself a run of the flattened tensor and they follow one another, so that the k-th box is the next
    ``prod(lengths)`` elements of the run. As few boxes as that allows, at most ``2 * ndim - 1`` (one for a scalar).
    Checkpoints, which know tensors as boxes, use this for a piece that was cut within a row.

    Args:
        shape: shape of the whole tensor; ``()`` gives ``[((), ())]``.
        start, stop: the run, in elements, ``0 <= start <= stop <= prod(shape)``. An empty one gives ``[]``.

    Raises:
        ValueError: the run does not lie within the tensor.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"elements [{start}, {stop}) do not lie within a tensor of shape {shape}, "
                         f"which has {prod(shape)} elements.")
    return list(_boxes(shape, start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last); there may be none
    if first > last:  # the run begins and ends within one row
        yield from _boxes_of_row(shape, last, start, stop)
        return
    yield from _boxes_of_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _boxes_of_row(shape, last, last * row, stop)


def _boxes_of_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes of ``[start, stop)``, which lies within row number ``row``."""
    base = row * prod(shape[1:])
    for offsets, lengths in _boxes(shape[1:], start - base, stop - base):
        yield (row, *offsets), (1, *lengths)


def _row_numel(shape: tuple[int, ...]) -> int:
    return prod(shape[1:])


def _slice_lengths(
    shapes: tuple[tuple[int, ...], ...], used: int, world_size: int, max_padding: float
) -> Iterator[int]:
    """Slice lengths worth trying, coarsest granule first: all hold ``used`` elements within the allowed padding.

    Granules are the least common multiples of the 2, 3, ... shortest rows, each row alone, what rows consist of (so
    that a stack of matrices that must be cut within one is cut where checkpoints need few boxes), and the small ones.
    """
    even = -(-used // world_size)
    filled = [shape for shape in shapes if prod(shape) > 0]
    granules = {*_SMALL_GRANULES, *(run for shape in filled for run in _runs_within_row(shape))}
    multiple = 1
    for row in sorted({_row_numel(shape) for shape in filled}):
        multiple = lcm(multiple, row)
        granules |= {row, multiple}
    tried = set()
    for granule in sorted(granules, reverse=True):
        shard_numel = -(-even // granule) * granule
        padding = shard_numel * world_size - used
        if shard_numel not in tried and (granule == 1 or padding <= max_padding * used):
            tried.add(shard_numel)
            yield shard_numel


def _runs_within_row(shape: tuple[int, ...]) -> Iterator[int]:
    """Lengths of the rows of a row, of their rows, and so on; nothing for fewer than three dimensions."""
    run = 1
    for size in reversed(shape[2:]):
        run *= size
        yield run


def _cut_on_rows(shard_numel: int, offset: int, numel: int, row: int) -> bool:
    """Whether every multiple of ``shard_numel`` strictly inside the parameter's range falls between two rows."""
    if numel == 0 or row == 1:
        return True
    first = (offset // shard_numel + 1) * shard_numel
    last = (offset + numel - 1) // shard_numel * shard_numel
    if first > last:
        return True
    # Cuts are evenly spaced: the first one and the spacing decide for all of them.
    return (first - offset) % row == 0 and (first == last or shard_numel % row == 0)
