"""peft's adapters in a sharded model: which of its tensors they are, and what peft calls them in its files.

peft decides that, with the model's state dict in hand. It may ask the network about the base model, so that ranks could
get different answers: the first rank asks, for all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.nn as nn

from ..comm import Group
from ..local_shard import LocalShard
from .agreement import together
from .snapshot import clean

T = TypeVar("T")


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` is a `peft.PeftModel`. One of transformers' that was given adapters saves itself otherwise."""
    peft = sys.modules.get("peft")  # who has such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def trained_names(model: Any, state: Mapping[str, Any], group: Group) -> dict[str, str]:
    """{name in a file: name in `state`} of all that a frozen base model does not bring along: adapters, and whatever
    else is trained. The active adapter's are named as in peft's files, others as in the model.

    state: the model's state dict. Collective.
    """

    def names() -> dict[str, str]:
        active = model.active_adapter
        out = _names(model, state, active)[0]
        wanted = {key for name in model.peft_config if name != active for key in _names(model, state, name)[0].values()}
        trained = {clean(name) for name, param in model.named_parameters() if param.requires_grad}
        wanted |= {key for key in state if clean(key) in trained}
        known = {_identity(state[key]) for key in out.values()}
        return out | {clean(key): key for key in state if key in wanted and _identity(state[key]) not in known}

    return _from_first(model, group, "naming the adapters", names)


def needed_to_save(model: Any, state: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """The entries of `state`, the model's state dict, that `PeftModel.save_pretrained` reads. Collective."""

    def keys() -> list[str]:
        found = [_names(model, state, name) for name in model.peft_config]
        if not all(complete for _, complete in found):
            return [*state]
        return list(dict.fromkeys(key for names, _ in found for key in names.values()))

    return {key: state[key] for key in _from_first(model, group, "choosing what to save of the adapters", keys)}


@contextlib.contextmanager
def prompts_at_hand(model: Any) -> Iterator[None]:
    """While one rank alone saves: peft takes a learned prompt not from the state dict but out of its encoder, which is
    sharded and runs on all ranks or none. Collective at entry, where the model has one; nothing for other models."""
    configs = model.peft_config.items() if has_adapters(model) else ()
    names = [name for name, config in configs if config.is_prompt_learning and not config.inference_mode]
    if not names or "get_prompt_embedding_to_save" in vars(model):
        yield
        return
    with torch.no_grad():
        prompts = {name: model.get_prompt_embedding_to_save(name) for name in names}
    model.get_prompt_embedding_to_save = lambda adapter_name: prompts[adapter_name]
    try:
        yield
    finally:
        del model.get_prompt_embedding_to_save


def _names(model: Any, state: Mapping[str, Any], adapter: str) -> tuple[dict[str, str], bool]:
    """{peft's name: name in `state`} of one adapter's tensors, and whether peft's files are made of these alone."""
    from peft import get_peft_model_state_dict

    keys = {_identity(value): key for key, value in state.items()}
    found = get_peft_model_state_dict(model, state, adapter_name=adapter)
    names = {}
    if model.peft_config[adapter].is_prompt_learning:
        found.pop("prompt_embeddings", None)
        names = {clean(key): key for key in state if clean(key).startswith(f"prompt_encoder.{adapter}.")}
    taken = {name: keys[_identity(value)] for name, value in found.items() if _identity(value) in keys}
    return names | taken, len(taken) == len(found)


def _identity(value: Any) -> Any:
    return value.shard_info if isinstance(value, LocalShard) else id(value)


def _from_first(model: nn.Module, group: Group, doing: str, action: Callable[[], T]) -> T:
    with prompts_at_hand(model):
        return group.all_gather_object(together(group, doing, lambda: action() if group.rank == 0 else None))[0]
