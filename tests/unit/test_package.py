"""The package as a whole: what importing it costs, which of its modules may import which, what its files mention."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shardkit"

# A module imports from its own layer and those below it. A folder is one entry.
LAYERS = {
    "errors": 0, "config": 0,
    "layout": 1, "wrap": 1,
    "comm": 2, "local_shard": 2,
    "runtime": 3,
    "api": 4, "activation": 4, "optim": 4, "checkpoint": 4, "describe": 4, "full_state": 4,
    "simulate": 5,
    "integrations": 6, "accelerate": 6, "cli": 6, "run": 6, "__main__": 6,
}  # fmt: skip


def test_importing_shardkit_imports_torch_and_nothing_else():
    # What torch brings by itself (numpy, where it is installed) is not ours to count.
    code = "import sys, torch; before = set(sys.modules); import shardkit; print(*sorted(set(sys.modules) - before))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    new = ran.stdout.split()
    packages = {name.partition(".")[0] for name in new}
    # "_": names of C modules, the standard library's among them.
    assert {name for name in packages - sys.stdlib_module_names if not name.startswith("_")} <= {"shardkit", "torch"}
    # Each takes longer to import than shardkit does, and the core has no use for either.
    assert not [name for name in new if name.startswith(("torch.distributed.fsdp", "torch.distributed.checkpoint"))]


def _imports(node, package):
    """Full names of the shardkit modules or names that `node` imports, wherever it does, but not for type checking."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _imports(child, package)
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
    else:
        names = []
    for name in names:
        if name.split(".")[0] == "shardkit":
            yield node.lineno, name


def _upward(path, source):
    """Complaints about a module's imports; `path` is relative to the repository."""
    *package, module = path.with_suffix("").parts
    own = [*package, module][1]
    if own not in LAYERS:
        return [f"{path}: {own} has no layer; see the table of modules in the design"]
    complaints = []
    for line, name in _imports(ast.parse(source), package):
        # `from shardkit import full_state_dict` asks __init__.py, which is above everything.
        target = (name.split(".") + ["__init__"])[1]
        if LAYERS.get(target, 99) > LAYERS[own]:
            complaints.append(f"{path}:{line}: {own} (layer {LAYERS[own]}) imports {name}")
    return complaints


@pytest.mark.parametrize(("path", "source", "good"), [
    ("shardkit/comm.py", "from shardkit.errors import E\nimport shardkit.local_shard", True),
    ("shardkit/comm.py", "def f():\n    from shardkit.api import x", False),
    ("shardkit/comm.py", "if TYPE_CHECKING:\n    from shardkit.api import x", True),
    ("shardkit/comm.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from shardkit.api import x", False),
    ("shardkit/comm.py", "from shardkit import auto_wrap", False),
    ("shardkit/comm.py", "from . import errors, layout", True),
    ("shardkit/comm.py", "from .runtime.unit import Unit", False),
    ("shardkit/runtime/unit.py", "from .step import x\nfrom . import flat_param\nfrom ..comm import y", True),
    ("shardkit/runtime/unit.py", "from .. import optim", False),
    ("shardkit/runtime/__init__.py", "from .unit import x", True),
    ("shardkit/surprise.py", "", False),
])  # fmt: skip
def test_the_check_of_layers_knows_every_form_of_import(path, source, good):
    assert (not _upward(Path(path), source)) == good


def test_imports_go_downwards_only():
    modules = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    complaints = [line for path in modules for line in _upward(path.relative_to(ROOT), path.read_text("utf-8"))]
    assert modules and not complaints, "\n".join(complaints)


def test_no_file_mentions_a_path_of_the_machine_it_was_written_on():
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    machine = re.compile(r"(?<![\w.])/(?:(?:home|root)/|tmp/bash|work/(?:main|shared)\b)")
    found = []
    for name in filter(None, names):
        if (ROOT / name).is_file():
            text = (ROOT / name).read_bytes().decode("utf-8", errors="ignore")
            found += [f"{name}: {match.group()}" for match in machine.finditer(text)]
    assert not found, "\n".join(found)
