"""The fixed list of what shardkit replaces in Accelerate, transformers and TRL, and who asked for it.

The same list, offered upstream, is the small plug-in protocol of docs/accelerate_protocol.md.

Importing this module imports none of the others: the hook of `shardkit_autoload` may run in the middle of their own
import of Accelerate, and whoever asks for shardkit and then does not use FSDP need not load it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from .seams import Seam, Table, version_of

_always = False  # every FSDP setting means shardkit, whatever its version


class _Late:
    """The functions of a module of this package, which is imported when the first of them is called."""

    def __init__(self, module: str):
        self._module = f"{__package__}.{module}"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args, **kwargs):
            return getattr(importlib.import_module(self._module), name)(*args, **kwargs)

        return call


checkpoints, preparing, trainer = _Late("checkpoints"), _Late("preparing"), _Late("trainer")


def is_asked_for(plugin: Any) -> bool:
    """Whether a plugin that is being made is for shardkit."""
    from .plugin import ShardkitPlugin, _passed, is_the_word

    asked = plugin.fsdp_version if plugin.fsdp_version is not None else os.environ.get("FSDP_VERSION")
    asked = _passed.get("fsdp_version", asked)
    return _always or isinstance(plugin, ShardkitPlugin) or is_the_word(asked)


def plugin_post_init(stock, self) -> None:
    """Whoever makes the plugin (environment, Trainer, script) gets a ShardkitPlugin where it is for shardkit."""
    from .plugin import ShardkitPlugin

    self.__class__ = ShardkitPlugin
    self.take_request()
    stock(self)


_ACCELERATOR = "accelerate.accelerator"
_FSDP_UTILS = "accelerate.utils.fsdp_utils"

table = Table([
    Seam("accelerate.utils.dataclasses", "FullyShardedDataParallelPlugin.__post_init__", ("self",),
         is_asked_for, plugin_post_init),
    Seam("accelerate.state", "PartialState.__init__", ("self", "cpu"),
         preparing.on_cpu_ranks, preparing.partial_state),
    Seam("accelerate.state", "AcceleratorState.__init__", ("self", "mixed_precision", "cpu", "fsdp_plugin"),
         preparing.asks_for_shardkit, preparing.accelerator_state),
    Seam(_ACCELERATOR, "Accelerator.prepare", ("self",),
         preparing.is_ours, preparing.prepare),
    Seam(_ACCELERATOR, "Accelerator.prepare_model", ("self", "model", "device_placement", "evaluation_mode"),
         preparing.is_ours, preparing.prepare_model),
    Seam(_ACCELERATOR, "Accelerator.clip_grad_norm_", ("self", "parameters", "max_norm", "norm_type"),
         preparing.is_ours, preparing.clip_grad_norm_),
    Seam(_ACCELERATOR, "Accelerator.clip_grad_value_", ("self", "parameters", "clip_value"),
         preparing.is_ours, preparing.clip_grad_value_),
    Seam(_ACCELERATOR, "Accelerator.join_uneven_inputs", ("self", "joinables", "even_batches"),
         preparing.is_ours, preparing.join_uneven_inputs),
    Seam(_ACCELERATOR, "Accelerator.get_state_dict", ("self", "model", "unwrap"),
         preparing.is_ours, checkpoints.get_state_dict),
    Seam(_ACCELERATOR, "Accelerator.save_state", ("self", "output_dir"),
         preparing.is_ours, checkpoints.save_or_load_state),
    Seam(_ACCELERATOR, "Accelerator.load_state", ("self", "input_dir"),
         preparing.is_ours, checkpoints.save_or_load_state),
    Seam(_FSDP_UTILS, "save_fsdp_model", ("fsdp_plugin", "accelerator", "model", "output_dir", "model_index",
                                          "adapter_only"),
         checkpoints.concerns_model, checkpoints.save_model),
    Seam(_FSDP_UTILS, "load_fsdp_model", ("fsdp_plugin", "accelerator", "model", "input_dir", "model_index",
                                          "adapter_only"),
         checkpoints.concerns_model, checkpoints.load_model_state),
    Seam(_FSDP_UTILS, "save_fsdp_optimizer", ("fsdp_plugin", "accelerator", "optimizer", "model", "output_dir",
                                              "optimizer_index"),
         checkpoints.concerns_optimizer, checkpoints.save_optimizer),
    Seam(_FSDP_UTILS, "load_fsdp_optimizer", ("fsdp_plugin", "accelerator", "optimizer", "model", "input_dir",
                                              "optimizer_index", "adapter_only"),
         checkpoints.concerns_optimizer, checkpoints.load_optimizer_state),
    Seam("transformers.trainer", "Trainer.save_model", ("self", "output_dir", "_internal_call"),
         trainer.trains_with_shardkit, trainer.save_model),
    Seam("transformers.trainer", "Trainer.evaluation_loop", ("self", "dataloader", "description"),
         trainer.trains_with_shardkit, trainer.evaluation_loop),
    Seam("transformers.modeling_utils", "ModuleUtilsMixin.num_parameters", ("self",),
         trainer.is_a_sharded_model, trainer.num_parameters),
    Seam("transformers.training_args", "TrainingArguments._process_fsdp_args", ("self",),
         trainer.names_shardkit, trainer.process_fsdp_args, since="5.0"),
    Seam("transformers.trainer", "Trainer.create_accelerator_and_postprocess", ("self",),
         trainer.makes_a_plugin, trainer.create_accelerator, until="5.0"),
    Seam("trl.models.utils", "prepare_fsdp", ("model", "accelerator"),
         trainer.is_for_shardkit, trainer.prepare_fsdp, since="0.16"),
])  # fmt: skip


def install(always: bool = True) -> None:
    """Makes Accelerate train with shardkit, in this process, from now on. Idempotent; no communication.

    always: for every FSDP setting. False: where `fsdp_version` is "shardkit", or the plugin a ShardkitPlugin.

    Call it before the Accelerator or the TrainingArguments are made. Raises ShardkitIncompatible, naming the entry and
    the versions, and changing nothing, where the installed Accelerate or transformers does not fit.
    """
    global _always
    was_installed = bool(table.installed)
    table.install("accelerate")
    _always = _always and was_installed or always


def install_in_step(always: bool) -> None:
    """As `install`, with Accelerate's own import, which may have begun: each part is replaced when it is there."""
    global _always
    was_installed = bool(table.installed)
    table.install("")
    _always = _always and was_installed or always


def uninstall() -> None:
    """Puts back everything that `install` replaced. Models that were prepared stay sharded."""
    global _always
    table.uninstall()
    _always = False


def status() -> dict[str, Any]:
    """What is replaced, for whom, and in which versions:
    `{"installed": bool, "always": bool, "versions": {package: version}, "entries": {entry: state}}`."""
    if table.is_waiting:
        table.complete()
    packages = dict.fromkeys(["shardkit", *(seam.package for seam in table.seams)])
    return {
        "installed": bool(table.installed),
        "always": bool(table.installed) and _always,
        "versions": {name: version_of(name) for name in packages},
        "entries": table.describe(),
    }
