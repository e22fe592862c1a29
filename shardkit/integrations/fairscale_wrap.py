"""fairscale's wrap helpers: `wrap`, `auto_wrap`, `enable_wrap`, `ConfigAutoWrap`, and its two policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn as nn

from ..errors import ConfigError, StateError
from ._common import selected_by


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Takes modules with `min_num_params` parameters or more that nothing inside them has taken.

    Nothing inside `force_leaf_modules` is taken, nor are `exclude_wrap_modules` themselves; the root is taken whatever
    its size with `skip_params_check_for_root`.
    """
    large = unwrapped_params >= min_num_params
    if recurse:
        leaves = _policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        return large and not isinstance(module, tuple(leaves))
    excluded = _policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return (large or (module_is_root and skip_params_check_for_root)) and not isinstance(module, tuple(excluded))


_policy: Any = default_auto_wrap_policy  # scripts read and change its defaults there
_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    """Takes modules that have a `wrapper_config`."""
    return recurse or hasattr(module, "wrapper_config")


class ConfigAutoWrap:
    """The context of `enable_wrap`. Contexts may be nested and entered again."""

    in_autowrap_context: bool = False
    _active: list[ConfigAutoWrap] = []

    def __init__(self, auto_wrap_policy: Callable | None = None, **kwargs: Any):
        if "wrapper_cls" not in kwargs:
            raise ConfigError("enable_wrap() needs wrapper_cls, for example wrapper_cls=FullyShardedDataParallel.")
        self.auto_wrap_policy = auto_wrap_policy or default_auto_wrap_policy
        self.kwargs = kwargs

    def __enter__(self) -> None:
        ConfigAutoWrap._active.append(self)
        ConfigAutoWrap.in_autowrap_context = True

    def __exit__(self, *error) -> None:
        ConfigAutoWrap._active.remove(self)
        ConfigAutoWrap.in_autowrap_context = bool(ConfigAutoWrap._active)


@contextlib.contextmanager
def enable_wrap(auto_wrap_policy: Callable | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Context in which `wrap` and `auto_wrap` call `wrapper_cls` with `wrapper_kwargs`.

    auto_wrap_policy: what `auto_wrap` takes by default. None: `default_auto_wrap_policy`.
    """
    with ConfigAutoWrap(auto_wrap_policy, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps `module` inside of `enable_wrap`; outside, returns it as it is.

    Arguments come from the context, then from `module.wrapper_config`, then from `wrap_overrides`.
    """
    if not ConfigAutoWrap._active:
        return module
    tagged = getattr(module, "wrapper_config", None) or {}
    arguments = {**ConfigAutoWrap._active[-1].kwargs, **tagged, **wrap_overrides}
    wrapper = arguments.pop("wrapper_cls")
    if arguments.pop("move_module_cuda_half", False):
        module = module.cuda().half()
    return wrapper(module, **arguments)


def auto_wrap(module: nn.Module, auto_wrap_policy: Callable | None = None, **kwargs: Any) -> nn.Module:
    """Wraps, inside of `enable_wrap`, what the policy takes of `module`, itself perhaps; outside, returns it as it is.

    auto_wrap_policy: None: the context's. kwargs: as `wrap_overrides` of `wrap`.
    Raises StateError where something inside is wrapped already.
    """
    if not ConfigAutoWrap._active:
        return module
    context = ConfigAutoWrap._active[-1]
    wrapper = context.kwargs["wrapper_cls"]
    for name, inner in module.named_modules():
        if isinstance(wrapper, type) and isinstance(inner, wrapper):
            raise StateError(
                f"auto_wrap() found {name or 'the module itself'!r} wrapped already, and would count its parameters "
                "again. Tag modules with wrapper_config and use config_auto_wrap_policy, which wraps in one pass."
            )
    for taken in selected_by(auto_wrap_policy or context.auto_wrap_policy, module, (), root_flag=True):
        wrapped = wrap(taken, **kwargs)
        if taken is module:
            return wrapped
        if wrapped is not taken:  # a wrapper class of the user's own
            for parent in module.modules():
                for key, child in list(parent._modules.items()):
                    if child is taken and parent is not wrapped:
                        parent._modules[key] = wrapped
    return module
