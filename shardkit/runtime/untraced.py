"""Keeps torch.compile out of the engine, without importing its front end (seconds of start-up) before a user does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)


def untraced(function: _Function) -> _Function:
    """A function that is run as it is, with all it calls, also while torch.compile traces its caller."""
    return _mark(function, nested=True)


def untraced_here(function: _Function) -> _Function:
    """A function that is run as it is, but whose callees are compiled: the engine around a user's forward."""
    return _mark(function, nested=False)


def _mark(function: _Function, nested: bool) -> _Function:
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, skip if nested else default)
    frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
