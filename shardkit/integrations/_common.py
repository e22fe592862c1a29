"""What fairscale's and FSDP1's interfaces have in common: a unit class whose state dict is whole, and translations.

Where an argument has lost its effect, `say(...)` says why, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn

from .. import api
from ..checkpoint.full import full_state_dict, steps_of
from ..config import MixedPrecision
from ..runtime.asked import frame_of
from ..runtime.managed import unit_of
from ..runtime.step import Step
from ..runtime.summon import summon
from ..runtime.unit import Unit

_LOW = (torch.float16, torch.bfloat16)
_said: set[str] = set()
_sharded_wanted = 0  # above 0: a state_dict() under way yields LocalShards


def say(message: str) -> None:
    """Warns once for each message, on every rank."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=4)


class WholeState(api.FullyShardedDataParallel):
    """A unit for scripts of other libraries. Compared with `shardkit.FullyShardedDataParallel`:

    - `state_dict()` is the whole model's, as `whole_state()` says; shardkit's own functions and
      `torch.distributed.checkpoint` still get LocalShards. Collective
    - `apply(fn)` shows `fn` whole parameters, and keeps what it changed. Collective
    - `module` is the module itself, where nothing of that name is there already
    """

    def __init__(self, *args, **kwargs):
        if (args and args[0] is self) or kwargs.get("module") is self:
            return  # __new__ returned the module that it was given
        super().__init__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                return self
            answer = _asked_of_wrapper(self, name)
            if answer is None:
                raise
            return answer

    def whole_state(self) -> dict[str, Any] | None:
        """Options for `full_state_dict`; None: this module's state dict holds LocalShards."""
        return {}

    def whole_state_dict(self, **options) -> dict:
        """What `state_dict()` is made from. Collective."""
        return full_state_dict(self, **options)

    def pieces_to_cpu(self) -> bool:
        """Whether a state dict of LocalShards is copied to host memory."""
        return False

    def state_dict(self, *args, destination: Any = None, prefix: str = "", keep_vars: bool = False):
        options = self.whole_state()
        into: Any = args[0] if args else destination
        caller = sys._getframe(1)
        own = caller.f_globals.get("__name__", "").startswith("shardkit.")
        if own or _sharded_wanted or options is None or keep_vars or frame_of("_get_model_state_dict", caller):
            with sharded_state():
                out = super().state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
            if not own and self.pieces_to_cpu():
                out.update((k, v.cpu()) for k, v in out.items() if isinstance(v, torch.Tensor))
            return out
        whole = self.whole_state_dict(**options)
        if into is None and not prefix:
            return whole
        out = type(whole)() if into is None else into
        out.update((prefix + key, value) for key, value in whole.items())
        metadata = getattr(out, "_metadata", None)
        if metadata is not None:
            here = getattr(whole, "_metadata", None) or {}
            metadata.update(((prefix + path).rstrip("."), value) for path, value in here.items())
        return out

    def apply(self, fn: Callable[[nn.Module], Any]):
        with summoned(self):
            return super().apply(fn)


def _asked_of_wrapper(module: nn.Module, name: str) -> Any:
    """What scripts ask the wrapper for, where the module has nothing of that name."""
    unit = unit_of(module)
    if unit is None or not unit.flats:
        return None
    mesh = unit.flats[0].mesh
    return {"rank": mesh.shard.rank, "world_size": mesh.shard.size, "process_group": mesh.world.pg}.get(name)


@contextlib.contextmanager
def sharded_state() -> Iterator[None]:
    """Context in which `state_dict()` yields LocalShards."""
    global _sharded_wanted
    _sharded_wanted += 1
    try:
        yield
    finally:
        _sharded_wanted -= 1


def units_in(module: nn.Module) -> list[Unit]:
    """The units whose module is `module` or inside it, in the order of the module tree."""
    found = dict.fromkeys(u for m in module.modules() for u in [unit_of(m)] if u is not None)
    inside = set(module.modules())
    return [unit for unit in found if unit.module in inside]


def is_wrapped(module: nn.Module, cls: type) -> bool:
    """Whether `module` is a unit of the wrapper class already, so that another wrapper around it would hold nothing."""
    unit = unit_of(module)
    return isinstance(module, cls) and unit is not None and unit.module is module


@contextlib.contextmanager
def summoned(module: nn.Module, *, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """`summon_full_params` of every root in `module`, which may itself not be sharded. Collective."""
    with contextlib.ExitStack() as stack:
        for step in _steps(module):
            stack.enter_context(summon(step, module, writeback, recurse))
        yield


def _steps(module: nn.Module) -> list[Step]:
    if any(unit.active for unit in units_in(module)):
        return list(dict.fromkeys(unit.step for unit in units_in(module)))  # summoned already, as inside apply()
    return steps_of(module)


# ------------------------------------------------------------------------------------------------------- wrapping


def keep_dtype(module: nn.Module, mp: MixedPrecision | None) -> MixedPrecision | None:
    """`mp`, completed for a module whose parameters are of one 16-bit dtype, so that its shards keep it, as they do in
    the libraries that scripts come from. shardkit itself would make float32 masters."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) != 1 or not dtypes <= set(_LOW):
        return mp
    return dataclasses.replace(mp or MixedPrecision(), master_dtype=dtypes.pop())


def set_unit_options(root: nn.Module, key: str) -> None:
    """Gives units that were wrapped by several calls the options of their own calls.

    `root.__dict__[key]` and those of modules inside are `PerUnit`s. Which unit is the root is known only after the
    outermost call, so this runs after each.
    """
    unit_of_root = unit_of(root)
    assert unit_of_root is not None
    for unit in unit_of_root.step.units:
        own: PerUnit | None = unit.module.__dict__.get(key)
        if own is None:
            continue
        unit.drop_after_forward = own.drop_after_forward
        if unit.mp is not None:
            cast = own.cast_inputs or (unit is unit_of_root and own.cast_root_inputs)
            unit.mp = dataclasses.replace(unit.mp, cast_forward_inputs=cast)


@dataclasses.dataclass(frozen=True)
class PerUnit:
    """Options that belong to one call of a wrapper, not to the root around it. `settings`: the library's own."""

    drop_after_forward: bool | None = None
    cast_inputs: bool = False
    cast_root_inputs: bool = True
    settings: Any = None


def selected_by(policy: Callable, root: nn.Module, ignored: Iterable[nn.Parameter], root_flag: bool) -> list[nn.Module]:
    """The modules, `root` among them perhaps, that a recursive policy takes, children first.

    Such a policy is asked twice for each module: with `recurse=True` whether to look inside, with `recurse=False`
    whether to take it, given the number of parameters that nothing inside has taken. It gets that number as
    `nonwrapped_numel` (FSDP1), or as `unwrapped_params` beside `module_is_root` (fairscale; `root_flag`).
    """
    ignored, taken = set(ignored), []

    def ask(module: nn.Module, recurse: bool, left: int) -> bool:
        if root_flag:
            return bool(policy(module=module, recurse=recurse, unwrapped_params=left, module_is_root=module is root))
        return bool(policy(module=module, recurse=recurse, nonwrapped_numel=left))

    def visit(module: nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters() if p not in ignored)
        if not ask(module, True, size):
            return 0
        inside = sum(visit(child) for child in module.children())
        if module in taken or not ask(module, False, size - inside):
            return inside
        taken.append(module)
        return size

    visit(root)
    return taken
