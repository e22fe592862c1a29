"""The arguments of fairscale's FullyShardedDataParallel, in shardkit's terms."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
import torch.nn as nn

from ..config import MixedPrecision
from ..errors import ConfigError
from ..runtime.precision import map_tensors
from ._common import keep_dtype, say


class ProcessGroupName(str, enum.Enum):
    default = "default"
    reduce_scatter = "reduce_scatter"


@dataclasses.dataclass(frozen=True)
class Settings:
    """fairscale's arguments that matter after wrapping."""

    no_broadcast_optim_state: bool
    state_dict_to_cpu: bool
    state_dict_on_rank_0_only: bool
    allow_reset_parameters: bool
    verbose: bool
    arguments: dict[str, Any]
    trained: tuple[bool, ...]
    """For each flat parameter of the unit, whether it was trainable when the unit was made."""


def after_wrapping(given: dict[str, Any]) -> dict[str, Any]:
    device = given["state_dict_device"]
    kept = {k: given[k] for k in ("state_dict_on_rank_0_only", "allow_reset_parameters", "verbose")}
    return {**kept, "state_dict_to_cpu": device is not None and torch.device(device).type == "cpu"}


def raise_inputs(module: nn.Module, args: tuple, kwargs: dict):
    """A forward hook that turns float16 inputs into float32."""
    def change(t: torch.Tensor) -> torch.Tensor:
        return t.float() if t.dtype == torch.float16 else t

    return map_tensors(args, change), map_tensors(kwargs, change)


def translate(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    if given["fp32_reduce_scatter"] and not given["mixed_precision"]:
        raise ConfigError("fp32_reduce_scatter requires mixed_precision=True.")
    mp = None
    if given["mixed_precision"]:
        dtype = given["compute_dtype"] or torch.float16
        mp = MixedPrecision(
            param_dtype=dtype,
            reduce_dtype=torch.float32 if given["fp32_reduce_scatter"] else dtype,
            buffer_dtype=given["buffer_dtype"] or dtype,
            master_dtype=torch.float32,
        )
    elif given["buffer_dtype"] is not None:
        mp = MixedPrecision(buffer_dtype=given["buffer_dtype"])
    return {
        "sharding_strategy": "full",
        "mixed_precision": mp if given["mixed_precision"] else keep_dtype(module, mp),
        "cpu_offload": given["move_params_to_cpu"] or given["cpu_offload"],
        "device_id": given["compute_device"],
    }


def explain(given: dict[str, Any]) -> None:
    """Warns of arguments that were given and have no effect."""
    offload = given["move_params_to_cpu"] or given["cpu_offload"]
    if not isinstance(given["process_group_reduce_scatter"], (str, type(None))):
        say("process_group_reduce_scatter has no effect: reductions overlap with gathers on the one process group.")
    if not given["disable_reshard_on_root"]:
        say("disable_reshard_on_root=False has no effect: backward begins with the root, whose parameters are kept.")
    if given["move_grads_to_cpu"] is not None and given["move_grads_to_cpu"] != offload:
        say("move_grads_to_cpu has no effect: a gradient lies where the shard lies that it updates.")
    if given["bucket_cap_mb"] not in (25, 0):
        say("bucket_cap_mb has no effect: the small gradients of a unit always travel together.")
    if given["clear_autocast_cache"]:
        say("clear_autocast_cache has no effect: autocast caches casts of leaf tensors, which full parameters are not.")
    if given["gradient_predivide_factor"] is not None:
        say(
            "gradient_predivide_factor has no effect: 16-bit gradients are summed in float32 on gloo, and NCCL divides "
            "before it adds. set_gradient_divide_factors() sets the total."
        )
