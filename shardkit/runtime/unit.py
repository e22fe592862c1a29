"""One unit: a module whose own parameters are gathered together, used, and dropped again.

A unit's work belongs to the call of its module (hooks included): `call` wraps it. While it computes, the places where
its modules keep parameters hold full parameters; afterwards they hold the local ones again.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from . import precision
from .flat_param import FlatParam, home_of
from .recipes import Record, Reduce, Use, pop_saved_weights, push_saved_weights
from .untraced import untraced, untraced_here

if TYPE_CHECKING:
    from .step import Step

_FORWARDS_LOOKED_AT = 2  # in which values are compared to find silent writes

_in_graph_task = torch._C._current_graph_task_id
_peek_transforms = torch._C._functorch.peek_interpreter_stack
_will_execute = torch._C._will_engine_execute_node


def in_backward() -> bool:
    """True while the autograd engine runs on this thread."""
    return _in_graph_task() != -1


@dataclasses.dataclass(eq=False)
class Entry:
    """One parameter that a unit computes with, its own or borrowed, and every place where its modules keep it."""

    flat: FlatParam
    index: int
    places: list[tuple[nn.Module, str | None, Any]]
    """(module, attribute, key): the parameter is at `module.<attribute>[key]` (its `_parameters`, or a list such as an
    RNN's flat weights), or, without an attribute, in the module's `__dict__`."""

    @property
    def param(self) -> nn.Parameter:
        return self.flat.params[self.index]


class Unit:
    """See the module docstring.

    flats: the flat parameters it owns. entries: all parameters it computes with; `sources` are the flat parameters
    these lie in, borrowed ones included. live: records of uses that still owe a gradient.
    """

    def __init__(self, name: str, module: nn.Module, flats: list[FlatParam], entries: list[Entry], mp):
        self.name, self.module = name, module
        self.flats, self.entries = flats, entries
        self.mp = mp  # MixedPrecision or None
        self.step: Step
        self.ancestors: set[Unit] = set()
        self.drop_after_forward: bool | None = None  # None: what the root's options say
        self.live: set = set()
        self.active = 0  # forward calls of this unit that are running
        self.opened = False  # full parameters are installed for backward
        self.entries_seen: set = set()  # by which methods the unit was entered outside of backward
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}  # of buffers that were cast, before the cast
        self._fulls: dict[int, torch.Tensor] | None = None
        self._pushed = False
        self._forwards = 0
        self._changes_silently = False  # some module of the unit writes to weights through `.data`
        self._installed_lookups = False  # also those that are only looked up
        self._installed = False  # full parameters for backward are in place (else they come when somebody looks)
        self.sources = list(dict.fromkeys(e.flat for e in self.entries))
        self._params = [e.param for e in self.entries]
        # (container, key, local parameter) of every place of every entry
        self._slots_of = [
            [(m.__dict__ if name is None else m.__dict__[name], key, e.param) for m, name, key in e.places]
            for e in self.entries
        ]
        self._slots = [slot for slots in self._slots_of for slot in slots]
        # (flat parameter, positions among the entries, indices in the flat parameter)
        self._per_source = []
        for flat in self.sources:
            positions = [i for i, e in enumerate(self.entries) if e.flat is flat]
            self._per_source.append((flat, positions, [self.entries[i].index for i in positions]))
        # The modules whose `_parameters` can wait to be looked at; None where parameters are kept elsewhere as well.
        places = [place for e in self.entries for place in e.places]
        modules = dict.fromkeys(m for m, _, _ in places)
        at_rest = all(attribute == "_parameters" for _, attribute, _ in places)
        self._sleepers = [Sleeper(m, self) for m in modules] if at_rest else None
        self._asleep = False
        self.is_leaf = at_rest and list(modules) == [self.module]  # an embedding or a head, which models like to read
        self.on_output_grad = self._on_output_grad  # one object, registered as a hook on every output

    def __repr__(self) -> str:
        return f"Unit({self.name or '(root)'}, {len(self.entries)} parameters)"

    @property
    def drops_after_forward(self) -> bool:
        own = self.drop_after_forward
        return self.step.options.drop_after_forward if own is None else own

    # --------------------------------------------------------------------------------------------------- forward

    @untraced_here
    def call(self, module: nn.Module, fn, args: tuple, kwargs: dict, entry: str):
        """Runs `fn(*args, **kwargs)`, the call or forward of `module` (of this unit), with full parameters in place."""
        step, way_in = self.step, (module, entry)
        if in_backward():
            if torch.is_grad_enabled() or step.in_backward:
                return self._recompute(fn, args, kwargs, way_in)
        else:
            self.entries_seen.add(way_in)
        _bare(step.begin)
        failed = True
        try:
            if self.mp is not None and module is self.module:
                args, kwargs = precision.cast_inputs(self.mp, args, kwargs)
            _bare(self._enter)
            try:
                out = fn(*args, **kwargs)
            finally:
                _bare(self._exit)
            if self.sources and torch.is_grad_enabled() and _peek_transforms() is None:
                precision.for_each_tensor(out, self._watch)
            failed = False
        finally:
            _bare(step.end, failed)
        return step.cast_output(out)

    def _watch(self, t: torch.Tensor) -> None:
        if t.requires_grad:
            t.register_hook(self.on_output_grad)

    @untraced_here
    def _recompute(self, fn, args, kwargs, way_in):
        """A forward inside backward: activation checkpointing. The unit stays open afterwards, since its backward
        follows.

        Around the unit (the checkpoint calls what was called in forward), our hooks were the innermost then and must
        be now, or the checkpoint counts other tensors. Inside it, the checkpoint's hooks were the innermost.
        """
        _bare(self._open_and_install, way_in[0])
        if way_in not in self.entries_seen:
            return fn(*args, **kwargs)
        if self.mp is not None and way_in[0] is self.module:
            args, kwargs = precision.cast_inputs(self.mp, args, kwargs)
        pushed = push_saved_weights(self.step)
        self.active += 1
        try:
            out = fn(*args, **kwargs)
        finally:  # a non-reentrant checkpoint leaves by an exception once it has what it needs
            self.active -= 1
            if pushed:
                pop_saved_weights()
        return out

    def _open_and_install(self, module: nn.Module) -> None:
        self.step.open(self)
        self.install_for(module)

    def _flats_of(self, module: nn.Module) -> list[FlatParam]:
        """What a module of this unit computes with; the unit's own module stands for all of them."""
        if module is self.module:
            return self.sources
        homes = (home_of(e.param) for e in self.entries if any(place[0] is module for place in e.places))
        return [home[0] for home in homes if home is not None]

    def _enter(self) -> None:
        self.active += 1
        self._pushed = False
        try:
            for flat in self.sources:
                flat.holders += 1
            self._wake()
            if self.opened and not self._installed:
                self._install(everything=False)
            self.step.gather(self)
            record, self._fulls = self._make_fulls(self._per_source)
            for position, full in self._fulls.items():
                for container, key, _ in self._slots_of[position]:
                    container[key] = full
            if record is not None:
                record.owes()
                del record  # from here on it lives as long as the graph
            if torch.is_grad_enabled():
                self._pushed = push_saved_weights(self.step)
        except BaseException:
            self._restore()
            self._let_go()
            raise

    def _make_fulls(self, sources) -> tuple[Record | None, dict[int, torch.Tensor]]:
        """Full parameters of some flat parameters, by position among the entries; differentiable where the local
        parameter is and grad mode is on."""
        fulls: dict[int, torch.Tensor] = {}
        for flat, positions, indices in sources:
            fulls.update(zip(positions, flat.views(indices), strict=True))
        if not torch.is_grad_enabled():
            return None, fulls
        params = self._params
        trained = [i for i in fulls if params[i].requires_grad]
        if not trained:
            return None, fulls
        record = Record(self, trained)
        edges = [_edge(params[i]) for i in trained]
        used = Use.apply(record, [fulls[i] for i in trained], self.step.anchor, *edges)
        fulls.update(zip(trained, used, strict=True))
        return record, fulls

    def _exit(self) -> None:
        if self._pushed:
            pop_saved_weights()
            self._pushed = False
        if not self.opened:
            self._keep_changes()
            self._restore()
        self._fulls = None
        self._let_go()
        if self.is_leaf and self.step.in_forward and not self.opened:
            self.doze()

    def _let_go(self) -> None:
        self.active -= 1
        keep = self.step.keeps_after_forward(self)
        for flat in self.sources:
            flat.holders -= 1
            if not self.opened and not (keep and (flat.needed_in_backward or not self.drops_after_forward)):
                flat.release(backward_follows=torch.is_grad_enabled())

    def _keep_changes(self) -> None:
        """Writes back what the forward changed in place: `max_norm` embeddings, spectral norm, clamped weights.

        A version counter tells, or memory that is no longer the buffer's (`w.data = ...`). A write through `w.data`
        leaves no trace but the values: they are compared in a unit's first forwards, and always where they
        differed once.
        """
        fulls = self._fulls
        if fulls is None or torch.is_inference_mode_enabled():
            return
        look = self._changes_silently or self._forwards < _FORWARDS_LOOKED_AT
        self._forwards += 1
        for flat, positions, indices in self._per_source:
            assert flat.buffer is not None
            base, offsets = flat.buffer.data_ptr(), flat.byte_offsets
            mine = [fulls[position] for position in positions]
            at = [full.data_ptr() - base for full in mine]
            in_place = not base or at == [offsets[index] for index in indices]
            if in_place and not look and not any(full._version for full in mine):
                continue  # by far the most frequent case, and quick to see
            for index, full, offset in zip(indices, mine, at, strict=True):
                if full._version or (base and offset != offsets[index]):
                    flat.write_back(index, full)
                elif look and flat.differs(index, full):
                    self._changes_silently = True
                    flat.write_back(index, full)

    def _restore(self) -> None:
        for container, key, param in self._slots:
            container[key] = param

    # -------------------------------------------------------------------------------------------------- backward

    def _on_output_grad(self, grad) -> None:
        self.step.open(self)

    def open_for_backward(self) -> None:
        """Gathers what backward needs. Full parameters get back into place at once, or when somebody looks at one:
        a recomputation inside the unit, a hook that reads weights. Most backwards never do."""
        self.opened = True
        for flat in self.sources:
            flat.holders += 1
        self.step.gather_for_backward(self, everything=False)
        if self._sleepers is None:
            self._install(everything=False)
        else:
            self.doze()

    def install_for(self, module: nn.Module) -> None:
        """Puts full parameters in place during backward: at least those of `module`."""
        if not self._installed:
            self._install(everything=False)
        if not self._installed_lookups and not all(flat.needed_in_backward for flat in self._flats_of(module)):
            self._install(everything=True)  # rows were looked up, and will be again

    def _install(self, everything: bool) -> None:
        self._wake()
        self._installed, self._installed_lookups = True, everything
        self.step.gather_for_backward(self, everything)
        sources = [s for s in self._per_source if everything or s[0].needed_in_backward]
        with torch.enable_grad():  # hooks run without it, but a reentrant checkpoint needs differentiable weights
            _, fulls = self._make_fulls(sources)
        for position, full in fulls.items():
            for container, key, _ in self._slots_of[position]:
                container[key] = full

    def doze(self) -> None:
        """Lets the next look at a parameter come here: see `Sleeper`."""
        for sleeper in self._sleepers or ():
            sleeper.module.__dict__["_parameters"] = sleeper
        self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            for sleeper in self._sleepers or ():
                sleeper.module.__dict__["_parameters"] = sleeper.real
            self._asleep = False

    def wake(self) -> None:
        """The forward in which somebody might have looked is over."""
        if not self.opened:
            self._wake()

    def lend(self) -> None:
        """A module outside reads a parameter of this unit without calling it, such as a model that computes its logits
        with `self.emb.weight`: the unit's parameters are full until the end of the root's forward."""
        self._enter()
        self.step.lent.append(self)

    def take_back(self) -> None:
        self._exit()

    def close_after_backward(self) -> None:
        """Undoes `open_for_backward`, and drops the full parameters if the strategy says so."""
        self.opened = False
        self._put_back()
        for flat in self.sources:
            flat.holders -= 1
            flat.release()

    def _put_back(self) -> None:
        if self._installed:
            self._restore()
            self._installed = self._installed_lookups = False
        else:
            self._wake()

    def report(self, record: Record, grads: tuple, nodes: list) -> list:
        """Takes the full gradients that reached one use. Returns what autograd passes on to the local parameters:
        nothing in an ordinary backward, their reduced gradients under `torch.autograd.grad`."""
        arrived = [k for k, grad in enumerate(grads) if grad is not None]
        out: list = [None] * len(grads)
        if not _will_execute(self.step.anchor_node):  # only some inputs were asked for
            captured, wanted = [], []
            for k in arrived:
                try:
                    if nodes[k] is not None and _will_execute(nodes[k]):
                        wanted.append(k)  # backward(inputs=...)
                except RuntimeError:  # torch.autograd.grad: the engine takes the gradient instead of running the leaf
                    captured.append(k)
            if captured:
                self._capture(record, captured, grads, out)
                return out
            arrived = wanted
        record.reported()
        with torch.no_grad():  # under create_graph the gradients would drag their graph into the reduction
            self.step.report(self, [(self.entries[record.positions[k]], grads[k].detach()) for k in arrived], record)
        return out

    def _capture(self, record: Record, captured: list[int], grads: tuple, out: list) -> None:
        """Reduces at once, and hands the local gradients to autograd: `torch.autograd.grad(loss, parameters)`."""
        self.step.begin_backward()
        for flat in self.sources:
            mine = [k for k in captured if self.entries[record.positions[k]].flat is flat]
            if mine:
                indices = [self.entries[record.positions[k]].index for k in mine]
                full = [grads[k] for k in mine]
                if torch.is_grad_enabled():  # create_graph=True
                    pieces = Reduce.apply(self.step, flat, indices, *full)
                else:
                    pieces = self.step.capture(flat, indices, full)
                for k, piece in zip(mine, pieces, strict=True):
                    out[k] = piece

    def reset(self) -> None:
        """Puts local parameters back and forgets what was under way, after an exception."""
        self._wake()
        if self.active or self._installed:
            self._restore()
        self.active, self.opened, self._fulls = 0, False, None
        self._installed = self._installed_lookups = False
        self.live.clear()


class Sleeper(dict):
    """Stands in for a module's `_parameters` while its unit is open for backward, or while the root computes and may
    read them. It holds the local parameters, for whoever lists them; whoever reads one as an attribute gets the full
    one, put into place at that moment."""

    __slots__ = ("module", "unit", "real")

    def __init__(self, module: nn.Module, unit: Unit):
        self.module, self.unit = module, unit
        self.real: dict = module.__dict__["_parameters"]
        super().__init__(self.real)

    def __getitem__(self, name):
        if self.unit.opened:
            self.unit.install_for(self.module)
        elif name in self.real:
            self.unit.lend()
        return self.real[name]


def _edge(param: nn.Parameter) -> nn.Parameter | None:
    """The parameter as an input of `Use`, unless hooks on it forbid: autograd would call them with None. Such hooks
    run when the gradient is deposited."""
    return None if param._backward_hooks or param._post_accumulate_grad_hooks else param


@untraced
def _bare(function, *args):
    """Runs a step of the engine outside of torch.func transforms: its tensors belong to none of them."""
    if _peek_transforms() is None:
        return function(*args)
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return function(*args)
