"""Optimizer state out of a checkpoint, under parameter names, into an optimizer over other pieces of the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from ..comm import Group
from ..errors import ConfigError
from ..local_shard import LocalShard
from ..runtime.flat_param import home_of
from .metadata import Checkpoint
from .optimizer import _check_known, _counters, parameter_names
from .save import RANK_STATE
from .snapshot import clean

PREFIXES = ("optim.", "optimizer.", "app.optim.", "app.optimizer.", "optimizer_state_dict.", "optim_state_dict.")


def load_optimizer(checkpoint: Checkpoint, model: nn.Module, optim: torch.optim.Optimizer, group: Group) -> None:
    """Reads this rank's part of the optimizer state and loads it. No communication; no step is taken.

    Raises ConfigError where the checkpoint has no optimizer state under parameter names, where a state fits neither a
    parameter nor a piece of it, and where a group's parameters were in saved groups with different options.
    """
    names = parameter_names(model)
    _check_known(optim, names)
    aliases = _aliases(model, names)
    prefix = _prefix(checkpoint)
    saved = _states(checkpoint, prefix, set(aliases))
    odd = _rank_state(checkpoint, group)
    examples = {name: {key: _example(checkpoint, full) for key, full in keys.items()} for name, keys in saved.items()}
    counters = _counters(examples, {name: param for param, name in names.items()} | aliases)
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for name, keys in saved.items():
        param = aliases[name]
        for key, full in keys.items():
            into = optim.state[param].get(key) if param in optim.state else None
            states.setdefault(param, {})[key] = _value(checkpoint, full, param, key in counters, into)
    for name, kept in odd.items():
        home = home_of(aliases[name]) if name in aliases else None
        if home is None or tuple(kept["piece"]) != home[0].infos[home[1]].piece:
            raise ConfigError(
                f"{type(optim).__name__} kept state for {name} that belongs to one rank's piece of it "
                f"({', '.join(k for k in kept if k != 'piece')}); it can be loaded on as many ranks, with the same "
                "wrapping, as it was saved on, and nowhere else."
            )
        states.setdefault(aliases[name], {}).update({k: v for k, v in kept.items() if k != "piece"})
    group_of: dict[nn.Parameter, int] = {}
    groups = _groups(checkpoint, prefix)
    for number, options in enumerate(groups):
        group_of |= {aliases[name]: number for name in options.pop("params") if name in aliases}
    _apply(optim, states, groups, group_of)


def _apply(optim: torch.optim.Optimizer, states: dict, groups: list[dict], group_of: dict[nn.Parameter, int]) -> None:
    """Hands states and options to the optimizer, in its own order of groups and parameters."""
    local: dict[int, Any] = {}
    at, options = 0, []
    for number, current in enumerate(optim.param_groups):
        members = current["params"]
        kept = [groups[n] for n in dict.fromkeys(group_of[p] for p in members if p in group_of)]
        if any(not _equal(k, kept[0]) for k in kept):
            raise ConfigError(
                f"group {number} of the optimizer holds parameters of {len(kept)} saved groups with different options. "
                "Build the optimizer with the groups that were saved."
            )
        merged = {**{k: v for k, v in current.items() if k != "params"}, **(kept[0] if kept else {})}
        options.append({**merged, "params": list(range(at, at + len(members)))})
        local |= {at + i: states[p] for i, p in enumerate(members) if p in states}
        at += len(members)
    optim.load_state_dict({"state": local, "param_groups": options})


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def _aliases(model: nn.Module, names: dict[nn.Parameter, str]) -> dict[str, nn.Parameter]:
    """Every name of every parameter, those of tied ones included: other tools choose another one of them."""
    out = {name: param for param, name in names.items()}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in names:
            out.setdefault(clean(name), param)
    return out


def _prefix(checkpoint: Checkpoint) -> str:
    names = [*checkpoint.tensors, *checkpoint.objects]
    counts = {p: sum(n.startswith((p + "state.", p + "param_groups.")) for n in names) for p in PREFIXES}
    best = max(counts, key=lambda p: counts[p])
    if not counts[best]:
        raise ConfigError(
            f"{checkpoint.folder} holds no optimizer state. Pass optim=None, or save it: "
            "save_checkpoint(path, model, optim)."
        )
    return best


def _states(checkpoint: Checkpoint, prefix: str, known: set[str]) -> dict[str, dict[str, str]]:
    """{parameter: {key: name in the checkpoint}} for the parameters in `known`."""
    out: dict[str, dict[str, str]] = {}
    start, unknown = prefix + "state.", 0
    for full in [*checkpoint.tensors, *checkpoint.objects]:
        if full.startswith(start):
            parts = full[len(start) :].split(".")
            cut = next((n for n in range(len(parts) - 1, 0, -1) if clean(".".join(parts[:n])) in known), 0)
            if cut:
                out.setdefault(clean(".".join(parts[:cut])), {})[".".join(parts[cut:])] = full
            unknown += not cut
    if unknown and not out:
        raise ConfigError(
            f"{checkpoint.folder} keeps optimizer state under names that are none of the model's parameters, as "
            "optimizer.state_dict() does by number. Save it with shardkit.save_checkpoint, or get_optimizer_state_dict."
        )
    return out


def _groups(checkpoint: Checkpoint, prefix: str) -> list[dict]:
    """The saved groups, `params` a set of names. In the nested form they have numbers; in the flat form each
    parameter has its options."""
    found: dict[str, dict[str, Any]] = {}
    start = prefix + "param_groups."
    for full in [*checkpoint.tensors, *checkpoint.objects]:
        if full.startswith(start):
            group, _, key = full[len(start) :].rpartition(".")
            is_tensor = full in checkpoint.tensors
            value = checkpoint.tensor(full).read(checkpoint.reader) if is_tensor else checkpoint.read_object(full)
            found.setdefault(group, {})[key] = value
    for group, options in found.items():
        options["params"] = {clean(name) for name in options["params"]} if "params" in options else {clean(group)}
    return list(found.values())


def _rank_state(checkpoint: Checkpoint, group: Group) -> dict[str, Any]:
    if not any(name.startswith(RANK_STATE) for name in checkpoint.objects):
        return {}
    assert checkpoint.index is not None
    if checkpoint.index["world_size"] != group.size:
        raise ConfigError(
            f"{checkpoint.folder} holds optimizer state that belongs to single ranks' pieces (factored moments, say), "
            f"saved on {checkpoint.index['world_size']} ranks. Load it on as many; this job has {group.size}."
        )
    name = f"{RANK_STATE}.rank{group.rank}"
    return checkpoint.read_object(name) if name in checkpoint.objects else {}


def _example(checkpoint: Checkpoint, name: str) -> Any:
    """A tensor of the saved shape without memory; None for objects."""
    return torch.empty(checkpoint.tensors[name].shape, device="meta") if name in checkpoint.tensors else None


def _value(checkpoint: Checkpoint, name: str, param: nn.Parameter, counter: bool, into: Any) -> Any:
    """One saved value, cut for `param`. `into`: what the optimizer has in its place; its memory is used where it fits,
    so that loading into an optimizer that has stepped needs no memory for a second state."""
    if name in checkpoint.objects:
        return checkpoint.read_object(name)
    saved, home = checkpoint.tensor(name), home_of(param)
    if home is None or counter or (not saved.shape and home[0].infos[home[1]].shape):
        return saved.read(checkpoint.reader)
    info = home[0].infos[home[1]]
    if saved.shape != info.shape:
        raise ConfigError(
            f"{name} in {checkpoint.folder} has shape {saved.shape}, and {info.name} has {info.shape}: a "
            "state that is not elementwise cannot be cut into pieces."
        )
    local = into.to_local() if isinstance(into, LocalShard) else into
    fits = isinstance(local, torch.Tensor) and local.dtype == saved.dtype and local.is_contiguous()
    if not fits or tuple(local.shape) != info.local_shape:
        local = torch.empty(info.local_shape, dtype=saved.dtype, device=param.device)
    saved.read_run(checkpoint.reader, *info.piece, local.view(-1))
    return local
