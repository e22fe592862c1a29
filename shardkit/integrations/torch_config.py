"""FSDP1's enumerations and settings, and what they are in shardkit's terms.

Objects of `torch.distributed.fsdp` of the same names are taken as well: enumerations are compared by name, settings
are read by attribute.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from .. import config
from ..errors import ConfigError
from ._common import PerUnit, keep_dtype, say


class ShardingStrategy(enum.Enum):
    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(enum.Enum):
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class StateDictType(enum.Enum):
    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


class OptimStateKeyType(enum.Enum):
    PARAM_NAME = enum.auto()
    PARAM_ID = enum.auto()


@dataclasses.dataclass
class MixedPrecision:
    """As FSDP1's: None leaves a dtype as it is, except that gradients are reduced in `param_dtype`."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)


@dataclasses.dataclass
class CPUOffload:
    offload_params: bool = False


@dataclasses.dataclass
class StateDictConfig:
    offload_to_cpu: bool = False


@dataclasses.dataclass
class FullStateDictConfig(StateDictConfig):
    rank0_only: bool = False


@dataclasses.dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclasses.dataclass
class ShardedStateDictConfig(StateDictConfig):
    _use_dtensor: bool = False


@dataclasses.dataclass
class OptimStateDictConfig:
    offload_to_cpu: bool = True


@dataclasses.dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    rank0_only: bool = False


@dataclasses.dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


@dataclasses.dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    _use_dtensor: bool = False


@dataclasses.dataclass
class StateDictSettings:
    state_dict_type: StateDictType
    state_dict_config: Any
    optim_state_dict_config: Any


_CONFIGS: dict[str, tuple[type, type]] = {
    "FULL_STATE_DICT": (FullStateDictConfig, FullOptimStateDictConfig),
    "LOCAL_STATE_DICT": (LocalStateDictConfig, LocalOptimStateDictConfig),
    "SHARDED_STATE_DICT": (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings(state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None):
    """Complete `StateDictSettings`. Raises ConfigError for configurations of another type of state dict."""
    name = getattr(state_dict_type, "name", state_dict_type)
    if name not in _CONFIGS:
        raise ConfigError(f"state_dict_type={state_dict_type!r}: expected a StateDictType.")
    given = (state_dict_config, optim_state_dict_config)
    for value, kind in zip(given, _CONFIGS[name], strict=True):
        if value is not None and type(value).__name__ != kind.__name__:
            raise ConfigError(f"{name} takes a {kind.__name__}, got a {type(value).__name__}.")
    chosen = [kind() if value is None else value for value, kind in zip(given, _CONFIGS[name], strict=True)]
    return StateDictSettings(StateDictType[name], *chosen)


def translate(module: nn.Module, given: dict[str, Any]) -> tuple[dict[str, Any], PerUnit]:
    """FSDP1's arguments (`given`, by name) as options of shardkit, and those that belong to this unit alone."""
    strategy = given["sharding_strategy"]
    name = getattr(strategy, "name", strategy) or "FULL_SHARD"
    offload, mp = given["cpu_offload"], given["mixed_precision"]
    options = {
        "sharding_strategy": name,
        "device_mesh": given["device_mesh"],
        "ignored_modules": given["ignored_modules"],
        "ignored_states": given["ignored_states"],
        "param_init_fn": given["param_init_fn"],
        "device_id": given["device_id"],
        "sync_module_states": given["sync_module_states"],
        "cpu_offload": bool(offload is not None and offload.offload_params),
        "mixed_precision": keep_dtype(module, _mixed_precision(mp)),
        "backward_prefetch": getattr(given["backward_prefetch"], "name", None) == "BACKWARD_PRE",
    }
    if getattr(given["backward_prefetch"], "name", None) == "BACKWARD_POST":
        say(
            "BackwardPrefetch.BACKWARD_POST gathers a unit when backward reaches it: the peak of memory is that of "
            "BACKWARD_POST, without its overlap. BACKWARD_PRE overlaps."
        )
    if not given["limit_all_gathers"]:
        say("limit_all_gathers=False has no effect: at most one unit is gathered ahead, and nothing waits for that.")
    drops = name in ("FULL_SHARD", "HYBRID_SHARD")
    if mp is None:
        return options, PerUnit(drop_after_forward=drops)
    return options, PerUnit(drops, mp.cast_forward_inputs, mp.cast_root_forward_inputs)


def _mixed_precision(mp: Any) -> config.MixedPrecision | None:
    if mp is None:
        return None
    if isinstance(mp, config.MixedPrecision):
        raise ConfigError("mixed_precision is shardkit's MixedPrecision. Use that of shardkit.integrations.torch_fsdp.")
    if mp.keep_low_precision_grads:
        say("keep_low_precision_grads has no effect: gradients have the dtype of the shards that they update.")
    exempt = [c for c in mp._module_classes_to_ignore if not issubclass(c, nn.modules.batchnorm._BatchNorm)]
    return config.MixedPrecision(
        param_dtype=mp.param_dtype,
        reduce_dtype=mp.reduce_dtype if mp.reduce_dtype is not None else mp.param_dtype,
        buffer_dtype=mp.buffer_dtype,
        keep_fp32=tuple(exempt),
        cast_forward_inputs=mp.cast_forward_inputs or mp.cast_root_forward_inputs,
    )
