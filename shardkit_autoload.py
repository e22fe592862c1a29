"""Loads shardkit into Accelerate where the environment asks for it; torch calls `hook` at the end of `import torch`.

Asked for by `FSDP_VERSION=shardkit`, which `accelerate launch` exports for `fsdp_version: shardkit`, or by
`SHARDKIT_ACCELERATE=1` (also `always`: every FSDP setting means shardkit). Off: `SHARDKIT_ACCELERATE=0`, or torch's own
`TORCH_DEVICE_BACKEND_AUTOLOAD=0`.

A module of its own, because every process that imports torch runs it: it imports nothing, unless asked, and then only
notes that Accelerate's import is to be followed by shardkit's. It never raises, since torch would fail to import; what
does not fit raises when Accelerate is imported.
"""

import os
import sys


def hook() -> None:
    """Does nothing, or arranges for `shardkit.accelerate.install()` once Accelerate has been imported."""
    try:
        wanted = os.environ.get("SHARDKIT_ACCELERATE", "").strip().lower()
        named = os.environ.get("FSDP_VERSION", "").strip().lower() == "shardkit"
        if wanted in ("0", "false", "off", "no") or not (wanted or named):
            return
        _install_after_import("accelerate.accelerator", always=wanted == "always")
    except Exception as error:  # never a reason for `import torch` to fail
        print(f"shardkit was not loaded into Accelerate: {error!r}", file=sys.stderr)


def _install_after_import(name: str, always: bool) -> None:
    import importlib.machinery

    def install() -> None:
        from shardkit.accelerate import install

        install(always=always)

    module = sys.modules.get(name)
    if module is not None and hasattr(module, "Accelerator"):
        install()
        return

    class Finder:
        """Finds one module, once, and installs after its import."""

        @staticmethod
        def find_spec(fullname, path=None, target=None):
            if fullname != name:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                load = spec.loader.exec_module

                def exec_module(module):
                    load(module)
                    install()

                spec.loader.exec_module = exec_module  # this loader is of this module alone
            return spec

    sys.meta_path.insert(0, Finder)
