"""`python -m shardkit.run script.py [arguments]`, or `-m module [arguments]`: runs it with shardkit in Accelerate.

Every FSDP setting that the program, its YAML or its TrainingArguments make then means shardkit. Neither needs a change:

    accelerate launch --config_file fsdp.yaml -m shardkit.run train.py --epochs 3
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = "usage: python -m shardkit.run script.py [arguments]\n       python -m shardkit.run -m module [arguments]"


def main(arguments: list[str]) -> None:
    """Installs shardkit, and runs the program as `python` would, `sys.argv` and `sys.path[0]` included."""
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit(USAGE if not arguments else print(USAGE))
    script = Path(arguments[0])
    if not is_module and not script.exists():
        sys.exit(f"shardkit.run: {script} does not exist. Pass a script, or -m and the name of a module.\n{USAGE}")
    from .accelerate import install

    install(always=True)
    sys.argv = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # `python -P` puts no folder first
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
