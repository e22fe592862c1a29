"""Saving while training goes on: the state is copied to host memory, and a thread writes the copy."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch
import torch.nn as nn

from ..runtime.step import Step
from .agreement import together
from .full import steps_of
from .save import take_agreed, write
from .snapshot import world_of

# The save under way of each model. The next save, or a load, waits for it: one at a time, in the same order everywhere.
_running: weakref.WeakKeyDictionary[Step, SaveHandle] = weakref.WeakKeyDictionary()


class SaveHandle:
    """An asynchronous save. `wait()` before the process ends, and before `destroy_process_group()`."""

    def __init__(self, path, action):
        self.path, self._error = path, None
        self._action = action
        self._thread = threading.Thread(target=self._run, name=f"shardkit save {path}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error
        finally:
            self._action = None  # lets go of the copy of the state

    def done(self) -> bool:
        """Whether the save has ended, well or not. Looks at this rank alone."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the end of the save, and raises the error it ended with. An error is raised once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


def async_save(
    path: str | os.PathLike,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    keep: int | None = None,
    verify: bool = False,
    **extra: Any,
) -> SaveHandle:
    """`save_checkpoint` that returns when everything has been copied to host memory; training may go on at once.

    Arguments, and what appears when, are those of `save_checkpoint`. Until the save has ended it holds a copy of this
    rank's part of the state in host memory (pinned, if that is on a GPU). An earlier save of this model is waited for
    first; an error that it ended with is raised here, on all ranks, and by `save_checkpoint` and `load_checkpoint`.

    Collective over the model's ranks. The thread talks to other ranks on host connections of its own.
    """
    finish(model)
    steps = steps_of(model)
    group = world_of(steps)
    snapshot = take_agreed(model, optim, extra, keep)
    together(group, "copying the state to host memory", snapshot.to_host)
    twin = group.host_twin()
    handle = SaveHandle(path, lambda: write(path, snapshot, twin, keep, verify))
    _running[steps[0]] = handle
    return handle


def finish(model: nn.Module) -> None:
    """Waits for the asynchronous save of this model that is under way, if any, and raises its error on all ranks."""
    steps = steps_of(model)
    handle = _running.pop(steps[0], None)
    if handle is not None:
        together(world_of(steps), f"the asynchronous save of {handle.path}", handle.wait)
