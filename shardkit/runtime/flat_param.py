"""One flat parameter: parameters of a unit that share dtypes, end to end in a buffer of which each rank keeps a slice.

    shard    1-D, `layout.shard_numel` elements of the master dtype, on every rank: what the optimizer updates.
             Every local parameter's `.data` is a view of it.
    buffer   1-D, `layout.numel` elements of the compute dtype: all ranks' slices, present while some unit computes.
             Full parameters are aliases of it. It is freed because nobody refers to it any more.
    grad     this rank's gradient of the full parameters, from the first `Use` that reports until the reduction starts
             (or the next synchronised backward, under no_sync): either `parts`, the tensors that autograd made, or,
             where they must be added up, cast or moved, a 1-D buffer of `layout.numel` elements of the reduce dtype.
"""

from __future__ import annotations

import functools
import weakref
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import Cuts, Mesh, Work
from ..errors import StateError
from ..layout import FlatLayout, plan_layout
from ..local_shard import LocalShard, ShardInfo

if TYPE_CHECKING:
    from .step import Step
    from .unit import Unit

_LOW = (torch.float16, torch.bfloat16)

# Which flat parameter a local parameter belongs to, and where in it. Weak on both sides: a flat parameter holds its
# parameters, so that a strong value would keep every model alive for ever.
_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()


_optimizer_steps = 0  # of those that hold sharded parameters, since a first buffer was made that outlives them


def _count_step(optimizer: torch.optim.Optimizer, *_) -> None:
    global _optimizer_steps
    _optimizer_steps += any(p in _homes for group in optimizer.param_groups for p in group["params"])


@functools.cache
def _count_optimizer_steps() -> None:
    # Before a step: what is gathered at its end, as fairscale's OSS does, is of today.
    register_optimizer_step_pre_hook(_count_step)


def home_of(param: torch.Tensor) -> tuple[FlatParam, int] | None:
    """(flat parameter, index in it) of a local parameter; None for a parameter that is not sharded."""
    home = _homes.get(param)
    flat = home[0]() if home is not None else None
    return None if flat is None or home is None else (flat, home[1])


class FlatParam:
    """See the module docstring. Made from whole parameters, which it turns into local ones in place."""

    def __init__(
        self,
        names: list[str],
        params: list[nn.Parameter],
        mesh: Mesh,
        *,
        master_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
        shard_device: torch.device,
        pin_memory: bool,
        persistent: bool,
        needed_in_backward: bool,
    ):
        self.names, self.params, self.mesh = names, params, mesh
        self.divisor: float = mesh.size  # of the sum of gradients
        self.layout: FlatLayout = plan_layout([tuple(p.shape) for p in params], mesh.shard.size)
        self.compute_dtype, self.device = compute_dtype, device
        if not compute_dtype.is_floating_point:
            self.reduce_dtype = compute_dtype  # complex; integers have no gradient
        elif reduce_dtype is not None:
            self.reduce_dtype = reduce_dtype
        else:  # 16-bit gradients are added in float32 where the master is
            self.reduce_dtype = torch.float32 if _narrowed(master_dtype, compute_dtype) else compute_dtype
        self.persistent = persistent  # zero1, zero2: the buffer outlives the step
        if persistent:
            _count_optimizer_steps()
        self.needed_in_backward = needed_in_backward  # False: rows are only looked up
        # Where full parameters lie in a buffer, in bytes: how to notice one that was given other memory.
        self.byte_offsets = [offset * compute_dtype.itemsize for offset in self.layout.offsets]
        self._cuts = Cuts(self.layout) if mesh.shard.direct and device.type == "cpu" else None
        self.infos = [ShardInfo(name, self.layout, i, mesh.shard) for i, name in enumerate(names)]
        self.index = -1  # position among the root's flat parameters; the same on every rank
        self.unit: Unit
        self.users: list[Unit] = []  # the owner first, then the units that borrow from it
        self.step: Step
        self.start_over()

        self._geometry()
        self._adopt(master_dtype, shard_device, pin_memory)

    def start_over(self) -> None:
        """Nothing is gathered, under way or accumulated."""
        self.buffer: torch.Tensor | None = None
        self.gathered = False  # the buffer holds, or is about to hold, all ranks' slices
        self.nearby: torch.Tensor | None = None  # this rank's share of the buffer among its neighbours
        self.holders = 0  # units that compute with the buffer right now
        self._work: Work | None = None
        self._deposited = False  # a gradient has arrived since the buffer was gathered
        self._seen: tuple[int, ...] = ()  # the local parameters' versions when the buffer was gathered
        self._seen_steps = 0  # the optimizers' steps until then

        self._parts: dict[int, torch.Tensor] = {}
        self._grad: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None  # reduced gradient of this backward, laid out as the shard
        self.touched: set[int] = set()  # parameters that got a gradient since the last deposit

    def __repr__(self) -> str:
        return f"FlatParam({self.names[0]}{'...' if len(self.names) > 1 else ''}, {self.layout.used} elements)"

    # ------------------------------------------------------------------------------------------ the local shard

    def _geometry(self) -> None:
        layout, rank = self.layout, self.mesh.shard.rank
        self.full_geometry = [
            (shape, _contiguous_strides(shape), offset)
            for shape, offset in zip(layout.shapes, layout.offsets, strict=True)
        ]
        self._local_views = []
        for i in range(len(layout.shapes)):
            start, stop = layout.piece(i, rank)
            self._local_views.append((layout.local_offset(i, rank), stop - start, layout.local_shape(i, rank)))
        self._local_geometry = [(shape, _contiguous_strides(shape), lo) for lo, _, shape in self._local_views]
        self._in_order = sorted(range(len(layout.shapes)), key=lambda i: layout.offsets[i])

    @property
    def slot(self) -> slice:
        """Where this rank's slice lies in a full buffer."""
        n = self.layout.shard_numel
        return slice(self.mesh.shard.rank * n, (self.mesh.shard.rank + 1) * n)

    @property
    def _near_slot(self) -> slice:
        """The part of a full buffer that this rank keeps for its neighbours."""
        assert self.mesh.near is not None
        n = self.layout.numel // self.mesh.near.size
        return slice(self.mesh.near.rank * n, (self.mesh.near.rank + 1) * n)

    @property
    def is_whole(self) -> bool:
        """True where the shard is the whole buffer, so that nothing is gathered or copied."""
        return self.mesh.shard.size == 1 and self.shard.dtype == self.compute_dtype and self.shard.device == self.device

    def _adopt(self, dtype: torch.dtype, shard_device: torch.device, pin_memory: bool) -> None:
        """Keeps this rank's slice of the whole parameters, and makes them local."""
        shard = self.new_shard(dtype, shard_device, pin_memory)
        for p, (lo, n, _), i in zip(self.params, self._local_views, range(len(self.params)), strict=True):
            if n:
                start, stop = self.layout.piece(i, self.mesh.shard.rank)
                shard[lo : lo + n].copy_(p.detach().reshape(-1)[start:stop])
        self.bind(shard)

    def new_shard(self, dtype, device, pin_memory=False) -> torch.Tensor:
        if self.persistent and self.mesh.shard.size > 1 and dtype == self.compute_dtype and device == self.device:
            # Full parameters stay anyway, so the shard is a part of them instead of a second copy.
            self.buffer = torch.zeros(self.layout.numel, dtype=dtype, device=device)
            return self.buffer[self.slot]
        pin = pin_memory and device.type == "cpu" and self.device.type != "cpu"
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=device, pin_memory=pin)

    def bind(self, shard: torch.Tensor) -> None:
        """Makes `shard` (1-D, `layout.shard_numel`) the memory of the local parameters."""
        self.shard = shard
        self._pointers = []
        for i, (p, (lo, n, shape)) in enumerate(zip(self.params, self._local_views, strict=True)):
            p.data = shard[lo : lo + n].view(shape)
            self._pointers.append(p.data_ptr())
            _homes[p] = (weakref.ref(self), i)

    def absorb(self) -> None:
        """Takes over what the user put in place of a local parameter's memory: `p.data = x`, or `module.to(dtype)`."""
        if [p.data_ptr() for p in self.params] != self._pointers or self.params[0].dtype != self.shard.dtype:
            self._absorb()

    def _absorb(self) -> None:
        first = self.params[0]
        moved = first.dtype != self.shard.dtype or first.device.type != self.shard.device.type
        if moved and self.compute_dtype == self.shard.dtype:
            self.compute_dtype = self.reduce_dtype = first.dtype
        # New memory, because the user may have kept what the parameters had before: `kept = p.data; p.data = other`.
        shard = self.new_shard(first.dtype, first.device, self.shard.is_pinned())
        for i, (p, (lo, n, shape)) in enumerate(zip(self.params, self._local_views, strict=True)):
            if p.dtype != first.dtype:
                raise StateError(
                    f"{self.names[i]} became {p.dtype} while {self.names[0]}, of the same flat parameter, is "
                    f"{first.dtype}. Convert the whole model, or wrap after converting."
                )
            if tuple(p.shape) == shape:
                piece = p.detach().reshape(-1)
            elif tuple(p.shape) == self.layout.shapes[i]:
                start, stop = self.layout.piece(i, self.mesh.shard.rank)
                piece = p.detach().reshape(-1)[start:stop]
            else:
                raise StateError(
                    f"{self.names[i]}.data has shape {tuple(p.shape)}, which is neither this rank's piece {shape} nor "
                    f"the whole parameter {self.layout.shapes[i]}. Assign one of these."
                )
            if n and piece.data_ptr() != shard[lo : lo + n].data_ptr():
                shard[lo : lo + n].copy_(piece)
        self.forget()
        self.bind(shard)

    # ------------------------------------------------------------------------------------- the full parameters

    def gather(self) -> None:
        """Starts the all-gather. Every rank of the shard group must do so, in the same order."""
        self.absorb()
        self.forget_work()
        if self.is_whole:
            self.buffer = self.shard
        else:
            self._seen, self._seen_steps = tuple([p._version for p in self.params]), _optimizer_steps
            self._deposited = False
            buffer = self.buffer if self.persistent else None
            if buffer is None:
                buffer = torch.empty(self.layout.numel, dtype=self.compute_dtype, device=self.device)
            if self.nearby is not None:
                assert self.mesh.near is not None
                buffer[self._near_slot].copy_(self.nearby)
                self._work = self.mesh.near.all_gather(buffer)
            else:
                slot = buffer[self.slot]
                if slot.data_ptr() != self.shard.data_ptr() or slot.dtype != self.shard.dtype:
                    slot.copy_(self.shard, non_blocking=True)  # the one cast, and the copy to the device
                self._work = self.mesh.shard.all_gather(buffer)
            self.buffer = buffer
        self.gathered = True
        self.step.storages[self.buffer.untyped_storage()._cdata] = self

    def contribute(self) -> None:
        """Takes part in a gather that only other ranks need."""
        buffer = torch.empty(self.layout.numel, dtype=self.compute_dtype, device=self.device)
        buffer[self.slot].copy_(self.shard)
        self.mesh.shard.all_gather(buffer).wait()

    def gather_like_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """All ranks' slices of a tensor laid out as the local shard (1-D, any dtype), in one new 1-D tensor on the
        compute device. Collective over the shard group."""
        whole = torch.empty(self.layout.numel, dtype=shard.dtype, device=self.device)
        whole[self.slot].copy_(shard)
        self.mesh.shard.all_gather(whole).wait()
        return whole

    def wait(self) -> torch.Tensor:
        """The gathered buffer, once it is complete."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self.buffer is not None
        return self.buffer

    @property
    def ready(self) -> bool:
        """True where nothing needs to be gathered: the buffer is there, and was made from today's values."""
        if not self.gathered or self.is_whole:
            return self.gathered
        return self._seen == tuple([p._version for p in self.params])

    def may_be_stale(self, mode_changed: bool) -> bool:
        """Whether, between two forwards, somebody may have changed the parameters since the buffer was gathered.

        Version counters are not enough: fused optimizers and writes through `.data` move none. What is kept only for
        a backward is good as long as that backward may come. What is kept between steps (zero1, zero2) is good while
        no gradient is there to step with, the mode, around whose changes loops exchange weights (EMA), is the same, and
        no optimizer has stepped, not even another sharded model's, which moving averages and reference models follow.
        """
        if not self.ready:
            return True
        if not self.persistent:
            return self.settled
        stepped = self._seen_steps != _optimizer_steps
        return mode_changed or stepped or self._deposited or any(p.grad is not None for p in self.params)

    def forget_work(self) -> None:
        if self._work is not None:
            self._work.wait()  # a buffer must outlive the collective that fills it
            self._work = None

    def release(self, backward_follows: bool = False) -> None:
        """Drops the full parameters if no unit computes with them and the strategy does not keep them. Neighbours keep
        them together where a backward follows and the mesh says so."""
        if self.holders or self.persistent:
            return
        if backward_follows and self.mesh.near is not None and self.needed_in_backward and self.buffer is not None:
            self.nearby = self.wait()[self._near_slot].clone()
        elif not backward_follows:
            self.nearby = None
        self.forget()

    def forget(self) -> None:
        """Drops the full parameters; kept memory (zero1, zero2) becomes stale instead."""
        self.forget_work()
        if self.buffer is not None:
            self.step.storages.pop(self.buffer.untyped_storage()._cdata, None)
            if not self.persistent or self.is_whole:
                self.buffer = None
        self.gathered, self._seen = False, ()

    def views(self, indices) -> list[torch.Tensor]:
        """Full parameters, as plain aliases of the buffer with version counters of their own.

        Not views in autograd's sense: those, returned by a Function with several outputs, refuse in-place changes,
        which spectral norm, `max_norm` embeddings and pruning make.
        """
        buffer, geometry = self.buffer, self.full_geometry
        assert buffer is not None
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return [buffer.as_strided(*geometry[i]) for i in indices]

    def _own_part(self, index: int, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(this rank's part of a full parameter, its piece of the shard); None where they are the same memory."""
        lo, n, _ = self._local_views[index]
        start, stop = self.layout.piece(index, self.mesh.shard.rank)
        new, own = full.detach().reshape(-1)[start:stop], self.shard[lo : lo + n]
        return None if n == 0 or new.data_ptr() == own.data_ptr() != 0 else (new, own)

    def differs(self, index: int, full: torch.Tensor) -> bool:
        """Whether this rank's part of a full parameter has other values than the shard. Waits for the device."""
        parts = self._own_part(index, full)
        if parts is None or parts[1].untyped_storage().data_ptr() == 0:  # no memory, no values
            return False
        return not torch.equal(parts[0].to(parts[1].device), parts[1].to(parts[0].dtype))

    def write_back(self, index: int, full: torch.Tensor) -> None:
        """Keeps this rank's part of a full parameter that the forward changed."""
        parts = self._own_part(index, full)
        if parts is None:
            return
        new, own = parts
        if new.dtype != own.dtype:
            # Only what changed: the rest would lose the master's digits in the round trip.
            new = torch.where(new.to(own.device) != own.to(new.dtype), new.to(own), own)
        own.copy_(new)

    # ------------------------------------------------------------------------------------------------ gradients

    @property
    def settled(self) -> bool:
        """True when no use of these parameters still owes a gradient."""
        return not any(unit.live for unit in self.users)

    @property
    def has_grad(self) -> bool:
        return self._grad is not None or bool(self._parts)

    def add_grads(self, indices: list[int], grads: list[torch.Tensor]) -> None:
        """Adds full gradients (shapes as the full parameters, any dtype or layout)."""
        self.touched.update(indices)
        grads = [g.to_dense() if g.layout != torch.strided else g for g in grads]
        if self.has_grad:
            self._put_together()
            views = self._grad_views(indices)
            torch._foreach_add_(views, [g.to(self.reduce_dtype) for g in grads])
        elif self._sendable(grads):
            self._parts = {i: g.view(-1) for i, g in zip(indices, grads, strict=True)}
        elif len(grads) == len(self.params) and all(g.dtype == self.reduce_dtype for g in grads):
            by_index = dict(zip(indices, grads, strict=True))
            padding = grads[0].new_zeros(self.layout.padding)
            self._grad = torch._C._nn.flatten_dense_tensors([*(by_index[i] for i in self._in_order), padding])
        else:
            self._grad = self._new_grad(indices)
            torch._foreach_copy_(self._grad_views(indices), grads)

    @property
    def _in_parts(self) -> bool:
        """True where reductions move pieces of the single gradients, on every rank, instead of one buffer."""
        return self._cuts is not None and self._cuts.worthwhile and not self.reduce_dtype.is_complex

    def _sendable(self, grads: list[torch.Tensor]) -> bool:
        """True where the gradients can be reduced from the memory they are in."""
        return self._in_parts and all(g.dtype == self.reduce_dtype and g.is_contiguous() for g in grads)

    def _put_together(self) -> None:
        """Copies `parts`, which only autograd may change, into a buffer of our own."""
        if self._grad is None:
            parts, self._parts = self._parts, {}
            self._grad = self._new_grad(list(parts))
            geometry = self.full_geometry
            torch._foreach_copy_(self._grad_views(list(parts)), [g.view(geometry[i][0]) for i, g in parts.items()])

    def _new_grad(self, indices) -> torch.Tensor:
        if sum(self.numel_of(i) for i in indices) < self.layout.used:
            return torch.zeros(self.layout.numel, dtype=self.reduce_dtype, device=self.device)
        grad = torch.empty(self.layout.numel, dtype=self.reduce_dtype, device=self.device)
        grad[self.layout.used :].zero_()  # only the padding is not written by the caller
        return grad

    def numel_of(self, index: int) -> int:
        return prod(self.layout.shapes[index])

    def _grad_views(self, indices) -> list[torch.Tensor]:
        assert self._grad is not None
        views = self._views_of(self._grad)
        return [views[i] for i in indices]

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return [flat.as_strided(*geometry) for geometry in self.full_geometry]

    def reduce(self) -> Work:
        """Starts to sum the gradient over the shard group, and forgets it here. Zeros where this rank has none."""
        grad, parts, self._grad, self._parts = self._grad, self._parts, None, {}
        group, divisor = self.mesh.shard, self.divisor
        if parts:
            assert self._cuts is not None
            return group.reduce_scatter_parts(parts, self._cuts, divisor)
        if self._in_parts:
            assert self._cuts is not None
            # The others may send from their gradients' own memory: the messages must match theirs.
            flat = {} if grad is None else {i: g.view(-1) for i, g in enumerate(self._views_of(grad))}
            nothing = torch.zeros(1, dtype=self.reduce_dtype, device=self.device)
            return group.reduce_scatter_parts(flat or {-1: nothing}, self._cuts, divisor)
        if grad is None:
            grad = torch.zeros(self.layout.numel, dtype=self.reduce_dtype, device=self.device)
        return group.reduce_scatter(grad, divisor)

    def reduce_nothing(self) -> Work:
        """Takes part in a reduction that only other ranks need; what this rank has stays here."""
        held = self._grad, self._parts
        self._grad, self._parts = None, {}
        work = self.reduce()
        self._grad, self._parts = held
        return work

    def reduce_apart(self, indices: list[int], grads: list[torch.Tensor]) -> Work:
        """Starts to reduce these gradients alone; what was accumulated stays here."""
        held, touched = (self._grad, self._parts), set(self.touched)
        self._grad, self._parts = None, {}
        self.add_grads(indices, grads)
        work = self.reduce()
        (self._grad, self._parts), self.touched = held, touched
        return work

    def drop_grad(self) -> None:
        self._grad, self._parts, self.reduced = None, {}, None
        self.touched.clear()

    def local_piece(self, shard: torch.Tensor, index: int) -> LocalShard:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return LocalShard.of(shard.as_strided(*self._local_geometry[index]), self.infos[index])

    def deposit(self, reduced: torch.Tensor, used: set[int]) -> None:
        """Puts a reduced gradient (1-D, as the local shard) at `param.grad`, adding to what is there; then runs the
        hooks that users put on the parameters, with the reduced local gradient, as autograd would."""
        self._deposited = True
        indices, geometry = sorted(used), self._local_geometry
        with torch._C._AutoDispatchBelowADInplaceOrView():
            pieces = [reduced.as_strided(*geometry[i]) for i in indices]
        for i, piece in zip(indices, pieces, strict=True):
            p = self.params[i]
            grad: torch.Tensor = LocalShard.of(piece, self.infos[i])
            if p._backward_hooks:
                for hook in p._backward_hooks.values():
                    changed = hook(grad)
                    grad = grad if changed is None else LocalShard.wrap(changed, self.infos[i])
            if p.grad is None:
                p.grad = grad
            else:
                p.grad.add_(grad)
            if p._post_accumulate_grad_hooks:
                for hook in p._post_accumulate_grad_hooks.values():
                    hook(p)


def _narrowed(master: torch.dtype, compute: torch.dtype) -> bool:
    return compute in _LOW and master not in _LOW


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
