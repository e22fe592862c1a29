"""Groups of ranks and the collectives on them: the only file that calls torch.distributed's collectives.

`Mesh` says which ranks split a parameter (the shard group), which hold the same shard (the replicate group) and
over which host channel the ranks agree on order. `Group` offers the few collectives that the engine needs, and picks
the fastest correct form per backend:

    gloo, up to 8 ranks   all-gather: one asynchronous broadcast per rank, straight into views of the buffer.
                          reduce-scatter: point to point, added in rank order (torch emulates it by an all-reduce of
                          the whole buffer, twice the bytes and three times the CPU time).
    elsewhere             the backend's own calls.

Every collective returns a `Work`; whoever started it must `wait()` before reading the result. A `Work` keeps the
buffers alive that the collective still reads or writes.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions, ReduceScatterOptions

from .errors import ConfigError
from .layout import FlatLayout

FAST_GLOO_RANKS = 8  # beyond this the number of messages outweighs what gloo's own forms waste
_TAG = 0x5A4D  # tag of our point-to-point messages, so that they never pair with a user's

# The process group's own methods, below the bookkeeping of torch.distributed's functions, which costs more than these
# calls themselves. torch 2.13 renamed two of them.
_ALL_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"

# What gloo can move as it is; other dtypes travel as bytes.
_NATIVE = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64
}  # fmt: skip


def _wire(t: torch.Tensor) -> torch.Tensor:
    """A view of the 1-D tensor `t` in a dtype that every backend can move."""
    return t if t.dtype in _NATIVE else t.view(torch.uint8)


class Work:
    """A collective in flight. `wait()` may be called once or more; it returns the collective's result, if any."""

    __slots__ = ("_works", "_keep", "_finish", "_result")

    def __init__(self, works=(), keep=(), finish=None):
        self._works = works
        self._keep = keep  # memory that the collective still uses
        self._finish = finish
        self._result = None

    def wait(self):
        if self._works is not None:
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._result = self._finish()
            self._works = self._keep = self._finish = None
        return self._result


@dataclasses.dataclass
class _Cut:
    """What one rank holds of a layout: (parameter, start, stop in it, offset in the slice), by size of the piece."""

    large: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    small: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    packed: int = 0  # elements of the small ones


class Cuts:
    """Which pieces of which parameters go to which rank, for `Group.reduce_scatter_parts`."""

    LARGE = 16384  # elements; below this a message costs more than packing

    def __init__(self, layout: FlatLayout):
        self.length = layout.shard_numel
        self.of = [_Cut() for _ in range(layout.world_size)]
        large = 0
        for rank, cut in enumerate(self.of):
            for i in range(len(layout.shapes)):
                start, stop = layout.piece(i, rank)
                if stop > start:
                    piece = (i, start, stop, layout.local_offset(i, rank))
                    if stop - start >= self.LARGE:
                        cut.large.append(piece)
                        large += stop - start
                    else:
                        cut.small.append(piece)
                        cut.packed += stop - start
        self.worthwhile = 2 * large >= layout.used > 0  # else one copy of everything is cheaper


class Group:
    """The collectives of one process group, as the engine needs them. Buffers are 1-D and contiguous.

    A group of one rank communicates nothing and is not backed by a process group.
    """

    def __init__(self, pg: ProcessGroup | None):
        self._twin: Group | None = None
        self.pg = pg
        self.size = pg.size() if pg is not None else 1
        self.rank = pg.rank() if pg is not None else 0
        self.ranks = dist.get_process_group_ranks(pg) if pg is not None else [dist.get_rank()]
        self.backend = dist.get_backend(pg) if pg is not None else "none"
        self.absent = False  # inside join(): some rank has no more batches, and answers to requests only
        self.peers = [r for r in range(self.size) if r != self.rank]
        self.direct = "gloo" in self.backend and self.size <= FAST_GLOO_RANKS
        # False for a backend that moves nothing, such as "fake", or the simulator's "fake_gloo" and "fake_nccl"
        self.talks = not self.backend.startswith("fake")

    def __deepcopy__(self, memo):
        return self  # a process group is a connection, not data

    def __repr__(self):
        return f"Group(rank {self.rank} of {self.size}, {self.backend})"

    def _is_direct(self, t: torch.Tensor) -> bool:
        # "cpu:gloo,cuda:nccl" groups have both kinds of transport; the tensor decides.
        return self.direct and t.device.type == "cpu"

    def all_gather(self, buffer: torch.Tensor) -> Work:
        """Fills `buffer` (size * n elements) from every rank's slice of n; this rank's slice must be in place."""
        if self.size == 1 or buffer.numel() == 0:
            return Work()
        buffer = _wire(buffer)
        n = buffer.numel() // self.size
        if self._is_direct(buffer):
            return Work([self._broadcast(part, r) for r, part in enumerate(buffer.split(n))], (buffer,))
        options = AllgatherOptions()
        options.asyncOp = True
        own = buffer.narrow(0, self.rank * n, n)
        return Work([getattr(self.pg, _ALL_GATHER)(buffer, own, options)], (buffer,))

    def reduce_scatter(self, buffer: torch.Tensor, divisor: float) -> Work:
        """Sums `buffer` (size * n elements) over the ranks and divides by `divisor`. The result, this rank's slice of
        n, is a new tensor: float32 where a direct gloo transport moved 16-bit values, else of the buffer's dtype.

        `buffer` is only read, and must not change until the work has been waited for.
        """
        if buffer.is_complex():
            inner = self.reduce_scatter(torch.view_as_real(buffer).view(-1), divisor)
            return Work((), (), lambda: torch.view_as_complex(inner.wait().view(-1, 2)))
        n = buffer.numel() // self.size
        if n == 0:
            return Work((), (), lambda: buffer.new_empty(0))
        if self.size == 1:
            return Work((), (), lambda: buffer / divisor if divisor != 1 else buffer.clone())
        if self._is_direct(buffer):
            return self._reduce_scatter_direct(buffer, n, divisor)
        out = buffer.new_empty(n)
        # NCCL scales before it adds, so that a 16-bit sum cannot overflow; gloo's AVG is a sum and a division.
        average = "nccl" in self.backend and divisor == self.size
        options = ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
        options.asyncOp = True
        work = getattr(self.pg, _REDUCE_SCATTER)(out, buffer, options)
        return Work([work], (buffer,), lambda: out if average or divisor == 1 else out.div_(divisor))

    def _reduce_scatter_direct(self, buffer: torch.Tensor, n: int, divisor: float) -> Work:
        works = [self._send(buffer.narrow(0, r * n, n), r) for r in self.peers]
        own = buffer.narrow(0, self.rank * n, n)

        def receive(r):
            total = buffer.new_empty(n)
            return [self._receive(total, r)], lambda: total

        return self._sum_in_order(works, (buffer,), receive, lambda total: total.add_(own), divisor)

    def reduce_scatter_parts(self, parts: dict[int, torch.Tensor], cuts: Cuts, divisor: float) -> Work:
        """As `reduce_scatter`, of a buffer that was never put together: `parts[i]` is the flattened gradient of
        parameter i of the layout that `cuts` was made for, zero where missing. Only where `self.direct`.

        Large pieces travel straight from the gradients' own memory, small ones packed into one message per rank. It
        saves a copy of the whole unit, and the memory for it.
        """
        example = next(iter(parts.values()))
        mine = cuts.of[self.rank]

        def piece(i, start, stop):
            part = parts.get(i)
            return example.new_zeros(stop - start) if part is None else part[start:stop]

        def receive(r):
            total = example.new_empty(cuts.length)
            works = [self._receive(total[lo : lo + stop - start], r) for _, start, stop, lo in mine.large]
            packed = example.new_empty(mine.packed)
            if mine.small:
                works.append(self._receive(packed, r))

            def unpack():
                views = [total[lo : lo + stop - start] for _, start, stop, lo in mine.small]
                if views:
                    torch._foreach_copy_(views, list(packed.split([stop - start for _, start, stop, _ in mine.small])))
                return total

            return works, unpack

        def add_own(total):
            own = [cut for cut in (*mine.large, *mine.small) if cut[0] in parts]
            if own:
                views = [total[lo : lo + stop - start] for _, start, stop, lo in own]
                torch._foreach_add_(views, [parts[i][start:stop].to(total.dtype) for i, start, stop, _ in own])

        works, sent = [], []
        for r in self.peers:
            messages = [piece(*cut[:3]) for cut in cuts.of[r].large]
            if cuts.of[r].small:
                messages.append(torch.cat([piece(*cut[:3]) for cut in cuts.of[r].small]))
            works += [self._send(m, r) for m in messages]
            sent += messages
        return self._sum_in_order(works, (parts, sent), receive, add_own, divisor)

    def _sum_in_order(self, sends: list, keep: tuple, receive, add_own, divisor: float) -> Work:
        """A reduction: adds what the ranks send in rank order, whatever arrives first: the same bits on every run.

        One rank's pieces are received at a time, the first from now on, so that memory for them does not grow with the
        group. The first two terms may swap, because a + b == b + a, and that leaves a received tensor, not a part of a
        larger one, as the result.
        """
        first = receive(self.peers[0])

        def arrive(pending):
            works, unpack = pending
            for work in works:
                work.wait()
            return unpack()

        def finish():
            total = arrive(first)
            if total.dtype in (torch.float16, torch.bfloat16):
                total = total.float()
            for r in range(self.size):
                if r == self.rank:
                    add_own(total)
                elif r != self.peers[0]:
                    total += arrive(receive(r))
            for work in sends:
                work.wait()
            return total if divisor == 1 else total.div_(divisor)

        return Work((), keep, finish)

    def _receive(self, t: torch.Tensor, rank: int):
        assert self.pg is not None
        return self.pg.recv([t], rank, _TAG)

    def _send(self, t: torch.Tensor, rank: int):
        assert self.pg is not None
        return self.pg.send([t], rank, _TAG)

    def _broadcast(self, t: torch.Tensor, root: int):
        assert self.pg is not None
        options = BroadcastOptions()
        options.rootRank, options.asyncOp = root, True
        return self.pg.broadcast([t], options)

    def all_reduce(self, t: torch.Tensor, op=dist.ReduceOp.SUM) -> Work:
        """Reduces `t` in place over the ranks."""
        if self.size == 1 or t.numel() == 0:
            return Work()
        wire = torch.view_as_real(t) if t.is_complex() else t
        return Work([dist.all_reduce(wire, op=op, group=self.pg, async_op=True)], (t,))

    def broadcast(self, t: torch.Tensor, src: int = 0) -> Work:
        """Overwrites the contiguous tensor `t` with that of rank `src` of this group."""
        if self.size == 1 or t.numel() == 0:
            return Work()
        return Work([self._broadcast(_wire(t.view(-1)), src)], (t,))

    def all_gather_object(self, value) -> list:
        """Every rank's picklable `value`, in rank order. A blocking host call, for wrapping and checkpoints."""
        if self.size == 1:
            return [value]
        out = [None] * self.size
        dist.all_gather_object(out, value, group=self.pg)
        return out

    def host_twin(self) -> Group:
        """The same ranks on host connections of their own, so that a thread can use it while training uses this group.
        Made once; collective the first time."""
        if self._twin is None:
            alone = self.size == 1
            self._twin = self if alone else Group(
                dist.new_group(list(self.ranks), backend="gloo", use_local_synchronization=True)
            )
        return self._twin

    def gather_object(self, value) -> list:
        """On the first rank every rank's picklable `value`, in rank order; elsewhere an empty list. Blocks."""
        if self.size == 1:
            return [value]
        out = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, out, dst=self.ranks[0], group=self.pg)
        return out or []


class Channel:
    """Host messages between the ranks of one mesh, on connections of their own, so that they never queue behind data.

    One channel per set of ranks; the roots that use it register, because a rank may be asked to serve any of them.
    """

    WIDTH = 5  # int64 words in a message

    _open: dict[tuple[int, ...], Channel] = {}

    def __init__(self, ranks: tuple[int, ...]):
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.pg = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        self.roots: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.registered = 0
        self.rounds = 0  # exchanges so far, for tests and benchmarks
        self.order: Any = None  # the agreement that uses this channel

    @classmethod
    def of(cls, ranks) -> Channel:
        key = tuple(ranks)
        channel = cls._open.get(key)
        if channel is None or dist.distributed_c10d._world.pg_map.get(channel.pg) is None:
            channel = cls._open[key] = cls(key)  # the first, or the first since the default group was destroyed
        return channel

    def __deepcopy__(self, memo):
        return self

    def register(self, root) -> int:
        self.registered += 1
        self.roots[self.registered] = root
        return self.registered

    def exchange(self, message: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Sends up to WIDTH integers to every rank and returns every rank's, in rank order. Blocks."""
        self.rounds += 1
        words = torch.zeros(self.size, self.WIDTH, dtype=torch.int64)
        words[self.rank, : len(message)] = torch.tensor(message)
        works = []
        for r in range(self.size):
            if r != self.rank:
                works.append(self.pg.recv([words[r]], r, _TAG))
                works.append(self.pg.send([words[self.rank]], r, _TAG))
        for work in works:
            work.wait()
        return [tuple(row) for row in words.tolist()]

    def maximum(self, values: torch.Tensor) -> None:
        """In-place elementwise maximum of a small host tensor over the ranks. Blocks."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.pg)


class Mesh:
    """Which ranks split parameters, and which hold the same shard.

    shard: ranks that hold the pieces of one parameter. replicate: ranks that hold the same piece.
    world: all of them, on which ranks agree at wrap time. channel: None where there is nobody to disagree with, or
    where no host messages can be exchanged (the fake backend of a simulation). near: neighbours within the shard group
    that together keep full parameters from forward to backward; None where nobody does.
    """

    def __init__(self, shard: Group, replicate: Group, world: Group, channel: Channel | None, near: Group | None):
        self.shard, self.replicate, self.world, self.channel, self.near = shard, replicate, world, channel, near

    def __deepcopy__(self, memo):
        return self

    @property
    def size(self) -> int:
        return self.shard.size * self.replicate.size


def _group(pg: ProcessGroup | None) -> Group:
    return Group(pg if pg is not None and pg.size() > 1 else None)


@functools.cache
def _settle_at_exit() -> None:
    """Waits a moment when the process ends. gloo's threads let go of a collective's tensors after it is done, for which
    they need the interpreter; one that comes while it is being taken down aborts the process. Of 40 that ended
    right after collectives, 11 did with torch alone, 6 with a sharded model, and none of 60 that waited first."""
    atexit.register(time.sleep, 0.1)


def make_mesh(
    process_group=None, device_mesh=None, *, shard: bool, mesh2d: bool, check_order: bool, near: int = 0
) -> Mesh:
    """The mesh for a wrapping. Collective over the ranks concerned when a host channel must be opened.

    process_group: a ProcessGroup, or a (shard group, replicate group) pair. device_mesh: 1-D (shard) or 2-D
    (replicate x shard). Neither: all ranks; a 2-D strategy then splits within a node.
    Raises ConfigError where torch.distributed is not initialised or the shapes do not fit the strategy.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised. Call torch.distributed.init_process_group() before wrapping, "
            "and start the script with torchrun (one process per device)."
        )
    if device_mesh is not None and process_group is not None:
        raise ConfigError("device_mesh and process_group were both given. Pass one of them.")
    pair: tuple[ProcessGroup | None, ProcessGroup | None] = (None, None)
    if device_mesh is not None:
        if device_mesh.ndim == 1:
            pair = (device_mesh.get_group(), None)
        elif device_mesh.ndim == 2:
            pair = (device_mesh.get_group(1), device_mesh.get_group(0))
        else:
            raise ConfigError(
                f"device_mesh has {device_mesh.ndim} dimensions. Use 1 (shard) or 2 (replicate x shard)."
            )
    elif isinstance(process_group, (tuple, list)):
        if len(process_group) != 2:
            raise ConfigError(
                f"process_group has {len(process_group)} entries; expected (shard group, replicate group)."
            )
        pair = (process_group[0], process_group[1])
    else:
        given = process_group if process_group is not None else dist.group.WORLD
        assert given is not None
        pair = _split_by_node(given) if mesh2d else (given, None)
    if pair[0] is dist.GroupMember.NON_GROUP_MEMBER or pair[1] is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"rank {dist.get_rank()} is not a member of the process group that was given.")
    inner, outer = _group(pair[0]), _group(pair[1])
    if not shard:  # plain data parallelism: one piece, held by everybody
        if outer.size > 1 and inner.size > 1:
            raise ConfigError("sharding_strategy='none' takes a 1-D mesh or a process group, not a 2-D mesh.")
        inner, outer = Group(None), inner if inner.size > 1 else outer
    world, ranks = _world_of(inner, outer)
    if world.talks:
        _settle_at_exit()
    can_talk = check_order and len(ranks) > 1 and world.talks
    return Mesh(inner, outer, world, Channel.of(ranks) if can_talk else None, _near(inner, near))


def _near(shard: Group, n: int) -> Group | None:
    """The group of n neighbours in the shard group that this rank belongs to."""
    if n == 0 or n == shard.size:
        return None
    if shard.size % n:
        fits = [d for d in range(1, shard.size + 1) if shard.size % d == 0]
        raise ConfigError(
            f"reshard_after_forward={n} does not divide the {shard.size} ranks of the shard group. Use {fits}."
        )
    first = shard.rank // n * n
    return Group(dist.new_group(shard.ranks[first : first + n], use_local_synchronization=True) if n > 1 else None)


def _split_by_node(pg: ProcessGroup):
    """(shard group, replicate group) for ranks laid out node by node, LOCAL_WORLD_SIZE ranks on each."""
    local = int(torch.accelerator.device_count()) if torch.accelerator.is_available() else pg.size()
    size = pg.size()
    if local <= 0 or size % local:
        raise ConfigError(
            f"a hybrid strategy splits {size} ranks by node, but {local} devices per node do not divide them. "
            "Pass device_mesh=init_device_mesh(..., (nodes, ranks_per_node))."
        )
    ranks, shard, replicate = dist.get_process_group_ranks(pg), None, None
    for rows, which in (
        ([ranks[i : i + local] for i in range(0, size, local)], "shard"),
        ([ranks[i::local] for i in range(local)], "replicate"),
    ):
        for row in rows:
            made = dist.new_group(row)
            if dist.get_rank() in row:
                if which == "shard":
                    shard = made
                else:
                    replicate = made
    return shard, replicate


def _world_of(inner: Group, outer: Group) -> tuple[Group, list[int]]:
    """A group over all ranks of the mesh (reusing an existing one) and its global ranks."""
    if outer.size == 1:
        return inner, inner.ranks
    if inner.size == 1:
        return outer, outer.ranks
    if inner.size * outer.size == dist.get_world_size():
        return Group(dist.group.WORLD), list(range(dist.get_world_size()))
    everyone = inner.all_gather_object(outer.ranks)
    ranks = sorted(r for row in everyone for r in row)
    world = dist.group.WORLD
    if ranks == dist.get_process_group_ranks(world):
        return Group(world), ranks
    return Group(dist.new_group(ranks, use_local_synchronization=True)), ranks
