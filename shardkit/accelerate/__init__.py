"""shardkit inside Hugging Face Accelerate, transformers' Trainer, TRL and peft.

One of these asks for it; the README's "Already using Accelerate?" shows them:

    fsdp_version: shardkit                                  in the YAML, and SHARDKIT_ACCELERATE=1 or an import
    accelerate launch --config_file f.yaml -m shardkit.run train.py       nothing else changes
    from shardkit.accelerate import Accelerator             in the script
    fsdp_config={"version": "shardkit", ...}                of TrainingArguments

    install(always=True), uninstall(), status()             what is replaced; see `table`
    ShardkitPlugin(**options)                               FSDP's fields and shardkit's own options
    ShardkitIncompatible                                    an Accelerate that shardkit does not fit

Modules: `seams` replaces functions and takes it back, `table` lists which, `plugin` reads the settings; `preparing`,
`checkpoints` and `trainer` are what runs instead. Importing this package imports none of them, and no Accelerate.
"""

from ..errors import ShardkitIncompatible

_LAZY = {
    "Accelerator": ".accelerator",
    "ShardkitPlugin": ".plugin",
    "install": ".table",
    "status": ".table",
    "uninstall": ".table",
}

__all__ = ["Accelerator", "ShardkitIncompatible", "ShardkitPlugin", "install", "status", "uninstall"]


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
