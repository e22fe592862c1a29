"""What `transformers` asks its attention masks, answered: nothing is padded or packed.

A model of transformers looks into its masks, and where nothing is masked uses the attention kernel's own causality
instead of a mask in memory. Of a tensor without values it does not ask, as when it is traced, and builds the mask,
which a real run does not have. While a simulation runs, it asks, and is told that all tokens are there.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

_MODULE = "transformers.masking_utils"


@contextlib.contextmanager
def nothing_masked(mode: Any):
    """Context in which transformers, where it is loaded, asks the masks of one fake mode as it asks real ones.

    It decides by a function of its own, which is replaced meanwhile: there is no argument for it. For all other
    tensors, such as those of another thread that trains or compiles, it answers as before.
    """
    module: Any = sys.modules.get(_MODULE)
    before = getattr(module, "is_tracing", None)
    if before is None:
        yield
        return
    module.is_tracing = lambda tensor=None: before(None if getattr(tensor, "fake_mode", None) is mode else tensor)
    try:
        yield
    finally:
        module.is_tracing = before


def answer(t: torch.Tensor) -> Any:
    """True for a question that transformers asks of a mask; NotImplemented for others."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == _MODULE:
            return True if t.dtype == torch.bool else NotImplemented
        frame = frame.f_back  # type: ignore[assignment]
    return NotImplemented
