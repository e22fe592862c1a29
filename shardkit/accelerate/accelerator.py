"""`Accelerator`, for scripts that ask for shardkit by importing it from here."""

from __future__ import annotations

import os
from typing import Any

import accelerate

from .plugin import ShardkitPlugin
from .table import install

install(always=True)


class Accelerator(accelerate.Accelerator):
    """Accelerate's, training with shardkit whatever FSDP settings it finds; without any, with shardkit's defaults.

    Takes the same arguments. Installs shardkit for the whole process, as `shardkit.accelerate.install()` does.
    """

    def __init__(self, *args: Any, fsdp_plugin: Any = None, **kwargs: Any):
        if fsdp_plugin is None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
            fsdp_plugin = ShardkitPlugin()
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
