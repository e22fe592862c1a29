"""Casts at a unit's border: inputs, outputs, buffers; and the walk over nested inputs and outputs that they share."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from ..config import MixedPrecision

_MAX_DEPTH = 6  # inputs and outputs are records of tensors, not object graphs


def for_each_tensor(value: Any, visit: Callable[[torch.Tensor], None], depth: int = 0) -> None:
    """Calls `visit` for every tensor in nested tuples, lists, mappings, dataclasses and plain objects."""
    if isinstance(value, torch.Tensor):
        visit(value)
    elif depth >= _MAX_DEPTH or value is None or isinstance(value, (int, float, str, bytes, nn.Module, type)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            for_each_tensor(item, visit, depth + 1)
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            for_each_tensor(item, visit, depth + 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            for_each_tensor(item, visit, depth + 1)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int = 0) -> Any:
    """`value` with every tensor replaced by `change(tensor)`: the same object where nothing changed, else a copy of
    the containers on the way. Tuples, lists, dicts (and their subclasses), dataclasses; other objects are left alone.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth >= _MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        new = {k: map_tensors(v, change, depth + 1) for k, v in value.items()}
        if all(new[k] is v for k, v in value.items()):
            return value
        changed: Any = copy.copy(value)
        for k, v in new.items():
            changed[k] = v
        return changed
    if isinstance(value, (tuple, list)):
        items = [map_tensors(v, change, depth + 1) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # namedtuples take arguments
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = {f.name: map_tensors(getattr(value, f.name), change, depth + 1) for f in dataclasses.fields(value)}
        if all(new[name] is getattr(value, name) for name in new):
            return value
        out: Any = copy.copy(value)
        for name, item in new.items():
            object.__setattr__(out, name, item)  # also in frozen ones
        return out
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `value` as `dtype`; integers, booleans and complex numbers stay as they are."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


def cast_inputs(mp: MixedPrecision, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if mp.param_dtype is None or not mp.cast_forward_inputs:
        return args, kwargs
    return cast_floats(args, mp.param_dtype), cast_floats(kwargs, mp.param_dtype)


def keeps_own_dtype(mp: MixedPrecision, module: nn.Module, name: str) -> bool:
    """True for a parameter (full name `name`, kept by `module`) that computes in its own dtype under `mp`."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    return any(part in name if isinstance(part, str) else isinstance(module, part) for part in mp.keep_fp32)


def computes_apart(mp: MixedPrecision, module: nn.Module) -> bool:
    """True for a module that `keep_fp32` takes out of a low-precision unit, by class or by all its parameters' names,
    so that its inputs must not be low either. Batch normalisation takes inputs of any dtype as it is."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return any(isinstance(kind, type) and isinstance(module, kind) for kind in mp.keep_fp32)


def cast_buffers(mp: MixedPrecision, module: nn.Module) -> dict[str, torch.dtype]:
    """Casts a module's own floating-point buffers, except batch normalisation's statistics. Returns the dtypes they
    had: a state dict is written in these."""
    before: dict[str, torch.dtype] = {}
    if mp.buffer_dtype is None or isinstance(module, nn.modules.batchnorm._BatchNorm):
        return before
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != mp.buffer_dtype:
            before[name] = buffer.dtype
            module._buffers[name] = buffer.to(mp.buffer_dtype)
    return before
