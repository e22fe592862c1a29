"""FSDP1's functions for optimizer states, by way of shardkit's whole optimizer states."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn as nn

from ..checkpoint.full import steps_of
from ..checkpoint.optimizer import (
    _check_known,
    _is_local,
    full_optim_state_dict,
    load_full_optim_state_dict,
    parameter_names,
)
from ..errors import ConfigError
from ..local_shard import LocalShard
from ..runtime.flat_param import home_of


def whole_state(
    model: nn.Module, optim: torch.optim.Optimizer, state: dict | None = None, *, rank0_only: bool, cpu: bool
) -> dict[str, Any]:
    """The whole state of `optim`, or of `state`, a state dict of it, by parameter names. Collective.

    Empty on other ranks than the first with `rank0_only`.
    """
    source: Any = optim if state is None else _standing_in(optim, state)
    return full_optim_state_dict(model, source, rank0_only=rank0_only, cpu=cpu)


def sharded_state(model: nn.Module, optim: torch.optim.Optimizer, state: dict | None = None, cpu: bool = False):
    """As `whole_state`, but what is split is a LocalShard, which `torch.distributed.checkpoint` saves and loads."""
    source: Any = optim if state is None else _standing_in(optim, state)
    names = parameter_names(model)
    _check_known(source, names)
    out: dict[str, Any] = {"state": {}, "param_groups": []}
    for param, values in source.state.items():
        home, kept = home_of(param), {}
        for key, value in values.items():
            if home is not None and isinstance(value, torch.Tensor) and value.dim() > 0 and _is_local(value, *home):
                value = LocalShard.wrap(value, home[0].infos[home[1]])
            kept[key] = value.cpu() if cpu and isinstance(value, torch.Tensor) else value
        out["state"][names[param]] = kept
    for group in source.param_groups:
        out["param_groups"].append({**group, "params": [names[p] for p in group["params"]]})
    return out


def to_load(model: nn.Module, optim: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What `optim.load_state_dict` takes, from a state by parameter names, whole or sharded as this model is.

    No communication. Raises ConfigError as `shardkit.load_full_optim_state_dict` does.
    """
    whole = _pieces_as_plain(model, state)
    taken: list[dict[str, Any]] = []
    source = types.SimpleNamespace(param_groups=optim.param_groups, state=optim.state, load_state_dict=taken.append)
    load_full_optim_state_dict(model, source, whole)  # type: ignore[arg-type]
    return taken[0]


def scattered(model: nn.Module, state: dict[str, Any] | None) -> dict[str, Any]:
    """A whole state by parameter names that only the first rank has, as a sharded one on every rank.

    Collective: one broadcast for each tensor, of which a rank keeps its piece.
    """
    group = steps_of(model)[0].mesh.world
    params = {name: p for p, name in parameter_names(model).items()}
    first = group.rank == 0
    if first and state is None:
        raise ConfigError("the first rank has no optimizer state to hand out: it must pass the whole one.")
    plan = group.all_gather_object(_without_tensors(state) if first else None)[0]
    out: dict[str, Any] = {"state": {}, "param_groups": plan["param_groups"]}
    device = steps_of(model)[0].flats[0].device
    for name, values in plan["state"].items():
        for key, value in values.items():
            if not isinstance(value, _Shape):
                out["state"].setdefault(name, {})[key] = value
                continue
            whole = torch.empty(value.shape, dtype=value.dtype, device=device)
            if first:
                whole.copy_(state["state"][name][key])  # type: ignore[index]
            group.broadcast(whole).wait()
            home = home_of(params[name]) if name in params else None
            if home is not None and value.shape == home[0].infos[home[1]].shape:
                info = home[0].infos[home[1]]
                piece = whole.view(-1)[slice(*info.piece)].view(info.local_shape).clone()
                out["state"].setdefault(name, {})[key] = LocalShard.wrap(piece, info)
            else:
                out["state"].setdefault(name, {})[key] = whole
    return out


def rekeyed(state: dict[str, Any], to_names: bool, model: nn.Module, optim: Any, optim_input: Any) -> dict[str, Any]:
    """A whole state by parameter names as one by numbers, or the other way round. No communication.

    Numbers are those of the optimizer's parameters in order; without one (and without `optim_input`, its first
    argument), those of `model.parameters()`.
    """
    names = parameter_names(model)
    if optim is not None:
        params = [p for group in optim.param_groups for p in group["params"]]
    elif optim_input is None:
        params = list(model.parameters())
    else:
        params = [p for item in optim_input for p in (item["params"] if isinstance(item, dict) else [item])]
    order = [names[p] for p in params]
    new: dict[Any, Any] = dict(enumerate(order)) if to_names else {name: i for i, name in enumerate(order)}
    return {
        **state,
        "state": {new.get(key, key): values for key, values in state["state"].items()},
        "param_groups": [{**g, "params": [new.get(p, p) for p in g["params"]]} for g in state["param_groups"]],
    }


class _Shape:
    """Stands for a tensor while its dictionary travels."""

    def __init__(self, t: torch.Tensor):
        self.shape, self.dtype = tuple(t.shape), t.dtype


def _without_tensors(state: Any) -> dict[str, Any]:
    shapes = {
        name: {k: _Shape(v) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in values.items()}
        for name, values in state["state"].items()
    }
    return {"state": shapes, "param_groups": state["param_groups"]}


def _standing_in(optim: torch.optim.Optimizer, state: dict[str, Any]) -> Any:
    """An object with the groups and the state of a state dict of `optim`, keyed by the optimizer's own parameters."""
    params = [p for group in optim.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    of = dict(zip(numbers, params, strict=True))
    groups = [{**g, "params": [of[n] for n in g["params"]]} for g in state["param_groups"]]
    values = {of[n]: value for n, value in state["state"].items()}
    return type(type(optim).__name__, (), {"state": values, "param_groups": groups})()


def _pieces_as_plain(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """`state` with each LocalShard as a plain tensor, which must be the piece that this rank has of the parameter."""
    homes = {name: home_of(p) for p, name in parameter_names(model).items()}
    infos = {name: home[0].infos[home[1]] for name, home in homes.items() if home is not None}
    out = {}
    for name, values in state["state"].items():
        out[name] = dict(values)
        for key, value in values.items():
            if isinstance(value, LocalShard):
                info = value.shard_info
                mine = infos.get(name)
                if mine is not None and (mine.shape, mine.piece) != (info.shape, info.piece):
                    raise ConfigError(
                        f"{key} of {name} is the piece {info.piece} of {info.shape}; this rank holds {mine.piece} of "
                        f"{mine.shape}. Load it through torch.distributed.checkpoint, which cuts it anew."
                    )
                out[name][key] = value.to_local()
    return {**state, "state": out}
