"""Weights in the form of the Hugging Face tools: safetensors in, safetensors out, and `save_pretrained`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..comm import Group
from ..errors import CheckpointError, StateError
from ..local_shard import LocalShard, ShardInfo
from . import files
from .adapters import has_adapters, needed_to_save, prompts_at_hand
from .agreement import together
from .background import finish
from .full import full_state_dict, gather_whole, steps_of
from .load import load_model
from .records import memory_of
from .safetensors import FILE_BYTES, INDEX, SINGLE, Layout, Place, SafetensorsFolder, plan
from .snapshot import clean, world_of


def load_safetensors(model: nn.Module, folder: str | os.PathLike, *, strict: bool = True) -> None:
    """Loads weights from safetensors files (one, or several with an index) into a sharded model.

    Each rank reads the bytes of its own pieces, straight into them, converting where dtypes differ. Tied weights may be
    there under one of their names. Names that a `transformers` model says to ignore are ignored.

    folder: the folder, or one file. strict: names must agree; False loads what is common.
    Collective over the model's ranks: two small object gathers. Raises, on every rank, CheckpointError for missing or
    damaged files, and ConfigError where names or shapes do not fit the model.
    """
    finish(model)
    steps = steps_of(model)
    group, path = world_of(steps), Path(folder).absolute()
    with together(group, f"reading {path}", lambda: SafetensorsFolder(path)) as opened:
        together(group, f"loading the model from {path}", lambda: load_model(opened, model, strict))


def save_safetensors(
    model: nn.Module, folder: str | os.PathLike, *, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES
) -> None:
    """Saves a sharded model's weights as `transformers` saves those of an unsharded one, each tied weight once.

    Every rank writes its own pieces into the shared files, at their places: no tensor is gathered, and the peak is one
    piece (nothing on the CPU, unless `dtype` converts). Files get their names when all are complete, the index last.
    A `transformers` model's configuration is written as well, so that `from_pretrained(folder)` opens the result.

    Args:
        folder: made where it does not exist. Weight files that were there, and are not among the new ones, are removed.
        dtype: of floating-point tensors in the files; None: as in the model (the master dtype).
        file_bytes: of tensors in one file.

    Collective over the model's ranks. Raises, on every rank, CheckpointError where a rank could not write.
    """
    finish(model)
    steps = steps_of(model)
    group, path = world_of(steps), Path(folder).absolute()
    first = group.rank == 0
    token = group.all_gather_object(files.new_token())[0]

    def prepare() -> tuple[Layout, dict[str, Any]]:
        values = _unique(model)
        places = [Place(name, _dtype_of(v, dtype), _shape_of(v)) for name, v in values.items()]
        layout = plan(places, file_bytes)
        if first:
            path.mkdir(parents=True, exist_ok=True)
            for name, header in layout.headers.items():
                with open(_temporary(path, name, token), "wb") as file:
                    file.write(header)
                    file.truncate(layout.lengths[name])
        return layout, values

    layout, values = together(group, f"preparing {path}", prepare)
    flats = {info: flat for step in steps for flat in step.flats for info in flat.infos}

    def write():
        with _Files(path, token) as out:
            for number, place in enumerate(layout.places):
                value = values[place.name]
                if isinstance(value, LocalShard):
                    replicate = flats[value.shard_info].mesh.replicate
                    if number % replicate.size == replicate.rank:
                        start = value.shard_info.piece[0] * place.dtype.itemsize
                        out.write(place, start, value.to_local())
                elif first:
                    out.write(place, 0, value.detach())

    def publish():
        if first:
            _publish(path, token, layout)
            _save_configuration(model, path)

    try:
        together(group, f"writing {path}", write)
        together(group, f"publishing {path}", publish)
    except BaseException:
        for name in layout.headers if first else ():
            _temporary(path, name, token).unlink(missing_ok=True)
        raise


class _Files:
    """Open files that several ranks write to, each in its own places."""

    def __init__(self, folder: Path, token: str):
        self.folder, self.token = folder, token
        self._open: dict[str, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for file in self._open.values():
            if exc[0] is None:
                files.flush(file)
            file.close()

    def write(self, place: Place, start: int, tensor: torch.Tensor) -> None:
        """Writes a run of a tensor, `start` bytes into it."""
        if place.file not in self._open:
            self._open[place.file] = open(_temporary(self.folder, place.file, self.token), "r+b", buffering=0)
        host = tensor.to(device="cpu", dtype=place.dtype).contiguous().resolve_conj().resolve_neg()
        data, at = memory_of(host), place.offset + start
        while data:
            n = os.pwrite(self._open[place.file].fileno(), data[: 256 << 20], at)
            data, at = data[n:], at + n


def _temporary(folder: Path, name: str, token: str) -> Path:
    return folder / f".{name}{files.WRITING}{token}"


def _publish(path: Path, token: str, layout: Layout) -> None:
    for name, length in layout.lengths.items():
        size = _temporary(path, name, token).stat().st_size
        if size != length:
            raise CheckpointError(f"{_temporary(path, name, token)} has {size} bytes, expected {length}.")
    for name in layout.headers:
        files.rename(_temporary(path, name, token), path / name)
    if layout.index is not None:
        files.write_file(_temporary(path, INDEX, token), layout.index)
        files.rename(_temporary(path, INDEX, token), path / INDEX)
    # What an earlier save of another size left would be read in place of the new weights, or along with them.
    old = [*path.glob("model-*-of-*.safetensors"), path / SINGLE, path / INDEX]
    new = {*layout.headers, *([INDEX] if layout.index is not None else [])}
    for file in old:
        if file.name not in new:
            file.unlink(missing_ok=True)
    files.flush_folder(path)


def _save_configuration(model: nn.Module, path: Path) -> None:
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        if config is not None and callable(getattr(config, "save_pretrained", None)):
            if name == "config":
                config.architectures = [type(model).__name__]
            config.save_pretrained(path)


def _unique(model: nn.Module) -> dict[str, Any]:
    """The tensors of the state dict by name, each tied parameter once, under the name that `transformers` keeps."""
    dropped = [re.compile(pattern) for pattern in getattr(model, "_tied_weights_keys", None) or ()]
    out: dict[str, Any] = {}
    chosen: dict[ShardInfo, str] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue  # extra state; safetensors holds tensors
        name = clean(key)
        if isinstance(value, LocalShard):
            other = chosen.setdefault(value.shard_info, name)
            if other != name:
                if not any(pattern.search(other) for pattern in dropped):
                    continue
                del out[other]
                chosen[value.shard_info] = name
        out[name] = value
    return out


def _shape_of(value: torch.Tensor) -> tuple[int, ...]:
    return value.shard_info.shape if isinstance(value, LocalShard) else tuple(value.shape)


def _dtype_of(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def save_pretrained(model: nn.Module, original: Callable, directory, *args: Any, **kwargs: Any) -> Any:
    """`model.save_pretrained(directory, ...)` of a sharded model, called on all ranks.

    The whole weights (of peft's models, the adapters' alone) are gathered to the first rank's host memory, which then
    saves them with the method that the model has; the others return when it is done. With an explicit `state_dict`, the
    call goes straight through: one rank may make it alone, as trainers do.
    """
    if kwargs.get("state_dict") is not None:
        if has_adapters(model) and not kwargs["state_dict"] and kwargs.get("is_main_process") is False:
            return None  # a rank with nothing to write; peft would look for the entries anyway
        return original(directory, *args, **kwargs)
    parameters = inspect.signature(original).parameters.values()
    if not any(p.name == "state_dict" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise StateError(
            f"{type(model).__name__}.save_pretrained() takes no state_dict, and would save this rank's pieces. Use "
            "shardkit.save_safetensors(model, folder), or save shardkit.full_state_dict(model, rank0_only=True)."
        )
    group: Group = world_of(steps_of(model))
    if has_adapters(model):
        state = gather_whole(model, needed_to_save(model, model.state_dict(), group), rank0_only=True)
    else:
        state = full_state_dict(model, rank0_only=True)
    kwargs["is_main_process"] = True

    def save():
        return original(directory, *args, **{**kwargs, "state_dict": state}) if group.rank == 0 else None

    with prompts_at_hand(model):
        return together(group, f"save_pretrained({str(directory)!r})", save)
