"""The autograd glue: what turns gathered memory into differentiable parameters, and saved weights into recipes.

`Use` is the node between a unit's local parameters and the full parameters that its modules compute with. Its forward
hands out aliases of the gathered buffer; its backward receives each full gradient once, after autograd has summed all
uses of the parameter, and hands them to the engine. It has edges to the local parameters, so that
`torch.autograd.grad(loss, model.parameters())` finds them; in an ordinary backward nothing travels along these edges.

`SavedWeights` is the pair of saved-tensor hooks under which a model runs: a tensor that shares memory with a gathered
buffer is saved as a recipe (which flat parameter, which view), everything else goes to the hooks that were active
before, because PyTorch applies only the innermost pair.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import Function

from .untraced import untraced

if TYPE_CHECKING:
    from .flat_param import FlatParam
    from .step import Step
    from .unit import Unit

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_hooks_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


class Record:
    """One use of a unit's parameters in a graph. Dies with the graph, and then no longer owes a gradient."""

    __slots__ = ("unit", "positions", "ref", "__weakref__")

    def __init__(self, unit: Unit, positions: list[int]):
        self.unit = unit
        self.positions = positions  # which of the unit's entries the outputs of `Use` are
        self.ref: weakref.ref | None = None

    def owes(self) -> None:
        """From now on the unit waits for this use's gradient."""
        self.ref = weakref.ref(self, self.unit.live.discard)
        self.unit.live.add(self.ref)

    def reported(self) -> None:
        if self.ref is not None:
            self.unit.live.discard(self.ref)


class Use(Function):
    """(record, anchor, *local parameters) -> full parameters. See the module docstring.

    The anchor is an empty tensor that requires grad: it makes the node part of the graph when hooks on a parameter
    forbid an edge to it (autograd would call them with None), and tells a whole backward from a partial one.
    """

    @staticmethod
    def forward(ctx: Any, record: Record, fulls: list[torch.Tensor], anchor: torch.Tensor, *locals_):
        ctx.record = record
        ctx.has_edge = [p is not None for p in locals_]
        ctx.set_materialize_grads(False)
        return tuple(fulls)

    @staticmethod
    def backward(ctx: Any, *grads):
        record = ctx.record
        edges = iter(ctx.next_functions[1:])  # the first is the anchor's
        nodes = [next(edges)[0] if has_edge else None for has_edge in ctx.has_edge]
        locals_ = record.unit.report(record, grads, nodes)
        return (None, None, None, *locals_)


class Reduce(Function):
    """Full gradients of one rank -> local pieces of the averaged gradient, differentiably (`create_graph=True`).

    What is differentiated is the mean of the ranks' losses: a local gradient is 1/N of the sum of all ranks' full ones,
    so the cotangent of this rank's full gradient is 1/N of all ranks' local cotangents, gathered.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, flat: FlatParam, indices: list[int], *grads):
        ctx.flat, ctx.indices = flat, indices
        return tuple(piece.to_local() for piece in step.capture(flat, indices, list(grads)))

    @staticmethod
    def backward(ctx: Any, *cotangents):
        flat, indices = ctx.flat, ctx.indices
        local = torch.zeros(flat.layout.shard_numel, dtype=flat.shard.dtype, device=flat.device)
        for i, cotangent in zip(indices, cotangents, strict=True):
            if cotangent is not None:
                flat.local_piece(local, i).copy_(cotangent)
        whole = flat.gather_like_shard(local).div_(flat.divisor)
        return (None, None, None, *(whole.as_strided(*flat.full_geometry[i]) for i in indices))


class Recipe:
    """A saved weight: where to find it when backward asks for it."""

    __slots__ = ("flat", "geometry")

    def __init__(self, flat: FlatParam, geometry: tuple):
        self.flat, self.geometry = flat, geometry


class SavedWeights:
    """A pair of saved-tensor hooks for one root, chained to the pair that was active before (or to none)."""

    def __init__(self, step: Step, outer: tuple | None):
        self.step, self.outer = step, outer
        self.pack_hook, self.unpack_hook = self.pack, self.unpack  # bound once, so that they can be recognised

    def pack(self, t: torch.Tensor):
        try:
            flat = self.step.storages.get(t.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            flat = None  # a functorch wrapper or a sparse tensor: no storage to compare
        if flat is not None:
            return Recipe(flat, (t.size(), t.stride(), t.storage_offset()))
        return t if self.outer is None else self.outer[0](t)

    def unpack(self, packed):
        if type(packed) is Recipe:
            buffer = self.step.weights_for_backward(packed.flat)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return buffer.as_strided(*packed.geometry)
        return packed if self.outer is None else self.outer[1](packed)


@untraced
def push_saved_weights(step: Step) -> bool:
    """Makes the root's hooks the innermost, unless they are already. True if they must be popped again."""
    top = _top_hooks(True)
    owner = None if top is None else getattr(top[0], "__self__", None)
    if isinstance(owner, SavedWeights) and owner.step is step:
        return False
    if not _hooks_allowed():
        return False  # inside torch.func transforms: weights are saved as they are
    hooks = step.saved_weights if top is None else SavedWeights(step, top)
    _push_hooks(hooks.pack_hook, hooks.unpack_hook)
    return True


@untraced
def pop_saved_weights() -> None:
    _pop_hooks()
