"""`ShardkitPlugin`: what Accelerate's FSDP settings, in either vocabulary, mean to shardkit.

Accelerate fills one plugin from its YAML (by way of `FSDP_*` variables), from `TrainingArguments`, or from a script.
Whoever asked for shardkit gets that object as a ShardkitPlugin. Accelerate, Trainer, peft and TRL read it as settings
of FSDP version 2, in torch's types; shardkit reads `wrap_options` and `units(model)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from ..config import STRATEGIES, ActivationCheckpointing, CPUOffload, MixedPrecision, Options
from ..errors import ConfigError
from ..integrations._common import keep_dtype
from ..wrap import Policy, from_torch_policy, size_policy

WORD = "shardkit"  # the FSDP version to ask for
OPTIONS_VARIABLE = "SHARDKIT_OPTIONS"

_STOCK_FIELDS = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
# Ours alone; others are FSDP's fields, which also take shardkit's values, or are set by Accelerate itself.
_OWN = ({*Options.__dataclass_fields__} - _STOCK_FIELDS - {"device_id"}) | {"policy", "no_sync", "process_group"}
_SHARED = {
    "sharding_strategy", "reshard_after_forward", "cpu_offload", "activation_checkpointing", "backward_prefetch",
    "forward_prefetch", "sync_module_states",
}  # fmt: skip


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Asked(str):
    """The word, with shardkit's own options, where only a version can be passed on."""

    options: dict[str, Any]

    def __new__(cls, options: dict[str, Any]):
        self = super().__new__(cls, WORD)
        self.options = options
        return self

    def __getnewargs__(self):
        return (self.options,)


_passed: dict[str, Any] = {}


@contextlib.contextmanager
def passing(settings: dict[str, Any]) -> Iterator[None]:
    """While stock code makes a plugin of nothing but the environment: what that cannot carry, by the names of fields
    and of shardkit's options."""
    _passed.update(settings)
    try:
        yield
    finally:
        _passed.clear()


def is_the_word(version: Any) -> bool:
    return str(version).strip().lower() == WORD


class ShardkitPlugin(FullyShardedDataParallelPlugin):
    """Accelerate's FSDP plugin for shardkit: `Accelerator(fsdp_plugin=ShardkitPlugin(sharding_strategy="zero2"))`.

    Takes the fields of `accelerate.FullyShardedDataParallelPlugin`, and the options of `shardkit.auto_wrap`. Where both
    have a name (`sharding_strategy`, `cpu_offload`, `activation_checkpointing`, ...), values of either are understood.
    Options that a YAML has no field for can also be given as JSON in the variable SHARDKIT_OPTIONS.

    policy: units, as in `auto_wrap`. None: what `auto_wrap_policy` says, or "auto" where nobody said anything.
    no_sync: True keeps whole gradients between the micro-batches of `accelerator.accumulate` and of the Trainer, and
        sends them once: fewer messages, and a whole model's gradients in memory. False reduces each micro-batch.

    Raises ConfigError for an unknown option, or one that Accelerate sets (`device_id`).
    """

    # Accelerate declares these for its own values; here they pass through everybody's.
    fsdp_version: Any
    backward_prefetch: Any
    sync_module_states: Any
    mixed_precision_policy: Any
    reshard_after_forward: Any
    cpu_offload: Any
    activation_checkpointing: Any
    state_dict_type: Any
    ignored_modules: Any

    wrap_options: dict[str, Any]
    """Arguments of `shardkit.auto_wrap` that are the same for every model."""
    no_sync: bool
    saves_for_peft = False
    """While the Trainer collects what `PeftModel.save_pretrained` reads: the frozen base model is not gathered."""

    def __init__(self, **given: Any):
        from .table import table

        table.install("accelerate")
        self._given = {name: given.pop(name) for name in [*given] if name not in _STOCK_FIELDS}
        self._given |= {name: given.pop(name) for name in [*given] if name in _SHARED and _is_ours(name, given[name])}
        if isinstance(given.get("mixed_precision_policy"), MixedPrecision):
            self._given["mixed_precision"] = given.pop("mixed_precision_policy")
        super().__init__(**given)

    # ------------------------------------------------------------------------------------ from both vocabularies

    def take_request(self) -> None:
        """Reads the fields and variables before Accelerate does, keeps what shardkit makes of them, and leaves in the
        fields what Accelerate accepts for version 2."""
        for name in _STOCK_FIELDS & _passed.keys():
            setattr(self, name, _passed[name])
        passed = {name: value for name, value in _passed.items() if name not in _STOCK_FIELDS}
        passed |= getattr(self.fsdp_version, "options", {})
        given = {**_from_environment(), **passed, **self.__dict__.get("_given", {})}
        unknown = sorted(set(given) - _OWN - _SHARED)
        if unknown:
            known = ", ".join(sorted(_OWN | _SHARED))
            raise ConfigError(f"shardkit has no option {', '.join(unknown)} to set in Accelerate. It has: {known}.")
        self.fsdp_version = 2
        self.no_sync = bool(given.pop("no_sync", False))
        self._policy = given.pop("policy", None)
        self._wrap_policy = _field(self.auto_wrap_policy, "AUTO_WRAP_POLICY")
        self._classes = _field(self.transformer_cls_names_to_wrap, "TRANSFORMER_CLS_TO_WRAP")
        self._precision_is_accelerates = False
        options: dict[str, Any] = {}
        options |= self._strategy(given)
        options |= self._offload(given)
        options |= self._checkpointing(given)
        prefetch = given.pop("backward_prefetch", None)
        if prefetch is None:
            prefetch = _field(self.backward_prefetch, "BACKWARD_PREFETCH")
        if prefetch is False or str(prefetch).upper() == "NO_PREFETCH":
            options["backward_prefetch"] = False
        sync = _flag(_field(self.sync_module_states, "SYNC_MODULE_STATES"), default=None)
        options["sync_module_states"] = sync is not False
        if _flag(_field(self.cpu_ram_efficient_loading, "CPU_RAM_EFFICIENT_LOADING"), default=False):
            options["sync_module_states"] = "differing"  # what all ranks have read from the same files needs no sending
        if self.param_init_fn is not None:
            options["param_init_fn"] = self.param_init_fn
        policy = self.mixed_precision_policy
        if isinstance(policy, str) and policy in _DTYPES:  # 16 bits throughout, as Accelerate means it
            policy = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), _DTYPES[policy])
        if policy is not None and "mixed_precision" not in given:
            given["mixed_precision"] = policy
            self.mixed_precision_policy = None
        if given.get("mixed_precision") is not None:
            given["mixed_precision"] = _precision(given["mixed_precision"])
        self.ignored_modules = _field(self.ignored_modules, "IGNORED_MODULES")  # older releases do not read it
        self.wrap_options = options | given
        # Version 2 has no word for these, or other values.
        self.sharding_strategy = self.use_orig_params = self.sync_module_states = self.forward_prefetch = None
        self.backward_prefetch = "NO_PREFETCH"

    def _strategy(self, given: dict[str, Any]) -> dict[str, Any]:
        strategy = _strategy_of(given.pop("sharding_strategy", None))
        reshard = given.pop("reshard_after_forward", None)
        if strategy is None:
            asked = self.sharding_strategy or os.environ.get("FSDP_SHARDING_STRATEGY")
            strategy = _strategy_of(None if asked in ("", "None") else asked)  # "none" is a strategy
        stock = _strategy_of(_field(self.reshard_after_forward, "RESHARD_AFTER_FORWARD"))
        if isinstance(reshard, str):
            stock, reshard = _strategy_of(reshard), None
        if isinstance(stock, str) and strategy in (None, "FULL_SHARD"):  # the newer field of version 1, same values
            strategy, stock = stock, None
        out: dict[str, Any] = {"sharding_strategy": strategy or "FULL_SHARD"}
        if reshard is not None:
            out["reshard_after_forward"] = reshard
        elif stock is False:  # True is the launcher's default, and says nothing
            out["reshard_after_forward"] = False
        drops = out["sharding_strategy"] in ("FULL_SHARD", "HYBRID_SHARD", "full", "hybrid")
        self.reshard_after_forward = bool(out.get("reshard_after_forward", drops))
        return out

    def _offload(self, given: dict[str, Any]) -> dict[str, Any]:
        value = given.pop("cpu_offload", None)
        if value is None:
            value = _field(self.cpu_offload, "OFFLOAD_PARAMS")
        if isinstance(value, str):
            value = _flag(value)
        if value is not None and not isinstance(value, (bool, CPUOffload)):  # torch's, of version 1 or 2
            value = getattr(value, "offload_params", type(value).__name__ == "CPUOffloadPolicy")
        self.cpu_offload = bool(value)
        return {"cpu_offload": CPUOffload() if value is True else value or None}

    def _checkpointing(self, given: dict[str, Any]) -> dict[str, Any]:
        value = given.pop("activation_checkpointing", None)
        if value is None:
            value = _flag(_field(self.activation_checkpointing, "ACTIVATION_CHECKPOINTING"), default=False)
        offload = getattr(self, "activation_checkpointing_offload", None)
        offload = _flag(_field(offload, "ACTIVATION_CHECKPOINTING_OFFLOAD"), default=False)
        if value is True and offload:
            value = ActivationCheckpointing(offload_to_cpu=True)
        self.activation_checkpointing = bool(value)
        return {"activation_checkpointing": value or None}

    # ----------------------------------------------------------------------------------- what Accelerate calls

    def set_mixed_precision(self, mixed_precision, buffer_autocast=False, override=False):
        if self.mixed_precision_policy is None and not override:
            self._precision_is_accelerates = True
        super().set_mixed_precision(mixed_precision, buffer_autocast, override)

    def set_state_dict_type(self, state_dict_type=None):
        if state_dict_type is None and self.state_dict_type is None:
            self.state_dict_type = os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
        asked = str(state_dict_type or self.state_dict_type).upper()
        if asked.endswith("LOCAL_STATE_DICT") or asked == "2":  # its number in torch
            raise ConfigError(
                "LOCAL_STATE_DICT can only be loaded with the same wrapping on as many ranks. Use SHARDED_STATE_DICT, "
                "which writes the same bytes and loads anywhere."
            )
        self.state_dict_config = self.optim_state_dict_config = None  # those of the type before
        with self.as_version_1():  # some releases refuse FULL_STATE_DICT for version 2
            super().set_state_dict_type(state_dict_type)

    @contextlib.contextmanager
    def as_version_1(self) -> Iterator[None]:
        """While stock code runs whose steps for version 1 fit: one object at a time, nothing replaced."""
        before, self.fsdp_version = self.fsdp_version, 1
        try:
            yield
        finally:
            self.fsdp_version = before

    # -------------------------------------------------------------------------------------- for one model

    def units(self, model: nn.Module) -> Policy:
        """The policy of `shardkit.auto_wrap` for this model."""
        if self._policy is not None:
            return self._policy
        asked = self._wrap_policy
        if callable(asked):
            return from_torch_policy(asked)
        name = str(asked).upper() if asked is not None else ""
        if name == "NO_WRAP":
            return None
        if name == "SIZE_BASED_WRAP":
            return size_policy(self.min_num_params) if self.min_num_params else "auto"
        return _classes_named(model, self._classes) if self._classes else "auto"

    def options_for(self, model: nn.Module, device: torch.device, precision: str) -> dict[str, Any]:
        """All options of `shardkit.auto_wrap` for this model. `precision`: Accelerate's `mixed_precision`."""
        options = dict(self.wrap_options)
        options["device_id"] = device
        recompute = _flag(self.activation_checkpointing)  # Trainer sets the field of a plugin that is there already
        if bool(recompute) != bool(options["activation_checkpointing"]):
            options["activation_checkpointing"] = recompute or None
        mixed = options.get("mixed_precision")
        if mixed is None and precision == "fp16" and device.type == "cpu":
            said = "mixed_precision='fp16' has no effect on CPU ranks, as in Accelerate: training in float32."
            warnings.warn(said, stacklevel=2)
        elif mixed is None and self.mixed_precision_policy is not None:
            mixed = _precision(self.mixed_precision_policy, only_compute=self._precision_is_accelerates)
        if mixed is None or mixed.param_dtype is None:
            mixed = keep_dtype(model, mixed)  # without mixed precision, a 16-bit model trains in 16 bits, as elsewhere
        options["mixed_precision"] = mixed
        ignored = self.ignored_modules
        if isinstance(ignored, str):
            pattern = re.compile(ignored)
            ignored = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        for module in ignored or ():
            module.to(device)
        if ignored:
            options["ignored_modules"] = list(ignored)
        return options


def _is_ours(name: str, value: Any) -> bool:
    """Whether a value of a field that both have is one that Accelerate would not understand, or not in this way."""
    if name in ("backward_prefetch", "forward_prefetch"):
        return isinstance(value, bool)
    if name == "reshard_after_forward":
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str):
        return value in STRATEGIES if name == "sharding_strategy" else value == "differing"
    return isinstance(value, (CPUOffload, ActivationCheckpointing, float)) or (
        not isinstance(value, (bool, int)) and callable(value) or isinstance(value, (set, frozenset))
    )


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(OPTIONS_VARIABLE)
    if not text:
        return {}
    try:
        options = json.loads(text)
        if not isinstance(options, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        example = '{"sharding_strategy": "zero2"}'
        raise ConfigError(f"{OPTIONS_VARIABLE} must hold JSON such as {example}: {error}") from None
    return options


def _field(value: Any, variable: str) -> Any:
    """A plugin field, or the variable that the launcher exports in its place. Texts without a value are None."""
    value = os.environ.get(f"FSDP_{variable}") if value is None else value
    return None if value in ("", "None", "none") else value


def _flag(value: Any, default: Any = False) -> Any:
    if value is None:
        return default
    if isinstance(value, str):
        return value.strip().lower() in ("1", "true", "yes", "on", "y", "t")
    return value


def _strategy_of(value: Any) -> str | bool | None:
    """A sharding strategy's name, or whether to reshard after forward, from any spelling of either."""
    value = getattr(value, "name", value)
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in STRATEGIES:
            return text.lower()
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text.upper() == "NO_RESHARD":  # so the launcher's help
            return False
        value = int(text) if text.isdigit() else text.upper().lstrip("_")
        if isinstance(value, str) and value not in FSDP_SHARDING_STRATEGY:
            known = ", ".join([*FSDP_SHARDING_STRATEGY, *STRATEGIES])
            raise ConfigError(f"sharding strategy {text!r} is not known. Use one of {known}.")
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= len(FSDP_SHARDING_STRATEGY):
            raise ConfigError(f"sharding strategy {value} is not known: 1 to {len(FSDP_SHARDING_STRATEGY)}.")
        value = FSDP_SHARDING_STRATEGY[value - 1]
    return "_HYBRID_SHARD_ZERO2" if value == "HYBRID_SHARD_ZERO2" else value


def _precision(policy: Any, only_compute: bool = False) -> MixedPrecision:
    """shardkit's MixedPrecision for a policy object or dictionary of torch's FSDP. `only_compute`: nobody asked for
    16-bit reductions or outputs; Accelerate sets them for version 2 because it has no other switch."""
    if isinstance(policy, MixedPrecision):
        return policy
    if isinstance(policy, str):
        if policy not in _DTYPES:
            raise ConfigError(f"mixed_precision={policy!r} is not known. Use one of {', '.join(_DTYPES)}.")
        return MixedPrecision(param_dtype=_DTYPES[policy])
    read = policy.get if isinstance(policy, dict) else lambda name: getattr(policy, name, None)
    if only_compute:
        return MixedPrecision(param_dtype=read("param_dtype"))
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs")
    values: dict[str, Any] = {name: read(name) for name in names if read(name) is not None}
    # JSON has names of dtypes.
    return MixedPrecision(**{k: getattr(torch, v) if isinstance(v, str) else v for k, v in values.items()})


def _classes_named(model: nn.Module, names: Any) -> set[type[nn.Module]]:
    wanted = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    there = {type(module).__name__: type(module) for module in model.modules()}
    found = {there[name] for name in wanted if name in there}  # of several models, each has some of them
    if not found:
        raise ConfigError(
            f"fsdp_transformer_layer_cls_to_wrap names {', '.join(wanted)}, and {type(model).__name__} has no such "
            f"modules. It has: {', '.join(sorted(there))}. Leave the line out to let shardkit find the blocks."
        )
    return found
