"""Whole optimizer states: keyed by parameter names, so that they load into any world size and any wrapping."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from ..errors import ConfigError
from ..runtime.flat_param import FlatParam, home_of
from .full import steps_of


def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, *, rank0_only: bool = False, cpu: bool | None = None
) -> dict[str, Any]:
    """`{"state": {name: {key: whole tensor}}, "param_groups": [{..., "params": [names]}]}`, all of them copies.

    A state tensor of the local parameter's shape is part of a whole one, and is gathered; 0-dim tensors (step counters)
    and other values are the same on every rank, and are taken as they are. Parameters that are not sharded keep their
    state as it is. rank0_only, cpu: as for `full_state_dict`.
    Collective over the model's shard groups. Raises ConfigError for state of any other shape (factored second moments,
    say), which cannot be put together again, and for parameters of another model.
    """
    steps = steps_of(model)
    group = steps[0].mesh.world
    keep = not rank0_only or group.rank == 0
    device = torch.device("cpu") if (rank0_only if cpu is None else cpu) else None
    names = parameter_names(model)
    _check_known(optim, names)

    out: dict[str, Any] = {"state": {}, "param_groups": []}
    for flat, members in _by_flat(optim).items():
        for key, holders in _sharded_keys(optim, flat, members).items():
            example = next(optim.state[flat.params[i]][key] for i in holders if key in optim.state[flat.params[i]])
            local = torch.zeros(flat.layout.shard_numel, dtype=example.dtype, device=flat.device)
            for i in holders:
                value = optim.state[flat.params[i]].get(key)
                if value is not None and value.numel():
                    flat.local_piece(local, i).copy_(value.view(flat.infos[i].local_shape))
            whole = flat.gather_like_shard(local)
            if keep:
                for i in holders:
                    full = whole.as_strided(*flat.full_geometry[i])
                    full = full.clone() if device is None else full.to(device, copy=True)
                    out["state"].setdefault(names[flat.params[i]], {})[key] = full
            del whole, local  # before the next is gathered, or two are there at a time
    if not keep:
        return {}
    for param, state in optim.state.items():
        home, name = home_of(param), names[param]  # type: ignore[index]
        entry = out["state"].setdefault(name, {})
        for key, value in state.items():
            if home is None or not _is_local(value, home[0], home[1]):
                entry[key] = _copied(value, device)
        out["state"][name] = {k: entry[k] for k in state if k in entry}  # in the optimizer's own order
    for options in optim.param_groups:
        named = {k: _copied(v, device) for k, v in options.items() if k != "params"}
        out["param_groups"].append({**named, "params": [names[p] for p in options["params"]]})
    return out


def load_full_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads what `full_optim_state_dict` returned (from any world size and wrapping), given whole on every rank.

    Options come from the saved group that holds the same parameters, whatever the order of groups. No step has to be
    taken before. No communication. Raises ConfigError where a group's parameters were in several saved groups.
    """
    steps_of(model)
    names = parameter_names(model)
    _check_known(optim, names)
    saved_group = {name: i for i, g in enumerate(state["param_groups"]) for name in g["params"]}
    groups: list[dict[str, Any]] = []
    local: dict[int, Any] = {}
    counters = _counters(state["state"], {name: p for p, name in names.items()})
    at = 0
    for number, options in enumerate(optim.param_groups):
        members = [names[p] for p in options["params"]]
        sources = {saved_group[name] for name in members if name in saved_group}
        if len(sources) > 1:
            raise ConfigError(
                f"group {number} of the optimizer holds parameters of {len(sources)} saved groups, whose options may "
                "differ. Build the optimizer with the groups that were saved."
            )
        loaded = state["param_groups"][sources.pop()] if sources else options
        groups.append({k: v for k, v in loaded.items() if k != "params"})
        groups[-1]["params"] = list(range(at, at + len(members)))
        for p, name in zip(options["params"], members, strict=True):
            if name in state["state"]:
                saved = state["state"][name].items()
                local[at] = {k: _copied(v, None) if k in counters else _piece(v, p) for k, v in saved}
            at += 1
    optim.load_state_dict({"state": local, "param_groups": groups})


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's name in the unwrapped model: without the prefixes of checkpoint wrappers and torch.compile."""
    names = {}
    for name, param in model.named_parameters():
        for prefix in ("_checkpoint_wrapped_module.", "_orig_mod."):
            name = name.replace(prefix, "")
        names[param] = name
    return names


def _check_known(optim: torch.optim.Optimizer, names) -> None:
    for options in optim.param_groups:
        for p in options["params"]:
            if p not in names:
                raise ConfigError(
                    f"the optimizer holds a parameter of shape {tuple(p.shape)} that is not one of the model's. Pass "
                    "the model that the optimizer was built for."
                )


def _by_flat(optim: torch.optim.Optimizer) -> dict[FlatParam, list[int]]:
    """The optimizer's sharded parameters, in an order that is the same on all ranks."""
    out: dict[FlatParam, list[int]] = {}
    for options in optim.param_groups:
        for p in options["params"]:
            home = home_of(p)
            if home is not None:
                out.setdefault(home[0], []).append(home[1])
    return out


def _is_local(value: Any, flat: FlatParam, index: int) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == flat.infos[index].local_shape


def _sharded_keys(optim, flat: FlatParam, members: list[int]) -> dict[str, list[int]]:
    """State keys that hold pieces, with the parameters that have them. Decided by all ranks of the group together:
    a rank with nothing of a parameter, or of an odd shape, must not go its own way."""
    mine: dict[int, dict[str, tuple | None]] = {}
    for i in members:
        shapes = mine.setdefault(i, {})
        for key, value in optim.state.get(flat.params[i], {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                shapes[key] = None if _is_local(value, flat, i) else tuple(value.shape)
    out: dict[str, list[int]] = {}
    for shapes_of in flat.mesh.shard.all_gather_object(mine):
        for i, shapes in shapes_of.items():
            for key, odd in shapes.items():
                if odd is not None:
                    raise ConfigError(
                        f"{type(optim).__name__} keeps {key!r} of shape {odd} for {flat.names[i]}, whose local shape "
                        f"is {flat.infos[i].local_shape}: it cannot be put together from pieces. Use an optimizer with "
                        "elementwise state, or a sharded checkpoint for the same number of ranks."
                    )
                if i not in out.setdefault(key, []):
                    out[key].append(i)
    return out


def _counters(states: dict[str, dict], params: dict[str, nn.Parameter]) -> set[str]:
    """Keys whose 0-dim tensors are counters, also for 0-dim parameters, whose moments look the same."""
    keys = {"step"}
    for name, state in states.items():
        home = home_of(params[name]) if name in params else None
        if home is not None and home[0].infos[home[1]].shape:
            keys |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
    return keys


def _piece(value: Any, param: nn.Parameter) -> Any:
    """This rank's part of a parameter-shaped value; a copy of anything else."""
    home = home_of(param)
    if home is None or not isinstance(value, torch.Tensor) or tuple(value.shape) != home[0].infos[home[1]].shape:
        return _copied(value, None)
    info = home[0].infos[home[1]]
    start, stop = info.piece
    return value.reshape(-1)[start:stop].view(info.local_shape).clone()


def _copied(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if device is None else value.detach().to(device, copy=True)
