"""Who asks: `torch.distributed.checkpoint.state_dict` (`get_model_state_dict` and its like) or anybody else.

Those functions know DTensors and FSDP1 by their types, take every other tensor for a whole one, and offer no hook: a
LocalShard would come out of `full_state_dict=True` as it went in, one rank's piece in place of the parameter. They do
call `state_dict()` and `named_parameters()` of our modules, which look at the caller's frame and answer what was meant.
"""

from __future__ import annotations

import sys
from types import FrameType

from ..errors import StateError

_MODULE = "torch.distributed.checkpoint.state_dict"


def frame_of(function: str, start: FrameType | None) -> FrameType | None:
    """The innermost frame of that function of torch's module, from `start` outwards."""
    while start is not None:
        if start.f_code.co_name == function and start.f_globals.get("__name__") == _MODULE:
            return start
        start = start.f_back
    return None


def wants_whole_tensors() -> bool:
    """True inside `get_model_state_dict(..., full_state_dict=True)`, and its like."""
    if _MODULE not in sys.modules:  # nobody can have called it
        return False
    frame = frame_of("_get_model_state_dict", sys._getframe(1))
    return frame is not None and bool(frame.f_locals["info"].full_state_dict)


def check_optimizer_request(start: FrameType) -> None:
    """Called for every sharded module by `named_parameters(recurse=False)`, with the caller's frame.

    Raises StateError, on every rank, for what torch's functions would do wrongly with an optimizer of a sharded model.
    """
    if _MODULE not in sys.modules:
        return
    frame = frame_of("_verify_options", start)
    if frame is None or not frame.f_locals["optims"]:
        return
    asked = frame.f_back.f_code.co_name if frame.f_back is not None else ""
    options, model = frame.f_locals["options"], frame.f_locals["model"]
    if not hasattr(model, "_shardkit_step"):
        raise StateError(
            f"{asked}() got a {type(model).__name__} of which only a part is sharded by shardkit, and would take this "
            "rank's piece of the optimizer state for the whole. Use shardkit.save_checkpoint and load_checkpoint, or "
            "full_optim_state_dict; or pass the sharded module."
        )
    if asked.startswith("set_") and options is not None and options.full_state_dict:
        raise StateError(
            f"{asked}() with full_state_dict=True would give every rank the whole optimizer state in place of its "
            "piece. Use shardkit.load_full_optim_state_dict(model, optim, state), which takes the same dictionary."
        )
