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

# Accelerate's own programs, which import it and train nothing; the processes that they start are asked again.
_PROGRAMS = {
    "accelerate", "accelerate-config", "accelerate-estimate-memory", "accelerate-launch", "accelerate-merge-weights",
}  # fmt: skip


def hook() -> None:
    """Does nothing, or has Accelerate's import, whether it is to come or under way, followed by shardkit's."""
    try:
        wanted = os.environ.get("SHARDKIT_ACCELERATE", "").strip().lower()
        named = os.environ.get("FSDP_VERSION", "").strip().lower() == "shardkit"
        if wanted in ("0", "false", "off", "no") or not (wanted or named):
            return
        program = getattr(sys, "argv", None) or [""]
        if os.path.splitext(os.path.basename(program[0]))[0] in _PROGRAMS:
            return
        _install_with_accelerate(always=wanted == "always")
    except Exception as error:  # never a reason for `import torch` to fail
        print(f"shardkit was not loaded into Accelerate: {error!r}", file=sys.stderr)


def _install_with_accelerate(always: bool) -> None:
    def install() -> None:
        from shardkit.accelerate.table import install_in_step

        install_in_step(always)

    accelerator = sys.modules.get("accelerate.accelerator")
    if accelerator is not None and hasattr(accelerator, "Accelerator"):
        install()
        return

    class Finder:
        """Waits for the next import of any part of Accelerate: of all of it, or of what follows its `import torch`."""

        @staticmethod
        def find_spec(fullname, path=None, target=None):
            if fullname.partition(".")[0] != "accelerate":
                return None
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not Finder]
            install()
            for finder in list(sys.meta_path):  # from the start: shardkit's own is among them now
                spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    return spec
            return None

    sys.meta_path.insert(0, Finder)
