"""Every exception that shardkit raises on purpose.

    ShardkitError
    ├── ConfigError(ValueError)     what the user passed cannot work: options, policies, meshes, models
    ├── PlanMismatchError           ranks disagree about the model, its units or its initial weights
    ├── OrderError                  ranks ran different steps, so their collectives no longer pair up
    ├── ShardkitIncompatible        a version of Accelerate or transformers that shardkit.accelerate does not fit
    ├── CheckpointError             a checkpoint is missing, damaged or incomplete, or could not be written
    └── StateError                  a call came at the wrong moment (inside a forward, before wrapping, ...)

A message says where (unit or parameter, rank), what was found, what was expected, and what to do next. Errors that
concern all ranks are raised on all ranks, before the first collective that would otherwise hang the peers.
"""


class ShardkitError(Exception):
    """Base class of shardkit's own errors."""


class ConfigError(ShardkitError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class PlanMismatchError(ShardkitError, RuntimeError):
    """The ranks of one group hold different models, units or initial weights."""


class OrderError(ShardkitError, RuntimeError):
    """The ranks of one group ended different phases of a step: their steps no longer belong together."""


class CheckpointError(ShardkitError, RuntimeError):
    """A checkpoint that cannot be read, or could not be written. Raised on every rank."""


class ShardkitIncompatible(ShardkitError, RuntimeError):
    """An entry point of another package that shardkit replaces is not there, or takes other parameters."""


class StateError(ShardkitError, RuntimeError):
    """A call at a moment when it has no meaning."""
