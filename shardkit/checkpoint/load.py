"""Loading: every rank reads the bytes of its own pieces, whatever number of ranks and wrapping they were saved at.

The first rank decides which checkpoint is meant; every rank then reads descriptions, pieces, and what is the same for
all. Ranks agree after each, so that a file that is missing or damaged for one is an error, which names it, on all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..comm import Group
from ..errors import CheckpointError, ConfigError
from ..local_shard import LocalShard, ShardInfo
from . import files
from .agreement import together
from .background import finish
from .full import steps_of
from .metadata import Checkpoint
from .optim_state import load_optimizer
from .snapshot import ShardReference, clean, world_of

MODEL_PREFIXES = ("model.", "", "app.model.", "state_dict.", "module.", "model_state_dict.")


def load_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optim: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    **extra: Any,
) -> dict[str, Any]:
    """Loads a checkpoint into a sharded model and its optimizer, and returns what else was saved.

    It may have been saved on another number of ranks, another mesh, with another strategy, wrapping or precision, by
    shardkit or by `torch.distributed.checkpoint` (FSDP2, FSDP1, DDP). The optimizer needs no step before.

    Args:
        path: a checkpoint, or a folder of checkpoints, of which the newest complete one is taken.
        optim: None leaves the saved optimizer state alone. Options of groups come from the saved group that has the
            same parameters; those the saved group does not have stay.
        strict: the model's names and the saved names must be the same. False loads what is common.
        **extra: objects with `load_state_dict()`, under the names they were saved with; they are loaded in place.

    Returns the extras by name: the state dict of what had one, the value itself of others. A rank that did not exist
    when the checkpoint was saved gets the first rank's. LocalShards come back cut for this model.

    Collective over the model's ranks: a few small object gathers; no tensor is communicated.

    Raises, on every rank: CheckpointError for files that are missing or damaged (the model may then be loaded in part:
    load another checkpoint before training on); ConfigError where the checkpoint does not fit the model.
    """
    finish(model)
    steps = steps_of(model)
    group = world_of(steps)
    folder = find(Path(path).absolute(), group)
    with together(group, f"reading {folder}", lambda: open_checkpoint(folder)) as checkpoint:
        together(group, f"loading the model from {folder}", lambda: load_model(checkpoint, model, strict))
        if optim is not None:
            doing = f"loading the optimizer from {folder}"
            together(group, doing, lambda: load_optimizer(checkpoint, model, optim, group))
        return together(group, f"loading extras from {folder}", lambda: _load_extra(checkpoint, model, group, extra))


def find(path: Path, group: Group) -> Path:
    """The checkpoint that `path` means, decided by the first rank. Two object gathers."""
    chosen = together(group, f"looking for {path}", lambda: files.resolve(path) if group.rank == 0 else None)
    return group.all_gather_object(chosen)[0]


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, whose files are there. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is there for the first rank and not here: all ranks must see the same files.")
    checkpoint = Checkpoint(folder)
    checkpoint.check_files()
    return checkpoint


def load_model(checkpoint: Checkpoint, model: nn.Module, strict: bool) -> None:
    """Reads this rank's part of the model. No communication."""
    try:
        _read_model(checkpoint, model, strict)
    finally:
        for step in steps_of(model):
            for flat in step.flats:
                flat.forget()  # gathered weights, if any were kept, are those from before


def _read_model(checkpoint: Checkpoint, model: nn.Module, strict: bool) -> None:
    state = model.state_dict()
    in_place = {param.data_ptr() for param in model.parameters()}
    prefix = _prefix(checkpoint, {clean(key) for key in state})
    wanted = {key: _saved_name(checkpoint, prefix, key, state) for key in state}
    missing = sorted(key for key, name in wanted.items() if name is None)
    if strict:
        _check_names(checkpoint, model, prefix, state, missing)
    loaded: dict[str, Any] = {}
    seen: set[ShardInfo] = set()
    for key, name in wanted.items():
        value = state[key]
        if name is None:
            continue
        if name in checkpoint.objects:
            loaded[key] = checkpoint.read_object(name)
        elif isinstance(value, LocalShard):
            if value.shard_info not in seen:
                read_piece(checkpoint, name, value)
            seen.add(value.shard_info)
            if value.numel() and value.data_ptr() not in in_place:
                loaded[key] = value  # a hook of the model's state_dict() has made a copy
        else:
            saved = checkpoint.tensor(name)
            loaded[key] = saved.read(checkpoint.reader)
    # Pieces are in place already. This fills buffers, hands extra state to its modules, and runs the hooks.
    model.load_state_dict(loaded, strict=False)


def read_piece(checkpoint: Checkpoint, name: str, piece: LocalShard) -> None:
    """Fills a LocalShard from the saved tensor `name`."""
    saved, info = checkpoint.tensor(name), piece.shard_info
    if saved.shape != info.shape:
        raise ConfigError(
            f"{info.name} has shape {info.shape}, and {name} in {checkpoint.folder} has {saved.shape}. Build the model "
            "that was saved."
        )
    local = piece.to_local()
    with torch.no_grad():
        saved.read_run(checkpoint.reader, *info.piece, local.view(-1))


def _prefix(checkpoint: Checkpoint, keys: set[str]) -> str:
    """What precedes the model's names in this checkpoint: where most of them are found."""
    names = {*checkpoint.tensors, *checkpoint.objects}
    return max(MODEL_PREFIXES, key=lambda prefix: sum(prefix + key in names for key in keys))


def _saved_name(checkpoint: Checkpoint, prefix: str, key: str, state: Mapping[str, Any]) -> str | None:
    """The saved name of the model's `key`; that of another name of the same parameter where one was saved only."""
    candidates = [clean(key)]
    value = state[key]
    if isinstance(value, LocalShard):
        info = value.shard_info
        candidates += [clean(k) for k, v in state.items() if isinstance(v, LocalShard) and v.shard_info is info]
    for name in candidates:
        if prefix + name in checkpoint.tensors or prefix + name in checkpoint.objects:
            return prefix + name
    return None


def _not_ignored(model: nn.Module, which: str, names: list[str]) -> list[str]:
    """Without those that a `transformers` model says not to mind."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{which}", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _check_names(
    checkpoint: Checkpoint, model: nn.Module, prefix: str, state: Mapping[str, Any], missing: list[str]
) -> None:
    # A buffer that is no longer saved may be there in files from when it was; its values are computed.
    keys = {prefix + clean(key) for key in [*state, *(name for name, _ in model.named_buffers())]}
    saved = {*checkpoint.tensors, *checkpoint.objects}
    # Without a prefix, a checkpoint may hold other things beside the model; files of weights hold nothing else.
    known = [name for name in saved if name.startswith(prefix)] if prefix or not hasattr(checkpoint, "paths") else []
    unexpected = _not_ignored(model, "unexpected", sorted(name for name in known if name not in keys))
    missing = _not_ignored(model, "missing", missing)
    if missing or unexpected:
        raise ConfigError(
            f"{checkpoint.folder} does not fit the model. Missing in the checkpoint: {_few(missing)}. In the "
            f"checkpoint and not in the model: {_few(unexpected)}. Build the model that was saved, or pass "
            "strict=False to load the rest."
        )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "nothing"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _load_extra(checkpoint: Checkpoint, model: nn.Module, group: Group, into: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if checkpoint.index is not None:
        infos = {clean(k): v for k, v in model.state_dict().items() if isinstance(v, LocalShard)}
        per_rank = set(checkpoint.index["per_rank"])
        rank = group.rank if group.rank < checkpoint.index["world_size"] else 0
        # Extras that differ between ranks have the rank in their names; no keyword has a dot.
        names = {key: key for key in checkpoint.objects if "." not in key}
        names |= {key: f"{key}.rank{rank}" for key in per_rank}
        out = {key: _with_shards(checkpoint.read_object(name), checkpoint, infos) for key, name in names.items()}
    for name, target in into.items():
        if name not in out:
            raise ConfigError(f"{checkpoint.folder} has no {name!r}. It has {', '.join(sorted(out)) or 'no extras'}.")
        if not callable(getattr(target, "load_state_dict", None)):
            raise ConfigError(f"{name!r} was given a {type(target).__name__}, which has no load_state_dict().")
        target.load_state_dict(out[name])
    return out


def _with_shards(value: Any, checkpoint: Checkpoint, infos: dict[str, LocalShard]) -> Any:
    """`value` with references to sharded tensors replaced by LocalShards, cut as the model's parameters are now."""
    if isinstance(value, ShardReference):
        if value.parameter not in infos:
            raise ConfigError(f"{'.'.join(value.path)} was cut as {value.parameter!r}, which the model does not have.")
        name, like = ".".join(value.path), infos[value.parameter]
        local = torch.empty(like.shape, dtype=checkpoint.tensors[name].dtype, device=like.device)
        piece = LocalShard.wrap(local, like.shard_info)
        read_piece(checkpoint, name, piece)
        return piece
    if isinstance(value, Mapping) and type(value) is dict:
        return {k: _with_shards(v, checkpoint, infos) for k, v in value.items()}
    return value
