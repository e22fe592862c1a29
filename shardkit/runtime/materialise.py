"""Models built on the meta device: memory and values for one module at a time.

A parameter keeps its identity, so that optimizers and aliases made before stay valid. What an initialiser forgot is an
error, not garbage: memory is marked before, and the marks are looked for afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from ..errors import ConfigError


class Materialiser:
    """Fills modules of one model. `init_fn(module)` initialises one module's own parameters and buffers; None: the
    module's `reset_parameters()`, then the model's `_init_weights(module)`, where `transformers` models choose theirs.
    """

    def __init__(self, root: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], Any] | None):
        self.root, self.device, self.init_fn = root, device, init_fn

    def fill(self, module: nn.Module) -> None:
        """Gives a module that is on the meta device memory and values; does nothing to others.

        Raises ConfigError where there is no initialiser, or where one left something out: any parameter or buffer
        under the module's own, non-persistent buffers under `init_fn`, after which a checkpoint may fill the rest.
        """
        params = {k: p for k, p in module._parameters.items() if p is not None and p.is_meta}
        buffers = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        if not params and not buffers:
            return
        for name, param in params.items():
            value = _marked(torch.empty_like(param, device=self.device))
            torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=param.requires_grad))
            assert module._parameters[name] is param
        for name, buffer in buffers.items():
            module._buffers[name] = _marked(torch.empty_like(buffer, device=self.device))
        with torch.no_grad():
            self._initialiser(module)(module)
        for name in params if self.init_fn is None else ():
            self._check(module, name, module._parameters[name])
        for name in buffers:
            if self.init_fn is None or name in module._non_persistent_buffers_set:
                self._check(module, name, module._buffers[name])

    def _initialiser(self, module: nn.Module) -> Callable[[nn.Module], Any]:
        if self.init_fn is not None:
            return self.init_fn
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        of_model = getattr(self.root, "_init_weights", None)
        if reset is None and of_model is None:
            raise ConfigError(
                f"{type(module).__name__} has parameters or buffers on the meta device and no reset_parameters(). Pass "
                "param_init_fn=, a function that initialises one module."
            )

        def initialise(module):
            if reset is not None:
                reset()
            if of_model is not None:
                of_model(module)

        return initialise

    def _check(self, module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        if value is not None and _is_marked(value):
            raise ConfigError(
                f"{type(module).__name__}.{name} was on the meta device and was not initialised. Pass param_init_fn= "
                "that sets it; a non-persistent buffer must be computed there, because no checkpoint holds it."
            )


def _marked(t: torch.Tensor) -> torch.Tensor:
    """`t`, filled with what no initialiser makes: NaN, or the most negative integer. Unsigned and boolean: zero."""
    if t.is_floating_point() or t.is_complex():
        return t.fill_(float("nan"))
    return t.zero_() if t.dtype == torch.bool else t.fill_(torch.iinfo(t.dtype).min)


def _is_marked(t: torch.Tensor) -> bool:
    if t.is_floating_point() or t.is_complex():
        return bool(t.isnan().any())
    lowest = 0 if t.dtype == torch.bool else torch.iinfo(t.dtype).min
    return lowest < 0 and bool((t == lowest).any())
