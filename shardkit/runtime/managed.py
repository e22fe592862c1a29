"""How a module becomes sharded and stays the same object: its class is replaced by a generated subclass.

Every module that keeps sharded parameters becomes a `Managed`; the root of a unit becomes what `api` asks for (a
`FullyShardedDataParallel`). The generated class is a subclass of that mixin and of the class the module had, and keeps
the latter's name, so `isinstance`, `generate`, `config` and code that decides by class name go on working, and
parameter names get no prefix. What a Managed adds:

- called or run by `forward` from outside its unit, it runs inside the unit: parameters are full while it computes
- `state_dict()` yields `LocalShard`s; `load_state_dict()` takes full tensors or LocalShards, without communication
- `copy.deepcopy` makes an independent sharded copy
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from typing import Any

import torch
import torch.nn as nn

from ..errors import StateError
from ..local_shard import LocalShard
from . import precision
from .asked import check_optimizer_request, wants_whole_tensors
from .flat_param import home_of
from .unit import Unit

_UNIT = "_shardkit_unit"
_generated: dict[tuple, type] = {}


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module's parameters belong to; None for a module without sharded parameters."""
    return module.__dict__.get(_UNIT)


class Managed(nn.Module):
    """Mixin of every module with sharded parameters. See the module docstring."""

    def __call__(self, *args, **kwargs):
        unit = self.__dict__[_UNIT]
        if unit.active:
            return super().__call__(*args, **kwargs)
        return unit.call(self, super().__call__, args, kwargs, "__call__")

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        self.__dict__[_UNIT].step.check_idle("state_dict()")
        for name, param in self._parameters.items():
            home = home_of(param) if param is not None else None
            if param is not None and home is not None and prefix + name in destination:
                flat, index = home
                flat.absorb()
                piece = LocalShard.wrap(param, flat.infos[index])
                destination[prefix + name] = piece.full_tensor() if wants_whole_tensors() else piece
        for (module, name), dtype in self.__dict__[_UNIT].buffer_dtypes.items():
            if module is self and prefix + name in destination:
                destination[prefix + name] = destination[prefix + name].to(dtype)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        if not recurse:
            check_optimizer_request(sys._getframe(1))
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.__dict__[_UNIT].step.check_idle("load_state_dict()")
        pieces = {}
        for name, param in self._parameters.items():
            value = state_dict.get(prefix + name)
            home = home_of(param) if param is not None else None
            if home is not None and isinstance(value, torch.Tensor):
                flat, index = home
                flat.absorb()
                pieces[prefix + name] = local_piece_of(value, flat, index)
        # The parameters must stay the objects they are, so "assign" cannot be honoured for them.
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict({**state_dict, **pieces}, prefix, local_metadata, *rest)

    def __deepcopy__(self, memo):
        from .copying import deepcopy_module

        return deepcopy_module(self, memo, super())

    def __reduce_ex__(self, protocol):
        raise StateError(
            f"{type(self).__name__} is sharded and cannot be pickled: its memory is spread over ranks. Save "
            "shardkit.full_state_dict(model), or a sharded checkpoint, instead."
        )


class KeepsPrecision(Managed):
    """A module that computes in float32 inside a low-precision unit: floating-point inputs are raised, and outputs
    lowered again to the unit's dtype, so that what follows computes as before."""

    def __call__(self, *args, **kwargs):
        mp = self.__dict__[_UNIT].mp
        args = precision.cast_floats(args, torch.float32)
        kwargs = precision.cast_floats(kwargs, torch.float32)
        with torch.autocast(_device_type(args, kwargs), enabled=False):
            out = super().__call__(*args, **kwargs)
        return precision.cast_floats(out, mp.param_dtype)


def _device_type(args, kwargs) -> str:
    devices: list[str] = []
    precision.for_each_tensor((args, kwargs), lambda t: devices.append(t.device.type))
    return devices[0] if devices else "cpu"


def local_piece_of(value: torch.Tensor, flat, index: int) -> torch.Tensor:
    """This rank's piece of `value`, which may be whole, or a LocalShard cut as the flat parameter is. Anything else is
    returned as it is, so that `load_state_dict` reports the sizes."""
    info = flat.infos[index]
    if isinstance(value, LocalShard):
        other = value.shard_info
        if other.shape == info.shape and other.piece == info.piece:
            return value.to_local().view(info.local_shape)
        return value
    if tuple(value.shape) == info.shape:
        start, stop = info.piece
        return value.detach().reshape(-1)[start:stop].view(info.local_shape)
    return value


def manage(module: nn.Module, unit: Unit, mixin: type = Managed, methods: tuple[str, ...] = ()) -> None:
    """Turns `module` into a `mixin` of `unit`. `methods`: names that run inside the unit, besides the call."""
    cls = type(module)
    for name in methods:
        if not callable(getattr(cls, name, None)):
            raise StateError(f"forward_methods names {name!r}, but {cls.__name__} has no such method.")
    key = (cls, mixin, methods)
    if key not in _generated:
        _generated[key] = _generate(cls, mixin, methods)
    module.__class__ = _generated[key]
    module.__dict__[_UNIT] = unit


def _generate(cls: type, mixin: type, methods: tuple[str, ...]) -> type:
    names: dict[str, Any] = {name: _inside_unit(getattr(cls, name), name) for name in methods}
    new = types.new_class(cls.__name__, (mixin, cls), {}, lambda ns: ns.update(names))
    new.__qualname__, new.__module__, new.__doc__ = cls.__qualname__, cls.__module__, cls.__doc__
    return new


def _inside_unit(method, name: str):
    """`method` as it is when the unit computes already, else run inside the unit. Keeps the signature."""

    @functools.wraps(method)
    def run(self, *args, **kwargs):
        unit = self.__dict__[_UNIT]
        if unit.active:
            return method(self, *args, **kwargs)
        return unit.call(self, functools.partial(method, self), args, kwargs, name)

    return run


def copy_plain(module: nn.Module, memo: dict, parent) -> nn.Module:
    """What `copy.deepcopy` does to an ordinary module: same class, copied `__dict__`."""
    custom = getattr(parent, "__deepcopy__", None)
    if custom is not None:
        return custom(memo)
    new = type(module).__new__(type(module))
    memo[id(module)] = new
    state = {k: v for k, v in module.__dict__.items() if k != _UNIT}
    new.__setstate__(copy.deepcopy(state, memo))
    return new
