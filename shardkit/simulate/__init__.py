"""Will it fit? `estimate` runs a training step without memory; `profile` measures one that runs; `plan` chooses
settings.

| file | what it holds |
|---|---|
| `ledger.py`, `observe.py` | which memory is alive and what for; operators and the engine as its sources |
| `world.py`, `padding.py` | a world of any size in one process; what masks are said to hold |
| `kernels.py` | what CPU kernels allocate and free within themselves |
| `training.py`, `saving.py`, `estimate.py` | one training loop; a checkpoint; running them simulated |
| `profiler.py`, `callback.py` | measuring it for real; sentences about an out-of-memory error |
| `models.py` | where models come from; presets |
| `allocator.py`, `devices.py`, `speed.py` | GPUs and predicted time |
| `choice.py`, `planner.py`, `settings.py` | what can be chosen, the search, the result written down |
| `report.py`, `plots.py`, `command.py` | tables, pictures, the command line |
"""

from __future__ import annotations

from typing import Any

_LAZY = {
    "Report": ".report", "compare": ".report", "estimate": ".estimate", "plan": ".planner", "Plan": ".planner",
    "profile": ".profiler", "explain_oom": ".profiler", "PRESETS": ".models", "DEVICES": ".devices",
}  # fmt: skip

__all__ = ["DEVICES", "PRESETS", "Plan", "Report", "compare", "estimate", "explain_oom", "plan", "profile"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
