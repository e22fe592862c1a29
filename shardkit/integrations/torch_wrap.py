"""FSDP1's wrap helpers: `wrap`, `enable_wrap`, and the policies, as `auto_wrap_policy` takes them.

The policies of `torch.distributed.fsdp.wrap` itself are understood as well, by their shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.nn as nn

from ..errors import ConfigError
from ..wrap import Policy, find_units, from_torch_policy
from ._common import selected_by

_contexts: list[dict[str, Any]] = []


class ModuleWrapPolicy:
    """Takes every module of one of these classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]):
        self._module_classes = set(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args, **kwargs) -> bool:
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({self._module_classes})"


class CustomPolicy:
    """Takes the modules for which `lambda_fn` returns True, or a dictionary of arguments for the module's own unit."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]):
        self._lambda_fn = lambda_fn


def always_wrap_policy(*args, **kwargs) -> bool:
    """Takes every module that can be a unit."""
    return True


def lambda_auto_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable) -> bool:
    """With `functools.partial`: takes the modules for which `lambda_fn(module)` holds."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """With `functools.partial`: takes every module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Takes modules with `min_num_params` parameters or more that nothing inside them has taken."""
    leaves = {nn.MultiheadAttention} if force_leaf_modules is None else force_leaf_modules
    excluded = {nn.ModuleList, nn.ModuleDict} if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


def units_of_policy(
    module: nn.Module, policy: Any, ignored_modules: Iterable[nn.Module], ignored_params: Iterable[nn.Parameter]
) -> tuple[Policy, list[tuple[nn.Module, dict[str, Any]]]]:
    """What an `auto_wrap_policy` means: a policy of shardkit's, and units with arguments of their own, children first.

    Where there are any of the latter, all units are in that list and the policy is None.
    """
    own = getattr(policy, "_lambda_fn", None)
    if own is not None:
        asked = {m: own(m) for m in module.modules() if m is not module}
        wrong = next((a for a in asked.values() if not isinstance(a, (bool, dict))), None)
        if wrong is not None:
            raise ConfigError(f"the function of a CustomPolicy returned {wrong!r}. Return True, False or a dictionary.")
        if not any(isinstance(a, dict) and a for a in asked.values()):
            return (lambda m: bool(asked.get(m)) or asked.get(m) == {}), []
        skipped = {m for root in ignored_modules for m in root.modules()}
        units = find_units(module, lambda m: asked.get(m, False) is not False, skipped)
        return None, [(m, asked[m] if isinstance(asked[m], dict) else {}) for _, m in units]
    if _is_recursive(policy):
        taken = set(selected_by(policy, module, ignored_params, root_flag=False))
        return (lambda m: m in taken), []
    return from_torch_policy(policy), []


def _is_recursive(policy: Any) -> bool:
    """True for a function of FSDP1's signature that no set of classes and no size can stand for."""
    function, bound = getattr(policy, "func", policy), getattr(policy, "keywords", None) or {}
    if bound.get("transformer_layer_cls") or "lambda_fn" in bound:
        return False
    code = getattr(function, "__code__", None)
    return code is not None and "nonwrapped_numel" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Context in which `wrap(module)` is `wrapper_cls(module, **wrapper_kwargs)`. Contexts may be nested."""
    _contexts.append({"wrapper_cls": wrapper_cls, **wrapper_kwargs})
    try:
        yield
    finally:
        _contexts.pop()


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps `module` inside of `enable_wrap`; `wrap_overrides` come first. Outside, returns it as it is."""
    if not _contexts:
        return module
    arguments = {**_contexts[-1], **wrap_overrides}
    return arguments.pop("wrapper_cls")(module, **arguments)
