"""What torch's caching allocator on a GPU would reserve for the blocks of a ledger: its rules, replayed.

The rules (c10/cuda/CUDACachingAllocator.cpp, defaults, one stream): sizes are rounded up to 512 bytes. Blocks up to 1
MiB come from segments of 2 MiB; larger ones below 10 MiB from segments of 20 MiB; others from segments of their own,
rounded up to 2 MiB. The smallest free piece that fits is taken, and split where what is left is at least 512 bytes
(small) or more than 1 MiB (large). Neighbouring free pieces are merged. Segments are kept.

What is not in here: memory of the CUDA context and of libraries (several hundred MB), and what NCCL allocates.
"""

from __future__ import annotations

import bisect

from .ledger import _NEVER, Ledger

_ROUND, _SMALL, _SMALL_SEGMENT = 512, 1 << 20, 2 << 20
_MIDDLE, _MIDDLE_SEGMENT = 10 << 20, 20 << 20


class _Piece:
    __slots__ = ("size", "before", "after", "free", "order")

    def __init__(self, size: int, order: int):
        self.size, self.order = size, order
        self.before: _Piece | None = None
        self.after: _Piece | None = None
        self.free = True


class CachingAllocator:
    """`reserved`: bytes in segments. Make room with `allocate(size) -> piece`, give it back with `free(piece)`."""

    def __init__(self):
        self.reserved = self.peak_allocated = self.allocated = 0
        self._free: tuple[list, list] = ([], [])  # small, large: sorted (size, order, piece)
        self._made = 0

    def allocate(self, size: int) -> tuple[_Piece, bool]:
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        pool = self._free[0 if small else 1]
        at = bisect.bisect_left(pool, (size, -1))
        if at < len(pool):
            piece = pool.pop(at)[2]
        else:
            piece = self._segment(size, small)
        rest = piece.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            self._split(piece, size, rest, pool)
        piece.free = False
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return piece, small

    def _segment(self, size: int, small: bool) -> _Piece:
        if small:
            length = _SMALL_SEGMENT
        elif size < _MIDDLE:
            length = _MIDDLE_SEGMENT
        else:
            length = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved += length
        return self._piece(length)

    def _piece(self, size: int) -> _Piece:
        self._made += 1
        return _Piece(size, self._made)

    def _split(self, piece: _Piece, size: int, rest: int, pool: list) -> None:
        left = self._piece(rest)
        left.before, left.after = piece, piece.after
        if piece.after is not None:
            piece.after.before = left
        piece.after, piece.size = left, size
        bisect.insort(pool, (left.size, left.order, left))

    def free(self, handle: tuple[_Piece, bool]) -> None:
        piece, small = handle
        pool = self._free[0 if small else 1]
        self.allocated -= piece.size
        for other, before in ((piece.before, True), (piece.after, False)):
            if other is not None and other.free:
                pool.pop(bisect.bisect_left(pool, (other.size, other.order)))
                piece.size += other.size
                if before:
                    piece.before = other.before
                    if other.before is not None:
                        other.before.after = piece
                else:
                    piece.after = other.after
                    if other.after is not None:
                        other.after.before = piece
        piece.free = True
        bisect.insort(pool, (piece.size, piece.order, piece))


def reserved_bytes(ledger: Ledger, since: int | None = None) -> int:
    """Bytes that the allocator holds at the end of the record. since: only what was alive then or came later; None:
    what training sees, since models are often built on the host."""
    if since is None:
        since = next((visit.start for visit in ledger.visits if visit.phase != "init"), 0)
    events = []
    for block in ledger.blocks:
        gone = min(block.died, block.left)
        if gone > max(since, block.born):
            events.append((block.born, 1, block))
            if gone < _NEVER:
                events.append((gone, 0, block))
    allocator, held = CachingAllocator(), {}
    for _, is_new, block in sorted(events, key=lambda e: e[:2]):
        if is_new:
            held[id(block)] = allocator.allocate(block.size)
        else:
            allocator.free(held.pop(id(block)))
    return allocator.reserved
