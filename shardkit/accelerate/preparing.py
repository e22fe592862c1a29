"""What runs in place of Accelerate's own steps from its state to a sharded model: process types, `prepare`, clipping.

Stock code does all that is not sharding. `prepare` runs its steps for FSDP version 1, which take the objects one by one
and in any order; `prepare_model` shards in place and has the stock method add autocast, compilation and bookkeeping, as
it does for a model that needs no wrapping. Parameters stay the objects they are, so optimizers need nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.nn as nn
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from .. import api
from ..errors import ConfigError, StateError
from ..integrations.fsdp2 import FSDPModule
from ..runtime.flat_param import home_of
from ..runtime.managed import local_piece_of, unit_of
from .plugin import ShardkitPlugin

_NO_SYNC = "_shardkit_no_sync"
_NOT_ELEMENTWISE = {
    "adafactor", "muon", "shampoo", "soap", "lamb", "lars", "apollo", "galoreadamw", "galoreadafactor", "came", "lbfgs",
}  # fmt: skip


class Prepared(FSDPModule, api.FullyShardedDataParallel):
    """A unit of a model that Accelerate prepared, with the methods of FSDP version 2 that Accelerate calls."""

    # transformers' generate() keeps ranks together by it. torch.compile, which looks too, asks for the second.
    _is_fsdp_managed_module = _fsdp_use_orig_params = True

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """As FSDP2's, where the plugin has `no_sync`; else no effect: each micro-batch is reduced, which gives the same
        gradients and keeps no whole ones."""
        if requires_gradient_sync or self.__dict__.get(_NO_SYNC):
            super().set_requires_gradient_sync(requires_gradient_sync, recurse=recurse)


def plugin_of(accelerator: Any) -> ShardkitPlugin | None:
    """The plugin of an accelerator that trains with shardkit; None for others."""
    state = accelerator.state
    plugin = getattr(state, "fsdp_plugin", None) if state.distributed_type == DistributedType.FSDP else None
    return plugin if isinstance(plugin, ShardkitPlugin) else None


def is_ours(accelerator: Any, *args: Any, **kwargs: Any) -> bool:
    return plugin_of(accelerator) is not None


def inner(model: nn.Module) -> Any:
    """The module that torch.compile wrapped, or the module itself."""
    return model._modules.get("_orig_mod") or model


def bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that Accelerate wrapped, or the optimizer itself."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer holds parameters of the model."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in held for p in model.parameters())


def is_sharded(model: nn.Module) -> bool:
    return any(unit_of(module) is not None for module in model.modules())


# ---------------------------------------------------------------------------------------------------- processes


def on_cpu_ranks(state: Any, cpu: bool = False, **kwargs: Any) -> bool:
    """Whether this is one of several processes, on a machine that has nothing but CPUs."""
    return not cpu and "LOCAL_RANK" in os.environ and not torch.accelerator.is_available()


def partial_state(stock, self, cpu=False, **kwargs):
    """Several processes without an accelerator are CPU ranks. Stock: as many separate trainings, each of type NO."""
    stock(self, True, **kwargs)


def asks_for_shardkit(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> bool:
    return isinstance(fsdp_plugin, ShardkitPlugin)


def accelerator_state(stock, self, *args, fsdp_plugin=None, parallelism_config=None, **kwargs):
    """Makes CPU ranks ranks of FSDP, as stock does with those of accelerators, and refuses what shardkit cannot do."""
    if parallelism_config is not None:
        kwargs["parallelism_config"] = parallelism_config  # not a parameter of the oldest releases
    stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    _refuse(self)


def _refuse(state: Any) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if state.distributed_type == DistributedType.NO and ranks > 1:
        raise StateError(
            f"{ranks} processes were started, and Accelerate found no process group for them: each would train a model "
            "of its own. Make the Accelerator before other code makes an AcceleratorState, and start the processes "
            "with `accelerate launch` or torchrun."
        )
    if state._mixed_precision == "fp8":
        raise ConfigError("mixed_precision='fp8' is not supported with shardkit. Use bf16.")
    parallel = getattr(state, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallel is not None and getattr(parallel, f"{name}_enabled", False):
            raise ConfigError(
                f"parallelism_config asks for {name}, which shardkit does not do: it shards over data-parallel ranks. "
                "Leave it out, or use fsdp_version: 2."
            )


# ---------------------------------------------------------------------------------------------------- preparing


def prepare(stock, self, *args, **kwargs):
    """Any objects, in any order, several models and optimizers, in one call or many."""
    plugin = plugin_of(self)
    assert plugin is not None
    with plugin.as_version_1():
        prepared = stock(self, *args, **kwargs)
    for optimizer in self._optimizers:
        _check_optimizer(optimizer)
        _cut_state(optimizer)
    return prepared


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses optimizers whose step is not elementwise: with pieces of matrices they would train, and to other ends."""
    kind = type(bare(optimizer))
    names = {cls.__name__.lower() for cls in kind.__mro__}
    homes = (home_of(p) for group in optimizer.param_groups for p in group["params"])
    in_pieces = any(home is not None and home[0].infos[home[1]].group.size > 1 for home in homes)
    if in_pieces and names & _NOT_ELEMENTWISE:
        raise ConfigError(
            f"{kind.__name__} looks at whole matrices or their norms, and shardkit's ranks hold pieces: it would "
            "train differently. Use an elementwise optimizer (AdamW, SGD, Lion, Adagrad, ...), "
            "sharding_strategy='none', or fsdp_version: 2."
        )


def _cut_state(optimizer: torch.optim.Optimizer) -> None:
    """Keeps this rank's part of what an optimizer made for whole parameters: Adagrad makes its state at once."""
    for param, state in optimizer.state.items():
        home = home_of(param)
        if home is None:
            continue
        whole = home[0].infos[home[1]].shape
        for name, value in state.items():
            if torch.is_tensor(value) and tuple(value.shape) == whole != tuple(param.shape):
                state[name] = local_piece_of(value, *home).to(param.device, copy=True)


def prepare_model(stock, self, model, device_placement=None, evaluation_mode=False):
    """Shards `model` in place, unless it is sharded already or only evaluated. Collective over all ranks."""
    if any(model is known for known in self._models):
        return model  # a second prepare(), as after an evaluation
    if not evaluation_mode:
        shard(model, self)
        device_placement = False
    return stock(self, model, device_placement=device_placement, evaluation_mode=True)


def shard(model: nn.Module, accelerator: Any) -> None:
    """Shards as the accelerator's plugin says. Does nothing to a model that has sharded parts. Collective."""
    plugin = plugin_of(accelerator)
    assert plugin is not None
    module = inner(model)
    if is_sharded(module):
        return
    if getattr(module, "is_loaded_in_4bit", False) or getattr(module, "is_loaded_in_8bit", False):
        raise ConfigError(
            f"{type(module).__name__} has quantised weights, which cannot be cut into shards. Load it in 16 bits."
        )
    options = plugin.options_for(module, accelerator.device, accelerator.mixed_precision)
    group = options.pop("process_group", None)
    api._wrap(module, plugin.units(module), group, options, mixin=Prepared)
    setattr(module, _NO_SYNC, plugin.no_sync)
    for part in module.modules():  # peft and value heads generate from the model that they wrap
        if callable(getattr(type(part), "generate", None)):
            part._is_fsdp_managed_module = part._fsdp_use_orig_params = True


# ------------------------------------------------------------------------------------------------------ in the loop


def clip_grad_norm_(stock, self, parameters, max_norm, norm_type=2):
    """Clips any parameters, sharded or not, to one global norm. One all-reduce over the shard group."""
    self.unscale_gradients()
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


def clip_grad_value_(stock, self, parameters, clip_value):
    """Clips elements, of which each rank has its own."""
    self.unscale_gradients()
    torch.nn.utils.clip_grad_value_(parameters, clip_value)


@contextlib.contextmanager
def join_uneven_inputs(stock, self, joinables, even_batches=None):
    """Ranks may have different numbers of batches, where these are not evened out: one that has no more serves the
    others until all are through, as `model.join()`. Stock has this for DDP on accelerators alone."""
    loaders = self._dataloaders if even_batches is not None else []
    samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in loaders]
    before = [(sampler, sampler.even_batches) for sampler in samplers if hasattr(sampler, "even_batches")]
    with contextlib.ExitStack() as stack:
        for sampler, value in before:
            stack.callback(setattr, sampler, "even_batches", value)
            sampler.even_batches = even_batches
        if not (self.even_batches if even_batches is None else even_batches):
            for model in joinables:
                own = [bare(optimizer) for optimizer in self._optimizers if trains(optimizer, model)]
                stack.enter_context(inner(model).join(*own))
        yield
