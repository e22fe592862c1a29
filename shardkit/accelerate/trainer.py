"""What runs in place of two methods of transformers' Trainer and one function of TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..checkpoint.adapters import prompts_at_hand
from ..runtime.flat_param import home_of
from .plugin import _OWN, _SHARED, Asked, _strategy_of, is_the_word
from .preparing import inner, is_ours, is_sharded, plugin_of, shard


def names_shardkit(arguments: Any) -> bool:
    """Whether `TrainingArguments(fsdp=True, fsdp_config={"version": "shardkit"})`, or a file of that, was given."""
    config = arguments.fsdp_config
    if isinstance(config, str):
        config = json.loads(Path(config).read_text("utf-8"))
    return bool(arguments.fsdp) and any(is_the_word((config or {}).get(key)) for key in ("version", "fsdp_version"))


def process_fsdp_args(stock, self) -> dict[str, Any] | None:
    """Translates `fsdp_config` with the version that stock understands; shardkit's own options travel with the word."""
    if isinstance(self.fsdp_config, str):
        self.fsdp_config = json.loads(Path(self.fsdp_config).read_text("utf-8"))
    given = {key.removeprefix("fsdp_"): value for key, value in self.fsdp_config.items()}
    own = {key: given.pop(key) for key in [*given] if key in _OWN}
    # Values that only the other vocabulary has, or shardkit alone.
    for key in _SHARED & given.keys():
        translated = _strategy_of(given[key]) if key in ("sharding_strategy", "reshard_after_forward") else given[key]
        if not isinstance(translated, bool) and str(translated).lower() not in ("true", "false"):
            own[key] = given.pop(key)
    self.fsdp_config = {**given, "version": 2}
    try:
        plugin_args = stock(self)
    finally:
        self.fsdp_config = {**self.fsdp_config, **own, "version": "shardkit"}
    return {**plugin_args, "fsdp_version": Asked(own)}


def trains_with_shardkit(trainer: Any, *args: Any, **kwargs: Any) -> bool:
    return is_ours(trainer.accelerator) and is_sharded(trainer.model)


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
    whole = [(name, _whole(param)) for name, param in self.named_parameters()]
    self.__dict__["named_parameters"] = lambda: iter(whole)
    try:
        return stock(self, *args, **kwargs)
    finally:
        del self.__dict__["named_parameters"]


def _whole(param: nn.Parameter) -> torch.Tensor:
    """A tensor without memory, of a parameter's size before it was sharded."""
    home = home_of(param)
    if home is None:
        return param
    flat, index = home
    shape = flat.infos[index].shape
    return torch.empty(shape, dtype=param.dtype, device="meta", requires_grad=param.requires_grad)


def is_for_shardkit(model: nn.Module, accelerator: Any, *args: Any, **kwargs: Any) -> bool:
    return is_ours(accelerator)


def prepare_fsdp(stock, model, accelerator) -> nn.Module:
    """TRL's reference models are sharded like the model that is trained."""
    shard(model, accelerator)
    model.eval()
    return model
