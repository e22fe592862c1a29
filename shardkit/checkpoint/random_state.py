"""The state of the random number generators, as something that a checkpoint can save."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.distributed as dist


class RandomState:
    """Python's, NumPy's (where it has been imported) and torch's generators, on the host and the current accelerator.

    `save_checkpoint(path, model, rng=RandomState())` saves every rank's; `load_checkpoint(path, model,
    rng=RandomState())` puts them back. A rank that did not exist when the checkpoint was saved is seeded from the first
    rank's state and its own number, so that no two ranks draw the same numbers because of a resume.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rank": _rank(), "python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rank"] != _rank():
            generator = torch.Generator()
            generator.set_state(state["torch"].cpu())
            seed = int(torch.randint(2**31, (), generator=generator)) + _rank()
            random.seed(seed)
            torch.manual_seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed)
            return
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
