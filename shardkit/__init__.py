"""shardkit: sharded training for PyTorch. `model = shardkit.auto_wrap(model)`, and train as on one device.

    auto_wrap(model, policy="auto", **options)          shard a whole model
    FullyShardedDataParallel(module, **options)         shard one unit
    checkpoint_wrapper(module, **options)               compute a module's activations again instead of keeping them
    describe(model)                                     a table of what was made
    full_state_dict, load_full_state_dict               whole weights in and out
    full_optim_state_dict, load_full_optim_state_dict   whole optimizer state in and out
    save_safetensors, load_safetensors                  weights as the Hugging Face tools keep them
    save_checkpoint, load_checkpoint, async_save        sharded checkpoints, for any number of ranks
    estimate(model, batch, optimizer, world_size)       memory of a training step, without the memory and the ranks
    plan(model, batch, gpus)                            settings that fit, the fastest first
    profile(model), explain_oom(error)                  memory of a run, by unit and category; what to change

Importing shardkit imports torch alone.
"""

from .activation import checkpoint_wrapper
from .api import FullyShardedDataParallel, auto_wrap
from .checkpoint.background import async_save
from .checkpoint.full import full_state_dict, load_full_state_dict
from .checkpoint.huggingface import load_safetensors, save_safetensors
from .checkpoint.load import load_checkpoint
from .checkpoint.optimizer import full_optim_state_dict, load_full_optim_state_dict
from .checkpoint.random_state import RandomState
from .checkpoint.save import save_checkpoint
from .config import ActivationCheckpointing, ActivationOffload, CPUOffload, MixedPrecision
from .describe import Description, describe
from .errors import CheckpointError, ConfigError, OrderError, PlanMismatchError, ShardkitError, StateError
from .local_shard import LocalShard
from .wrap import size_policy

# What only some programs need, loaded when it is asked for.
_LAZY = {
    "estimate": ".simulate.estimate",
    "explain_oom": ".simulate.profiler",
    "plan": ".simulate.planner",
    "profile": ".simulate.profiler",
}

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "ActivationOffload",
    "CPUOffload",
    "CheckpointError",
    "ConfigError",
    "Description",
    "FullyShardedDataParallel",
    "LocalShard",
    "MixedPrecision",
    "OrderError",
    "PlanMismatchError",
    "RandomState",
    "ShardkitError",
    "StateError",
    "async_save",
    "auto_wrap",
    "checkpoint_wrapper",
    "describe",
    "estimate",
    "explain_oom",
    "full_optim_state_dict",
    "full_state_dict",
    "load_checkpoint",
    "load_full_optim_state_dict",
    "load_full_state_dict",
    "load_safetensors",
    "plan",
    "profile",
    "save_checkpoint",
    "save_safetensors",
    "size_policy",
]


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
