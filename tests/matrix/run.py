"""The tests of shardkit in Accelerate with other releases than the newest, in a virtual environment of their own.

    python tests/matrix/run.py --oldest                  # of oldest.txt, made on first use in .venv-oldest
    python tests/matrix/run.py --venv PATH               # one that is there, with shardkit installed in it
    python tests/matrix/run.py --oldest -- -k launch     # what follows -- goes to pytest: here, one of its files

Not collected by pytest: continuous integration runs the newest releases alone. A test that older releases cannot pass
says so and is skipped there. What they lack, and shardkit does not make up for:

    accelerate < 1.8    its own FSDP version 2 numbers optimizer state and has no FULL_STATE_DICT, so checkpoints are
                        not exchanged with it; those of shardkit are the same in all releases
    transformers < 5    a layer that is recomputed would extend the cache of keys and values a second time: activation
                        checkpointing needs `use_cache=False` in the model's configuration, as with torch's FSDP
                        with `fsdp_cpu_ram_efficient_loading`, the first rank alone reads the weights, and sends them
                        `fsdp_config` reaches shardkit when the Trainer is made, not with the TrainingArguments, which
                        take nothing but a text for `backward_prefetch`: "NO_PREFETCH", not `false`
                        a checkpoint brings its own batch size with it: for the same steps on other numbers of ranks,
                        change the micro-batches, and set `average_tokens_across_devices`, which is off by default
                        its Trainer prepares models in a way that Accelerate's own version 2 refuses, so some tests
                        have no stock run to compare with
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("accelerate", "transformers", "peft", "trl", "torch")
VERSIONS = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    found = list(importlib.metadata.distributions(name=name))
    print(name, found[0].version if found else "is not there")
"""


def make(venv: Path, constraints: Path) -> None:
    """torch first, by its version: see the Makefile."""
    print(f"making {venv}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", constraints]
    lines = [line.split("#")[0].strip() for line in constraints.read_text("utf-8").splitlines()]
    wanted = [line for line in lines if line]
    subprocess.run([*pip, next(line for line in wanted if line.startswith("torch=="))], check=True)
    subprocess.run([*pip, *wanted], check=True)
    subprocess.run([*pip, "-e", ROOT], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--oldest", action="store_true", help="the releases of oldest.txt")
    which.add_argument("--venv", type=Path, help="a virtual environment that is there")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    venv = arguments.venv.absolute() if arguments.venv else ROOT / ".venv-oldest"
    python = venv / "bin" / "python"
    if arguments.oldest and not python.exists():
        make(venv, HERE / "oldest.txt")
    subprocess.run([python, "-c", VERSIONS, *PACKAGES], check=True)
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("*/test_accelerate*.py"))
    command = [python, "-m", "pytest", "-q", *files, *arguments.pytest]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}).returncode


if __name__ == "__main__":
    sys.exit(main())
