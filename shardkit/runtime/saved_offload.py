"""Saved activations in host memory: copied out during forward, fetched ahead of their use in backward.

A pair of saved-tensor hooks. PyTorch applies only the innermost pair, so this one shows every tensor to the pair that
was active before, and takes to the host what that one left as it is. Within a unit that pair is the engine's, which
makes recipes of weights; inside a checkpoint it is the checkpoint, and nothing is left to take.

Copies run on a stream of their own, in the order in which they were asked for. The host never waits. On the CPU, device
and host are the same and copies are made at once, by the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import deque

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..config import ActivationOffload
from .recipes import _hooks_allowed, _top_hooks
from .step import Step
from .unit import in_backward


def to_host(step: Step | None, config: ActivationOffload):
    """Context in which saved tensors go to the host. In a recomputation they are used at once, and stay."""
    if in_backward() or not _hooks_allowed():
        return contextlib.nullcontext()
    hooks = _ToHost(step, config, _top_hooks(True))
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


class _ToHost:
    """The pair of hooks, chained to the pair that was active before; see the module docstring."""

    def __init__(self, step: Step | None, config: ActivationOffload, outer: tuple | None):
        self.step, self.config, self.outer = step, config, outer
        self.tape = _Tape(None)

    def pack(self, t: torch.Tensor):
        packed = t if self.outer is None else self.outer[0](t)
        if packed is not t or not self._is_worth_it(t):
            return packed
        if self.step is None:
            return self.tape.take(t, 0, self.config.pin_memory)
        if self.tape.sequence is not self.step._sequence:
            self.tape = _tape_of(self.step)
        group, last = len(self.step._sequence), len(self.step._last_sequence)
        if group == last:
            return t  # of the unit with which backward will begin
        return self.tape.take(t, group, self.config.pin_memory)

    def unpack(self, packed):
        t = packed.bring_back() if type(packed) is _Saved else packed
        return t if self.outer is None else self.outer[1](t)

    def _is_worth_it(self, t: torch.Tensor) -> bool:
        size = t.numel() * t.element_size()
        if size < self.config.min_bytes or t.layout != torch.strided or t.device.type == "meta":
            return False
        source = t if t._base is None else t._base
        if isinstance(source, torch.nn.Parameter) or (source.is_leaf and source.requires_grad):
            return False  # weights, and inputs whose gradient somebody waits for, stay on the device anyway
        if is_traceable_wrapper_subclass(t):
            return False
        try:
            return size <= t.untyped_storage().nbytes()  # not for an expanded view, which is larger than its memory
        except (NotImplementedError, RuntimeError):
            return False  # a functorch wrapper


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Saved:
    """What autograd holds instead of a tensor."""

    tape: _Tape
    group: int
    kept: _Kept

    def bring_back(self) -> torch.Tensor:
        self.tape.reach(self.group)
        return self.kept.get()


class _Kept:
    """A tensor's copy in host memory, and at times the copy of that on the device. Lives as long as the graph."""

    _back: torch.Tensor | None = None
    _arrived: torch.Event | None = None

    def __init__(self, t: torch.Tensor, pin: bool):
        self.lane = _lane(t.device)
        self.source = StorageWeakRef(t.untyped_storage())  # while it is held, no other storage gets this one's identity
        self.host = torch.empty_like(t, device="cpu", pin_memory=pin and t.device.type != "cpu", requires_grad=False)
        self.left = self.lane.copy(self.host, t)  # event, or None

    def fetch(self) -> None:
        """Starts the copy to the device."""
        if self._back is None:
            self._back = torch.empty_like(self.host, device=self.lane.device, pin_memory=False)
            self._arrived = self.lane.copy(self._back, self.host)

    def get(self) -> torch.Tensor:
        self.fetch()
        self.lane.wait(self._arrived)
        self._arrived = None
        assert self._back is not None
        return self._back

    def drop(self) -> None:
        self.lane.wait(self._arrived)  # before its memory is used again: the copy writes it
        self._back = self._arrived = None

    __del__ = drop  # backward broke off, or never came


class _Tape:
    """What one forward took to the host, by groups: a group is what was saved from the start of one unit to the start
    of the next. Backward walks them in reverse: with a group's first tensor, the whole group before it is fetched."""

    def __init__(self, sequence: list | None):
        self.sequence = sequence  # the engine's list of this forward's units: a new list for each forward
        self._groups: dict[int, weakref.WeakSet[_Kept]] = {}
        self._known: weakref.WeakValueDictionary[tuple, _Kept] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[int, _Kept, torch.Tensor]] = deque()
        self._fetched: tuple[int, ...] = ()

    def take(self, t: torch.Tensor, group: int, pin: bool) -> _Saved:
        # A device tensor must outlive its copy; two units later the computation waits for that, rather than the host.
        self._let_leave(group - 1)
        key = (t.untyped_storage()._cdata, t.storage_offset(), t.size(), t.stride(), t.dtype, t._version)
        kept = self._known.get(key)  # saved by several operators
        if kept is None:
            kept = self._known[key] = _Kept(t, pin)
            if kept.left is not None:
                self._leaving.append((group, kept, t.detach()))
        self._groups.setdefault(group, weakref.WeakSet()).add(kept)
        return _Saved(self, group, kept)

    def reach(self, group: int) -> None:
        """Backward has come to a group."""
        if self._fetched[:1] == (group,):
            return
        self._let_leave(None)
        before = max((g for g in self._groups if g < group and self._groups[g]), default=group)
        done, self._fetched = self._fetched, (group, before)
        wanted = dict.fromkeys(kept for g in self._fetched for kept in self._groups[g])
        for kept in {kept for g in done for kept in self._groups[g]}.difference(wanted):
            kept.drop()
        for kept in wanted:
            kept.fetch()

    def _let_leave(self, before: int | None) -> None:
        while self._leaving and (before is None or self._leaving[0][0] < before):
            _, kept, _ = self._leaving.popleft()
            kept.lane.wait(kept.left)


_tapes: weakref.WeakKeyDictionary[Step, weakref.ref[_Tape]] = weakref.WeakKeyDictionary()


def _tape_of(step: Step) -> _Tape:
    """The tape of the forward that is running."""
    known = _tapes.get(step)
    tape = known() if known is not None else None
    if tape is None or tape.sequence is not step._sequence:
        tape = _Tape(step._sequence)
        _tapes[step] = weakref.ref(tape)  # it lives as long as what it kept
    return tape


class _Lane:
    """Copies between one device and the host, on a stream of their own where the device has streams."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Starts a copy of what the computation has written by now. Returns the event to wait for, if any."""
        with torch.no_grad():
            if self.stream is None:
                to.copy_(source)
                return None
            # Memory of `to` may have been used by the computation before, and what `source` holds be under way.
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))
            with self.stream:
                to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """The computation waits, not the host."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)


@functools.cache
def _lane(device: torch.device) -> _Lane:
    return _Lane(device)
