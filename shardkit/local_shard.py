"""`LocalShard`: a tensor that knows which part of which parameter it is.

Gradients (`param.grad`) and the values of a sharded state dict are LocalShards. They are plain local memory: fused and
foreach optimizers and elementwise code see an ordinary tensor and pay nothing. What makes plain PyTorch loops right is
that questions about the *whole* gradient are completed across ranks:

- `torch.linalg.vector_norm`, `torch.norm`, `Tensor.norm` and `torch._foreach_norm` (what `clip_grad_norm_` calls)
- `torch._amp_foreach_non_finite_check_and_unscale_` (what `torch.amp.GradScaler` calls)

These run one all-reduce over the shard group, so every rank must ask, as every rank does in a training loop.

To `torch.distributed.checkpoint` a LocalShard is the whole tensor, of which this rank writes and reads some boxes.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import torch
import torch.distributed as dist

from .comm import Group
from .errors import StateError
from .layout import FlatLayout, rectangles


@dataclasses.dataclass(frozen=True, eq=False)
class ShardInfo:
    """Where a local piece belongs: parameter `index` of `layout`, split over `group`, called `name` in the model."""

    name: str
    layout: FlatLayout
    index: int
    group: Group

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):  # process groups cannot be pickled; the piece that was pickled still knows what it is
        return _Loaded, (self.name, self.layout, self.index, self.group.rank)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.layout.shapes[self.index]

    @property
    def piece(self) -> tuple[int, int]:
        """(start, stop) of this rank's run in the flattened parameter."""
        return self.layout.piece(self.index, self.group.rank)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.index, self.group.rank)


@dataclasses.dataclass(frozen=True, eq=False)
class _Loaded(ShardInfo):
    """A ShardInfo read from a file: it knows its place, but there is no group to ask."""

    group: int  # type: ignore[assignment]

    @property
    def rank(self) -> int:
        return self.group

    @property
    def piece(self):
        return self.layout.piece(self.index, self.group)

    @property
    def local_shape(self):
        return self.layout.local_shape(self.index, self.group)


def _become(cls: type, t: torch.Tensor) -> Any:
    """The new tensor `t` as a `cls`, a subclass of torch.Tensor; where `t` has a class of its own, as both."""
    if type(t) is torch.Tensor:
        return torch.Tensor._make_subclass(cls, t)
    t.__class__ = _both(cls, type(t))
    return t


@functools.cache
def _both(cls: type, own: type) -> type:
    return type(cls.__name__, (cls, own), {})


class LocalShard(torch.Tensor):
    """This rank's piece of a tensor that is split over a group. See the module docstring.

    `shard_info` says which piece; `to_local()` unwraps; `full_tensor()` gathers (collective over the shard group).
    In-place and elementwise operations keep the type; results of others are plain tensors, because a function of a
    piece is, in general, no piece of the function.
    """

    shard_info: ShardInfo

    @staticmethod
    def wrap(local: torch.Tensor, info: ShardInfo) -> LocalShard:
        """`local` (shape `info.local_shape`) as a LocalShard that shares its memory."""
        with torch._C.DisableTorchFunctionSubclass():
            out = _become(LocalShard, local.detach())
        out.shard_info = info
        return out

    @staticmethod
    def of(fresh: torch.Tensor, info: ShardInfo) -> LocalShard:
        """As `wrap`, for a tensor that nobody else holds and that is no view in autograd's sense."""
        out = _become(LocalShard, fresh)
        out.shard_info = info
        return out

    def to_local(self) -> torch.Tensor:
        """The same memory as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, of shape `shard_info.shape`, on every rank of the shard group. Collective."""
        info, local = self.shard_info, self.to_local()
        full = local.new_empty(info.shape)
        flat, works = full.view(-1), []
        for rank in range(info.group.size):
            start, stop = info.layout.piece(info.index, rank)
            if stop > start:
                run = flat[start:stop]
                if rank == info.rank:
                    run.copy_(local.reshape(-1))
                works.append(info.group.broadcast(run, rank))
        for work in works:
            work.wait()
        return full

    # -------------------------------------------------------------- the protocol of torch.distributed.checkpoint

    def size(self, dim=None):
        """The local size, as `shape`. `torch.distributed.checkpoint` gets that of the whole tensor: its planner
        compares with `size()` what it finds in a file, and DTensor, for which it was written, answers so to everybody.

        Raises StateError for `BlockingAsyncStager`, which copies a piece into a plain tensor, so that `dcp.async_save`
        would save one rank's piece as if it were the whole.
        """
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if module == "torch.distributed._state_dict_utils" and caller.f_code.co_name == "tensor_func":
            raise StateError(
                f"{self.shard_info.name}: this function of torch copies tensors without asking what they are, and "
                "would take this rank's piece for the whole. Use shardkit.async_save(path, model, optim) in place of "
                "torch.distributed.checkpoint.async_save."
            )
        whole = module == "torch.distributed.checkpoint.default_planner"
        size = torch.Size(self.shard_info.shape) if whole else self.shape
        return size if dim is None else size[dim]

    def new_empty(self, *args, **kwargs):
        """As for any tensor; but the copy that `dcp.async_save` makes on the host is still a piece of a whole."""
        with torch._C.DisableTorchFunctionSubclass():
            out = super().new_empty(*args, **kwargs)
        staging = sys._getframe(1).f_globals.get("__name__", "") == "torch.distributed.checkpoint._state_dict_stager"
        return LocalShard.wrap(out, self.shard_info) if staging else out

    def __create_write_items__(self, fqn: str, object: Any) -> list:
        """One item per box of this rank's piece. Ranks that hold the same piece (hybrid sharding) name the same boxes,
        and the planner lets one of them write."""
        from torch.distributed.checkpoint import metadata, planner

        info, items = self.shard_info, []
        properties = metadata.TensorProperties.create_from_tensor(self.to_local())
        for chunk in self.__create_chunk_list__():
            items.append(planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, torch.Size(info.shape)),
            ))  # fmt: skip
        return items

    def __create_chunk_list__(self) -> list:
        """The boxes of the whole tensor that this rank holds. An empty tensor is one box, held by the first rank."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        info = self.shard_info
        boxes = rectangles(info.shape, *info.piece)
        if 0 in info.shape and info.rank == 0:
            boxes = [(tuple(0 for _ in info.shape), info.shape)]
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """The box that starts at `index.offset`, a view of the local memory. Boxes follow one another in it."""
        at, local = 0, self.to_local().reshape(-1)
        for chunk in self.__create_chunk_list__():
            n = chunk.sizes.numel()
            if index.offset is None or tuple(chunk.offsets) == tuple(index.offset):
                return local[at : at + n].view(chunk.sizes)
            at += n
        info = self.shard_info
        raise ValueError(f"{info.name} has no box at {index.offset} on this rank; its run is {info.piece}.")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if type(out) is torch.Tensor and (name in _POINTWISE or name in _FLATTENING):
            source = next((a for a in args if isinstance(a, LocalShard)), None)
            if source is not None and (out.shape == source.shape or name in _FLATTENING and out.dim() == 1):
                return LocalShard.wrap(out, source.shard_info)
        return out

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = LocalShard.wrap(self.to_local().clone(), self.shard_info)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return LocalShard.wrap, (self.to_local().clone(), self.shard_info)

    def __repr__(self, *, tensor_contents=None):
        info = self.shard_info
        start, stop = info.piece
        return f"LocalShard({info.name}[{start}:{stop}] of {info.shape}, {self.to_local()!r})"


# ---------------------------------------------------------------------------------------------- global norms


def _powers(t: torch.Tensor, p: float) -> torch.Tensor:
    """What ranks add up (or take the extreme of) for a p-norm of which `t` is one part: a 0-dim float tensor."""
    if t.numel() == 0:
        neutral = float("-inf") if p == float("inf") else float("inf") if p == -float("inf") else 0.0
        return torch.full((), neutral, dtype=torch.float32, device=t.device)
    low = t.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(t, p, dtype=torch.float32 if low else None)
    return norm if p in (0.0, float("inf"), -float("inf")) else norm**p


def _whole_norms(tensors: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """p-norms of whole tensors from their local parts: one all-reduce per shard group. Plain tensors are whole."""
    out: list[torch.Tensor | None] = [None] * len(tensors)
    by_group: dict[Group, list[int]] = {}
    for i, t in enumerate(tensors):
        if isinstance(t, LocalShard):
            by_group.setdefault(t.shard_info.group, []).append(i)
        else:
            out[i] = torch.linalg.vector_norm(t, p)
    for group, where in by_group.items():
        _check_present(group)
        powers = [_powers(tensors[i].to_local(), p) for i in where]  # type: ignore[attr-defined]
        wide = torch.float64 if any(t.dtype in (torch.float64, torch.complex128) for t in tensors) else torch.float32
        parts = torch.stack([t.to(wide) for t in powers])
        op = {float("inf"): dist.ReduceOp.MAX, -float("inf"): dist.ReduceOp.MIN}.get(p, dist.ReduceOp.SUM)
        group.all_reduce(parts, op).wait()
        if p == float("inf"):
            parts.clamp_(min=0.0)  # a gradient without elements anywhere
        elif p not in (0.0, -float("inf")):
            parts = parts ** (1.0 / p)
        for i, norm in zip(where, parts.unbind(), strict=True):
            dtype = tensors[i].dtype
            out[i] = norm.to(dtype.to_real() if dtype.is_complex else dtype)
    return out  # type: ignore[return-value]


def _check_present(group: Group) -> None:
    if group.absent:
        raise StateError(
            "inside join(), a rank has run out of batches, and cannot add its pieces to a norm or a finite check. "
            "Clip, and scale, before ranks differ; or give all ranks equally many batches."
        )


class _PendingNorm(torch.Tensor):
    """The norm of one LocalShard, not yet completed across ranks.

    `clip_grad_norm_` asks for the norm of every gradient and then stacks them. Completing at the stack costs one
    all-reduce for the whole model; completing each norm would cost one per parameter.
    """

    source: LocalShard
    order: float

    @staticmethod
    def of(source: LocalShard, order: float) -> _PendingNorm:
        dtype = source.dtype.to_real() if source.dtype.is_complex else source.dtype
        out = _become(_PendingNorm, torch.zeros((), dtype=dtype, device=source.device))
        out.source, out.order = source, order
        return out

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to and len(args) == 2 and args[1] == args[0].device:
            return args[0]
        if func is torch.stack and len({n.order for n in args[0] if isinstance(n, _PendingNorm)}) == 1:
            order = next(n.order for n in args[0] if isinstance(n, _PendingNorm))
            pending = [n for n in args[0] if isinstance(n, _PendingNorm)]
            done = iter(_whole_norms([n.source for n in pending], order))
            whole = [next(done) if isinstance(n, _PendingNorm) else n for n in args[0]]
            return torch.stack([n.to(whole[0].dtype) for n in whole], *args[1:], **kwargs)
        if func is torch.Tensor.device.__get__ or func is torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args = torch.utils._pytree.tree_map(_complete, args)
        kwargs = torch.utils._pytree.tree_map(_complete, kwargs)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents=None):
        return repr(_complete(self))


def _complete(value: Any) -> Any:
    return _whole_norms([value.source], value.order)[0] if isinstance(value, _PendingNorm) else value


def _vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None, out=None):
    if dim is not None or keepdim or out is not None or not isinstance(x, LocalShard):
        return NotImplemented  # a norm along a dimension, say, is a question about the local piece
    if dtype is not None:
        x = LocalShard.wrap(x.to_local().to(dtype), x.shard_info)
    return _PendingNorm.of(x, float(ord))


def _linalg_norm(A, ord=None, dim=None, keepdim=False, *, out=None, dtype=None):
    if dim is not None or keepdim or out is not None or not isinstance(A, LocalShard):
        return NotImplemented
    if ord is not None and A.dim() != 1:
        raise StateError(
            f"torch.linalg.norm(ord={ord!r}) of {A.shard_info.name} is a norm of a whole matrix, of which this rank "
            "has a piece. Call it on .full_tensor()."
        )
    return _complete(_vector_norm(A, 2 if ord is None else ord, dtype=dtype))


def _norm(input, p="fro", dim=None, keepdim=False, out=None, dtype=None):
    if dim is not None or keepdim or out is not None or not isinstance(input, LocalShard) or p == "nuc":
        return NotImplemented
    return _complete(_vector_norm(input, 2.0 if p in ("fro", None) else float(p), dtype=dtype))


def _foreach_norm(tensors, ord=2, dtype=None):
    if dtype is not None:
        return [_complete(_vector_norm(t, ord, dtype=dtype)) for t in tensors]
    return _whole_norms(list(tensors), float(ord))


def _unscale(grads, found_inf, inv_scale):
    local = [g.to_local() if isinstance(g, LocalShard) else g for g in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, inv_scale)
    for group in dict.fromkeys(g.shard_info.group for g in grads if isinstance(g, LocalShard)):
        _check_present(group)
        # An infinity in one rank's piece must make every rank skip the step.
        group.all_reduce(found_inf, dist.ReduceOp.MAX).wait()


def _clone(input, *, memory_format=torch.preserve_format):
    return LocalShard.wrap(input.to_local().clone(memory_format=memory_format), input.shard_info)


def _detach(input):
    return LocalShard.wrap(input.to_local(), input.shard_info)


def _moved(func):
    """`to`, `cpu` and `cuda` change where a piece lies or its dtype, not which piece it is: what torch makes of a state
    dict on the host must still know that it is a part."""

    def run(input, *args, **kwargs):
        if not isinstance(input, LocalShard):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            out = func(input, *args, **kwargs)
        return input if out is input else LocalShard.wrap(out, input.shard_info)

    return run


# Functions whose result for a piece is that piece of the result.
_POINTWISE = frozenset(
    "mul add sub div true_divide neg abs clamp clip nan_to_num float double half bfloat16 lerp addcmul addcdiv pow "
    "sqrt square sign rsub __mul__ __rmul__ __add__ __radd__ __sub__ __rsub__ __truediv__ __neg__ __abs__ "
    "__pow__".split()
)

_FLATTENING = frozenset("view reshape flatten ravel".split())


def _cat(tensors, *args, **kwargs):
    raise StateError(
        "torch.cat of sharded gradients: this rank holds pieces of them, and a vector of pieces has neither the norm "
        "nor the products of the whole one. Optimizers that need it (LBFGS) cannot train a sharded model. For norms, "
        "use torch.nn.utils.clip_grad_norm_ or get_total_norm; otherwise take .full_tensor(), or .to_local() to mean "
        "this rank."
    )


_SPECIAL = {
    torch.cat: _cat,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.clone: _clone,
    torch.Tensor.clone: _clone,
    torch.Tensor.detach: _detach,
    torch.Tensor.data.__get__: _detach,  # type: ignore[attr-defined]
    **{func: _moved(func) for func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)},
}
