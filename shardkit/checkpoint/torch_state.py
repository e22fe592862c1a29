"""The optimizer state that `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` hands out."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
import torch.nn as nn

from ..errors import ConfigError
from ..local_shard import LocalShard
from ..runtime.asked import frame_of
from ..runtime.flat_param import home_of
from .optimizer import _is_local, full_optim_state_dict, parameter_names


def answer_optimizer_request(model: nn.Module, start: FrameType) -> None:
    """Called by `named_parameters()` of a sharded root, with the caller's frame.

    torch's function has just called `optimizer.state_dict()`, whose tensors are plain: they become LocalShards, or
    whole tensors where `full_state_dict=True` asks for those (then collective over the model's shard groups).
    """
    if start.f_code.co_name != "_get_optim_state_dict" or frame_of("_get_optim_state_dict", start) is not start:
        return
    state, optim, info = (start.f_locals.get(name) for name in ("osd", "optim", "info"))
    if not state or not isinstance(optim, torch.optim.Optimizer):
        return
    params = [p for group in optim.param_groups for p in group["params"]]
    whole: dict[str, Any] | None = None
    if info.full_state_dict:  # type: ignore[union-attr]
        whole, names = full_optim_state_dict(model, optim)["state"], parameter_names(model)
    for number, param in enumerate(params):
        values = state["state"].get(number)
        if values is None:
            continue
        # A new dictionary: the one that is there is the optimizer's own.
        state["state"][number] = whole[names[param]] if whole is not None else _as_pieces(param, values, optim)


def _as_pieces(param: nn.Parameter, values: dict[str, Any], optim: torch.optim.Optimizer) -> dict[str, Any]:
    home = home_of(param)
    if home is None:
        return values
    flat, index = home
    out = {}
    for key, value in values.items():
        sized = isinstance(value, torch.Tensor) and value.dim() > 0
        if sized and not _is_local(value, flat, index):
            raise ConfigError(
                f"{type(optim).__name__} keeps {key!r} of shape {tuple(value.shape)} for {flat.names[index]}, which is "
                "no piece of a whole. Save it with shardkit.save_checkpoint, for the same number of ranks."
            )
        local = value.to_local() if isinstance(value, LocalShard) else value
        out[key] = LocalShard.wrap(local, flat.infos[index]) if sized else value
    return out
