"""What runs in place of methods of transformers' Trainer, its arguments and its models, and of a function of TRL."""

from __future__ import annotations

import json
import warnings
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn as nn
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from ..checkpoint.adapters import prompts_at_hand
from ..runtime.flat_param import home_of
from . import table
from .plugin import _OWN, _STOCK_FIELDS, WORD, Asked, is_the_word, passing
from .preparing import inner, is_ours, is_sharded, plugin_of, shard

_STRATEGIES = {name.lower() for name in FSDP_SHARDING_STRATEGY}
# Of the fields of Accelerate's plugin, those that the Trainer's settings for version 2 have too. Others it leaves out.
_IN_VERSION_2 = {
    "auto_wrap_policy", "min_num_params", "cpu_ram_efficient_loading", "state_dict_type", "fsdp_version",
    "transformer_cls_names_to_wrap",
}  # fmt: skip
_TRAINERS_OWN = {
    "version", "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings",
}  # fmt: skip


def names_shardkit(arguments: Any) -> bool:
    """Whether `TrainingArguments(fsdp=True, fsdp_config={"version": "shardkit"})`, or a file of that, was given; or
    everything is to be shardkit, whatever its version."""
    return bool(arguments.fsdp) and (table._always or is_the_word(_config(arguments).get("version")))


def _config(arguments: Any) -> dict[str, Any]:
    config = arguments.fsdp_config
    if isinstance(config, str):
        config = json.loads(Path(config).read_text("utf-8"))
    return {key.removeprefix("fsdp_"): value for key, value in (config or {}).items()}


def process_fsdp_args(stock, self) -> dict[str, Any] | None:
    """Has stock translate what it knows of version 2. Fields of the plugin that it would refuse or leave out, of
    either vocabulary, are passed on as they are; shardkit's own options travel with the word."""
    given = _config(self)
    own = {key: value for key, value in given.items() if key in _OWN}
    if isinstance(given.get("backward_prefetch"), bool):
        own["backward_prefetch"] = given["backward_prefetch"]  # FSDP has names of times instead
    fields = {key: given[key] for key in _STOCK_FIELDS - _IN_VERSION_2 if key in given and key not in own}
    _warn_of_unknown(given)
    if isinstance(self.fsdp, (str, list)):
        words = self.fsdp.split() if isinstance(self.fsdp, str) else self.fsdp
        strategies = [word for word in words if word.lower() in _STRATEGIES]
        if strategies and not {"sharding_strategy", "reshard_after_forward"} & given.keys():
            fields["sharding_strategy"] = strategies[-1].upper()
        self.fsdp = [word for word in words if word not in strategies] or True
    self.fsdp_config = {key: value for key, value in given.items() if key not in own and key not in fields}
    self.fsdp_config["version"] = 2
    try:
        plugin_args = stock(self)
    finally:
        self.fsdp_config = {**self.fsdp_config, **given, **fields}
        if "version" not in given:
            del self.fsdp_config["version"]
    return plugin_args if plugin_args is None else {**plugin_args, **fields, "fsdp_version": Asked(own)}


def _warn_of_unknown(given: dict[str, Any]) -> None:
    unknown = sorted(given.keys() - _OWN - _STOCK_FIELDS - _TRAINERS_OWN)
    if unknown:
        said = f"fsdp_config has {', '.join(unknown)}, which neither the Trainer nor shardkit reads."
        warnings.warn(said, stacklevel=3)


def makes_a_plugin(trainer: Any) -> bool:
    return names_shardkit(trainer.args)


def create_accelerator(stock, self) -> None:
    """Before transformers 5, `fsdp_config` has no version and reaches Accelerate through the environment, in parts."""
    given = _config(self.args)
    _warn_of_unknown(given)
    classes = given.pop("transformer_layer_cls_to_wrap", None)
    settings = {key: value for key, value in given.items() if key in _OWN or key in _STOCK_FIELDS}
    if classes:
        settings["transformer_cls_names_to_wrap"] = [classes] if isinstance(classes, str) else list(classes)
    settings.setdefault("backward_prefetch", "BACKWARD_PRE")  # the environment has NO_PREFETCH where nobody says a word
    with passing({**settings, "fsdp_version": WORD}):
        stock(self)


def trains_with_shardkit(trainer: Any, *args: Any, **kwargs: Any) -> bool:
    return is_ours(trainer.accelerator)


def evaluation_loop(stock, self, *args, **kwargs):
    """Shards before the first evaluation, as stock does unless the model is to be compiled: that one it prepares to be
    evaluated only, and a later train() takes it for prepared."""
    if self.args.torch_compile and not is_sharded(self.model):
        self.model = self.model_wrapped = self.accelerator.prepare(self.model)
    return stock(self, *args, **kwargs)


def save_model(stock, self, output_dir=None, _internal_call=False) -> None:
    """Always writes a model that `from_pretrained` loads, whatever the state dict type; except within a checkpoint of
    sharded state, which has the weights already. Its folder is there on all ranks when this returns."""
    plugin = plugin_of(self.accelerator)
    assert plugin is not None
    folder = Path(output_dir if output_dir is not None else self.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    if _internal_call and plugin.state_dict_type.name == "SHARDED_STATE_DICT":
        return
    chosen = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")
    plugin.saves_for_peft = True
    try:
        with prompts_at_hand(inner(self.model)):
            stock(self, output_dir, _internal_call)
    finally:
        plugin.set_state_dict_type(chosen)
        plugin.saves_for_peft = False
    self.accelerator.wait_for_everyone()  # or another rank would look for files that the first is still writing


def is_a_sharded_model(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    return is_sharded(model)


def num_parameters(stock, self, *args, **kwargs) -> int:
    """Counts whole parameters: Trainer's `total_flos` and the index of a saved model's files have this number."""
    whole = [(name, _Whole.of(param)) for name, param in self.named_parameters()]
    self.__dict__["named_parameters"] = lambda *args, **kwargs: iter(whole)  # parameters() calls it, too
    try:
        return stock(self, *args, **kwargs)
    finally:
        del self.__dict__["named_parameters"]


class _Whole(NamedTuple):
    """What is asked of a parameter to count it. The Trainer counts in every step: tensors would take too long."""

    size: int
    requires_grad: bool

    def numel(self) -> int:
        return self.size

    @classmethod
    def of(cls, param: nn.Parameter) -> nn.Parameter | _Whole:
        home = home_of(param)
        return param if home is None else cls(prod(home[0].layout.shapes[home[1]]), param.requires_grad)


def is_for_shardkit(model: nn.Module, accelerator: Any, *args: Any, **kwargs: Any) -> bool:
    return is_ours(accelerator)


def prepare_fsdp(stock, model, accelerator) -> nn.Module:
    """TRL's reference models are sharded like the model that is trained."""
    shard(model, accelerator)
    model.eval()
    return model
