"""What runs in place of Accelerate's functions for checkpoints of models, optimizers and whole weights.

File names and contents are those of Accelerate with FSDP version 2, so that either resumes what the other saved, on any
number of ranks:

    FULL_STATE_DICT       pytorch_model_fsdp.bin, optimizer.bin    whole tensors by parameter names, from the first rank
    SHARDED_STATE_DICT    pytorch_model_fsdp_0/, optimizer_0/      shardkit's sharded checkpoints, in torch's DCP format

What is there decides how it is loaded, whatever the plugin says: a checkpoint of the other kind, or of a run without
FSDP, loads as well. Each rank reads its own part, and no optimizer step is taken to load a state.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from ..checkpoint import files
from ..checkpoint.adapters import has_adapters, needed_to_save, trained_names
from ..checkpoint.agreement import together
from ..checkpoint.full import full_state_dict, gather_whole, steps_of
from ..checkpoint.huggingface import load_safetensors
from ..checkpoint.load import load_model, open_checkpoint, read_piece
from ..checkpoint.optim_state import load_optimizer
from ..checkpoint.optimizer import full_optim_state_dict, load_full_optim_state_dict, parameter_names
from ..checkpoint.safetensors import INDEX, SINGLE
from ..checkpoint.save import write
from ..checkpoint.snapshot import clean, take_model, take_optimizer, world_of
from ..comm import Group
from ..errors import CheckpointError, ConfigError
from ..local_shard import LocalShard
from .plugin import ShardkitPlugin
from .preparing import bare, inner, is_sharded, plugin_of, trains

MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"


class LoadResult(NamedTuple):
    """What `load_state_dict` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def concerns_model(plugin: Any, accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> bool:
    return isinstance(plugin, ShardkitPlugin) and is_sharded(model)


def concerns_optimizer(plugin: Any, accelerator: Any, optimizer: Any, model: Any, *args: Any, **kwargs: Any) -> bool:
    return isinstance(plugin, ShardkitPlugin) and is_sharded(_model_of(optimizer, accelerator, model))


# -------------------------------------------------------------------------------------------------------- models


def save_model(
    stock, plugin, accelerator, model, output_dir, model_index=0, adapter_only=False, use_dcp=True
) -> None:
    """Collective over the model's ranks. See the module docstring for the files."""
    module, group, folder = _begin(model, output_dir, use_dcp)
    state: dict[str, Any] = module.state_dict()
    names = trained_names(module, state, group) if adapter_only and has_adapters(module) else None
    if _is_full(plugin):
        if names is not None:  # as stock: here the names are the model's
            state = {key: state[key] for key in names.values()}
        _save_whole(group, folder / _full_name(MODEL, model_index), gather_whole(module, state, rank0_only=True))
    else:
        if names is not None:
            state = {name: state[key] for name, key in names.items()}
        write(folder / f"{MODEL}_{model_index}", take_model(module, state), group, latest=False)


def load_model_state(
    stock, plugin, accelerator, model, input_dir, model_index=0, adapter_only=False, use_dcp=True
) -> LoadResult:
    """Collective over the model's ranks. Raises CheckpointError on every rank where nothing is there to load."""
    module, group, folder = _begin(model, input_dir, use_dcp)
    weights = [folder / SINGLE, folder / INDEX] if model_index == 0 else [folder / f"model_{model_index}.safetensors"]
    path = _find(group, folder, MODEL, model_index, weights)
    adapter = adapter_only and has_adapters(module)
    if path.is_dir():
        return _load_adapters(group, path, module) if adapter else _load_sharded(group, path, module)
    if path in weights:
        load_safetensors(module, path.parent if path.name == INDEX else path)
        return LoadResult([], [])
    saved = together(group, f"reading {path}", lambda: _mapped(path))
    if not adapter:
        return together(group, f"loading the model from {path}", lambda: _load_whole(module, saved, strict=True))
    trained = trained_names(module, module.state_dict(), group).values()

    def load() -> LoadResult:
        result = _load_whole(module, saved, strict=False)
        missing = [key for key in result.missing_keys if key in trained]  # the base model's are not expected
        return _report(path, missing, result.unexpected_keys, len(trained))

    return together(group, f"loading the model from {path}", load)


def _load_sharded(group, path: Path, module: nn.Module) -> LoadResult:
    with together(group, f"reading {path}", lambda: open_checkpoint(path)) as checkpoint:
        together(group, f"loading the model from {path}", lambda: load_model(checkpoint, module, strict=True))
    return LoadResult([], [])


def _load_adapters(group, path: Path, module: nn.Module) -> LoadResult:
    state = module.state_dict()
    names = trained_names(module, state, group)
    with together(group, f"reading {path}", lambda: open_checkpoint(path)) as checkpoint:

        def load() -> LoadResult:
            loaded, missing = {}, []
            for name, key in names.items():
                # Its own first: in peft's names, the active adapter may be another than it is now.
                there = [n for n in (f"model.{clean(key)}", f"model.{name}") if n in checkpoint.tensors]
                if not there:
                    missing.append(key)
                elif isinstance(state[key], LocalShard):
                    read_piece(checkpoint, there[0], state[key])
                    loaded[key] = state[key]  # in place already, unless a hook has made a copy
                else:
                    loaded[key] = checkpoint.tensor(there[0]).read(checkpoint.reader)
            for step in steps_of(module):
                for flat in step.flats:
                    flat.forget()
            module.load_state_dict(loaded, strict=False)
            return _report(path, missing, [], len(names))

        return together(group, f"loading the model from {path}", load)


def _report(path: Path, missing: list[str], unexpected: list[str], wanted: int) -> LoadResult:
    """Of loading adapters. Stock's checkpoints have the active one alone, and the rest of a model keeps its values."""
    if missing:
        few = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        if len(missing) == wanted:
            raise ConfigError(f"{path} has nothing of what this model trains ({few}). Build the model that was saved.")
        warnings.warn(f"{path} has no {few}, which keep their values.", stacklevel=2)
    return LoadResult(missing, unexpected)


def _load_whole(module: nn.Module, state: dict, strict: bool) -> Any:
    prefixed = {clean(key): key for key in module.state_dict()}
    return module.load_state_dict({prefixed.get(clean(k), k): v for k, v in state.items()}, strict=strict)


# ---------------------------------------------------------------------------------------------------- optimizers


def save_optimizer(stock, plugin, accelerator, optimizer, model, output_dir, optimizer_index=0, use_dcp=True) -> None:
    """Collective over the model's ranks. See the module docstring for the files."""
    module, group, folder = _begin(_model_of(optimizer, accelerator, model), output_dir, use_dcp)
    optim = bare(optimizer)
    if _is_full(plugin):
        state = full_optim_state_dict(module, optim, rank0_only=True)
        _save_whole(group, folder / _full_name(OPTIMIZER, optimizer_index), state)
    else:
        doing = "collecting the optimizer's state"
        snapshot = together(group, doing, lambda: take_optimizer(module, optim, OPTIMIZER))
        write(folder / f"{OPTIMIZER}_{optimizer_index}", snapshot, group, latest=False)


def load_optimizer_state(
    stock, plugin, accelerator, optimizer, model, input_dir, optimizer_index=0, adapter_only=False, use_dcp=True
) -> None:
    """Collective over the model's ranks. Raises CheckpointError on every rank where nothing is there to load."""
    module, group, folder = _begin(_model_of(optimizer, accelerator, model), input_dir, use_dcp)
    optim = bare(optimizer)
    path = _find(group, folder, OPTIMIZER, optimizer_index, [folder / "optimizer.pt"])
    if path.is_dir():
        with together(group, f"reading {path}", lambda: open_checkpoint(path)) as checkpoint:
            doing = f"loading the optimizer from {path}"
            together(group, doing, lambda: load_optimizer(checkpoint, module, optim, group))
        return

    def load():
        state = _mapped(path)
        load_full_optim_state_dict(module, optim, _by_names(state, module, optim))

    together(group, f"loading the optimizer from {path}", load)


def _by_names(state: dict, module: nn.Module, optim: torch.optim.Optimizer) -> dict:
    """A whole optimizer state by parameter names. That of a run without FSDP counts parameters, in the order of the
    optimizer's groups."""
    if not any(isinstance(key, int) for key in state["state"]):
        return state
    names = parameter_names(module)
    numbered = dict(enumerate(names[p] for group in optim.param_groups for p in group["params"]))
    groups = [{**group, "params": [numbered[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {numbered[n]: values for n, values in state["state"].items()}, "param_groups": groups}


def _model_of(optimizer: Any, accelerator: Any, model: nn.Module) -> nn.Module:
    """The prepared model whose parameters the optimizer holds; `model`, which Accelerate found by number, or else."""
    return next((candidate for candidate in [model, *accelerator._models] if trains(optimizer, candidate)), model)


# ---------------------------------------------------------------------------------------- the accelerator's methods


def get_state_dict(stock, self, model, unwrap=True) -> dict:
    """The whole state dict in host memory on the first rank, empty on others. Collective over the model's ranks. Of a
    model that is not sharded, or not yet, its state dict."""
    if not is_sharded(model):
        return (self.unwrap_model(model) if unwrap else model).state_dict()
    module, plugin = inner(model), plugin_of(self)
    if plugin is not None and plugin.saves_for_peft and has_adapters(module):
        state = needed_to_save(module, module.state_dict(), world_of(steps_of(module)))
        return gather_whole(module, state, rank0_only=True)
    return full_state_dict(module, rank0_only=True)


class _Models(list):
    """Stock code takes an optimizer's model by the optimizer's number. Ours finds it by the parameters, so that there
    may be more optimizers than models."""

    def __getitem__(self, index):
        return super().__getitem__(min(index, len(self) - 1) if isinstance(index, int) else index)


def save_or_load_state(stock, self, *args, **kwargs):
    """`save_state` and `load_state`: stock, with its steps for version 1, which load a scaler like everything else."""
    plugin, models = plugin_of(self), self._models
    assert plugin is not None
    self._models = _Models(models)
    try:
        with plugin.as_version_1():
            return stock(self, *args, **kwargs)
    finally:
        self._models = models


# ------------------------------------------------------------------------------------------------------------- files


def _is_full(plugin: ShardkitPlugin) -> bool:
    return getattr(plugin.state_dict_type, "name", "") == "FULL_STATE_DICT"


def _full_name(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _find(group, folder: Path, name: str, index: int, others: list[Path]) -> Path:
    """What there is to load, decided by the first rank, seen by all: the newer one of the two kinds, where a run
    changed its `state_dict_type`, else the first of `others`. Three object gathers."""
    sharded = folder if folder.name == f"{name}_{index}" else folder / f"{name}_{index}"
    full = folder / _full_name(name, index)

    def look():
        if group.rank:
            return None
        saved = {path: mark for path, mark in ((sharded, sharded / files.METADATA), (full, full)) if mark.is_file()}
        there = sorted(saved, key=lambda path: saved[path].stat().st_mtime_ns, reverse=True)
        there += [path for path in others if path.is_file()]
        if not there:
            raise CheckpointError(
                f"{folder} has none of {', '.join(p.name for p in (sharded, full, *others))}. Pass a folder that "
                "save_state() or the Trainer wrote."
            )
        return there[0]

    path = group.all_gather_object(together(group, f"looking into {folder}", look))[0]

    def check():
        if not path.exists():
            raise CheckpointError(f"{path} is there for the first rank and not here: ranks must share the file system.")

    together(group, f"looking for {path}", check)
    return path


def _save_whole(group, path: Path, state: dict) -> None:
    def save():
        if group.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.writing")
            torch.save(state, temporary)
            files.rename(temporary, path)

    together(group, f"saving {path}", save)


def _mapped(path: Path) -> dict:
    """What torch.save wrote, mapped into memory: what is not read is not loaded."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _begin(model: nn.Module, folder: Any, use_dcp: bool) -> tuple[nn.Module, Group, Path]:
    """What all four functions start from: the sharded module, all of its ranks, and the folder. Raises ConfigError."""
    if not use_dcp:
        raise ConfigError(
            "use_dcp=False writes files that only as many ranks can read. shardkit's sharded checkpoints communicate "
            "no tensors either: leave use_dcp at True."
        )
    module = inner(model)
    return module, world_of(steps_of(module)), Path(folder).absolute()
