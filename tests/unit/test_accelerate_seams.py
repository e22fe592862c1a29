"""Replacing functions that others own: checked before, gated while it runs, and taken back whole."""

import importlib
import inspect
import os
import pickle
import subprocess
import sys
import textwrap
import types

import pytest

from shardkit.accelerate import seams
from shardkit.accelerate.seams import Seam, Table
from shardkit.errors import ShardkitIncompatible


def python(code, **environment):
    """What a fresh process prints."""
    env = {**os.environ, "SHARDKIT_ACCELERATE": "", "FSDP_VERSION": "", **environment}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


# ------------------------------------------------------------------------------------------ a package of our own


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package like Accelerate: a class, a function, modules that import the function, and what it was asked for."""
    folder = tmp_path / "stockroom"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .tools import save\n")
    (folder / "tools.py").write_text(
        "class Worker:\n"
        "    def work(self, what, *, twice=False):\n"
        "        'works'\n"
        "        return ['stock', what, twice]\n"
        "def save(worker, path, adapter_only=False):\n"
        "    return ['stock save', path]\n"
    )
    (folder / "late.py").write_text(
        "from stockroom import save as store\n"
        "from stockroom.tools import save\n"
        "class Trainer:\n"
        "    def save_model(self, output_dir=None):\n"
        "        return save(self, output_dir)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("stockroom", "trigger", "elsewhere")]:
        del sys.modules[name]


def replaced(stock, *args, **kwargs):
    return ["replaced", *stock(*args, **kwargs)]


def asks(first, *args, **kwargs):
    return getattr(first, "asks", True)


WORK = Seam("stockroom.tools", "Worker.work", ("self", "what"), asks, replaced)
SAVE = Seam("stockroom.tools", "save", ("worker", "path", "adapter_only"), asks, replaced)
LATE = Seam("stockroom.late", "Trainer.save_model", ("self", "output_dir"), asks, replaced)


@pytest.fixture
def table(package):
    tables = []

    def make(*seams_):
        tables.append(Table(seams_))
        return tables[-1]

    yield make
    for made in tables:
        made.uninstall()


def test_a_replacement_runs_where_it_is_asked_for_and_stock_code_everywhere_else(table):
    table(WORK, SAVE).install("stockroom")
    import stockroom

    worker = stockroom.tools.Worker()
    assert worker.work("a") == ["replaced", "stock", "a", False]
    assert worker.work(what="a", twice=True) == ["replaced", "stock", "a", True]
    assert stockroom.save(worker, "p") == stockroom.tools.save(worker, "p") == ["replaced", "stock save", "p"]
    worker.asks = False
    assert worker.work("a") == ["stock", "a", False]
    assert stockroom.save(worker, "p") == ["stock save", "p"]


def test_replaced_functions_keep_signature_name_and_docstring(table):
    from stockroom.tools import Worker, save

    before = [inspect.signature(Worker.work), inspect.signature(save)]
    table(WORK, SAVE).install("stockroom")
    import stockroom

    assert [inspect.signature(Worker.work), inspect.signature(stockroom.save)] == before
    assert "adapter_only" in inspect.signature(stockroom.save).parameters
    assert (Worker.work.__name__, Worker.work.__qualname__, Worker.work.__doc__) == ("work", "Worker.work", "works")


def test_installing_twice_is_installing_once_and_uninstalling_brings_back_the_same_objects(table):
    import stockroom

    work, save = stockroom.tools.Worker.work, stockroom.save
    installed = table(WORK, SAVE, LATE)
    for _ in range(2):
        installed.install("stockroom")
    assert stockroom.tools.Worker.work.__wrapped__ is work
    assert stockroom.save is stockroom.tools.save and stockroom.save.__wrapped__ is save
    finders = list(sys.meta_path)
    for _ in range(2):
        installed.uninstall()
    assert stockroom.tools.Worker.work is work
    assert stockroom.save is save and stockroom.tools.save is save
    assert sys.meta_path == [f for f in finders if not isinstance(f, seams._AfterImport)]


def test_modules_that_are_imported_after_it_get_their_seams_and_give_up_what_they_imported(table):
    import stockroom

    save = stockroom.save
    installed = table(SAVE, LATE)
    installed.install("stockroom")
    for name in [n for n in sys.modules if n == "stockroom.late"]:
        del sys.modules[name]
    assert installed.describe()["stockroom.late.Trainer.save_model"] == "installed"  # the package's own are imported
    installed.uninstall()
    late = importlib.import_module("stockroom.late")
    stock = late.Trainer.save_model

    installed.install("stockroom")
    assert late.Trainer.save_model.__wrapped__ is stock
    elsewhere = sys.modules["elsewhere"] = types.ModuleType("elsewhere")
    elsewhere.mine = stockroom.save  # under another name
    installed.uninstall()
    assert late.Trainer.save_model is stock
    assert late.save is late.store is stockroom.save is elsewhere.mine is save


def test_seams_of_other_packages_wait_for_their_import(table, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "__init__.py").write_text("")
    text = "class Trainer:\n    def save_model(self, output_dir=None):\n        return ['stock']\n"
    (other / "later.py").write_text(text)
    seam = Seam("elsewhere.later", "Trainer.save_model", ("self", "output_dir"), asks, replaced)
    installed = table(SAVE, seam)
    installed.install("stockroom")
    assert installed.describe() == {
        "stockroom.tools.save": "installed",
        "elsewhere.later.Trainer.save_model": "waits for its import",
    }
    later = importlib.import_module("elsewhere.later")
    assert later.Trainer().save_model() == ["replaced", "stock"]
    assert type(later.__spec__.loader) is type(later.__loader__) is not seams._Then
    assert set(installed.describe().values()) == {"installed"}
    installed.uninstall()
    assert later.Trainer().save_model() == ["stock"]
    assert set(installed.describe().values()) == {"not installed"}


@pytest.mark.parametrize("by", ["a call", "another import", "a second install"])
def test_a_module_in_the_middle_of_its_import_is_completed_later(table, package, by):
    """As when importing transformers.trainer imports Accelerate, which has shardkit installed."""
    (package / "late.py").write_text(
        "import trigger\n"
        "trigger.install()\n"
        "class Trainer:\n"
        "    def save_model(self, output_dir=None):\n"
        "        return ['stock']\n"
    )
    other = Seam("elsewhere", "Trainer.save_model", ("self",), asks, replaced)
    late = Seam("stockroom.late", "Trainer.save_model", ("self", "output_dir"), asks, replaced)
    installed = table(WORK, SAVE, other, late)
    trigger = sys.modules["trigger"] = types.ModuleType("trigger")
    trigger.install = lambda: installed.install("stockroom")
    module = importlib.import_module("stockroom.late")
    assert installed.is_waiting and module.Trainer().save_model() == ["stock"]
    if by == "a call":
        sys.modules["stockroom"].tools.Worker().work("a")
    elif by == "another import":
        with pytest.raises(ImportError):
            importlib.import_module("stockroom.nothing")
    else:
        installed.install("stockroom")
    assert not installed.is_waiting and module.Trainer().save_model() == ["replaced", "stock"]


def test_a_name_that_is_there_in_the_middle_of_an_import_is_replaced_at_once(table, package):
    text = (package / "tools.py").read_text()
    (package / "tools.py").write_text(text + "import trigger\ntrigger.install()\nafter = save\n")
    installed = table(SAVE)
    trigger = sys.modules["trigger"] = types.ModuleType("trigger")
    trigger.install = lambda: installed.install("stockroom")
    import stockroom

    assert stockroom.save is stockroom.tools.after and stockroom.save(None, "p") == ["replaced", "stock save", "p"]
    installed.uninstall()
    assert stockroom.save(None, "p") == stockroom.tools.after(None, "p") == ["stock save", "p"]


SAVE_TEXT = "def save(worker, path, adapter_only=False):\n    return ['stock save', path]\n"
BROKEN = {
    "an entry is missing": ("tools", "def save(", "def store(", "stockroom.tools.save"),
    "a class is missing": ("tools", "class Worker", "class Laborer", "stockroom.tools.Worker.work"),
    "a parameter has another name": ("tools", "adapter_only=False", "adapters=False", "adapter_only"),
    "parameters have another order": ("tools", "worker, path", "path, worker", "in this order"),
    "an entry is no function": ("tools", SAVE_TEXT, "save = 3\n", "stockroom.tools.save"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_does_not_fit_is_refused_by_name_and_version_with_nothing_changed(table, package, how):
    file, old, new, named = BROKEN[how]
    (package / "__init__.py").write_text("")
    text = (package / f"{file}.py").read_text()
    assert old in text
    (package / f"{file}.py").write_text(text.replace(old, new))
    from stockroom import tools

    before = {**vars(tools), **{f"Worker.{k}": v for k, v in vars(getattr(tools, "Worker", object)).items()}}
    finders = list(sys.meta_path)
    with pytest.raises(ShardkitIncompatible) as error:
        table(WORK, SAVE).install("stockroom")
    assert named in str(error.value) and "of stockroom ?" in str(error.value) and "shardkit " in str(error.value)
    after = {**vars(tools), **{f"Worker.{k}": v for k, v in vars(getattr(tools, "Worker", object)).items()}}
    assert all(after[name] is before[name] for name in before) and after.keys() == before.keys()
    assert sys.meta_path == finders


def test_a_module_that_is_missing_is_refused_as_its_entry(table, package):
    (package / "late.py").unlink()
    with pytest.raises(ShardkitIncompatible, match=r"stockroom\.late\.Trainer\.save_model of stockroom \? is not"):
        table(SAVE, LATE).install("stockroom")
    import stockroom

    assert stockroom.save(None, "p") == ["stock save", "p"]


def test_what_does_not_fit_in_a_late_module_takes_everything_back(table, tmp_path):
    (tmp_path / "elsewhere.py").write_text("class Trainer:\n    def save(self):\n        return ['stock']\n")
    seam = Seam("elsewhere", "Trainer.save_model", ("self",), asks, replaced)
    installed = table(SAVE, seam)
    installed.install("stockroom")
    with pytest.raises(ShardkitIncompatible, match=r"elsewhere\.Trainer\.save_model of elsewhere \?"):
        importlib.import_module("elsewhere")
    import stockroom

    assert stockroom.save(None, "p") == ["stock save", "p"] and not installed.installed
    assert not any(isinstance(finder, seams._AfterImport) for finder in sys.meta_path)


def test_somebody_elses_wrapper_is_wrapped_and_stays_when_it_came_later(table):
    import stockroom

    Worker, stock = stockroom.tools.Worker, stockroom.tools.Worker.work
    Worker.work = lambda *args, **kwargs: ["theirs", *stock(*args, **kwargs)]
    first = Worker.work
    installed = table(WORK)
    installed.install("stockroom")
    assert Worker().work("a") == ["replaced", "theirs", "stock", "a", False]
    ours = Worker.work
    Worker.work = lambda *args, **kwargs: ["theirs too", *ours(*args, **kwargs)]
    installed.uninstall()
    assert Worker().work("a") == ["theirs too", "theirs", "stock", "a", False]  # what is left of ours passes on
    Worker.work = first


@pytest.mark.parametrize("since, until, there", [("2.0", "", False), ("", "1.5", False), ("1.5", "2", True)])
def test_entries_of_other_versions_are_passed_over(table, monkeypatch, since, until, there):
    monkeypatch.setattr(seams, "version_of", lambda package: "1.5.1.dev0")
    gone = Seam("stockroom.tools", "gone", ("self",), asks, replaced, since=since, until=until)
    installed = table(SAVE, gone)
    if there:
        with pytest.raises(ShardkitIncompatible, match=r"stockroom\.tools\.gone of stockroom 1\.5\.1\.dev0"):
            installed.install("stockroom")
    else:
        installed.install("stockroom")
        assert installed.describe()["stockroom.tools.gone"] == "not in stockroom 1.5.1.dev0"


# ---------------------------------------------------------------------------------------------- Accelerate's own


@pytest.fixture
def ours():
    import shardkit.accelerate

    shardkit.accelerate.uninstall()
    yield shardkit.accelerate
    shardkit.accelerate.uninstall()


def everything():
    """{where: object} of all that the table replaces, under every name that a module has for it."""
    import accelerate.accelerator

    from shardkit.accelerate.seams import _is_of_this_version
    from shardkit.accelerate.table import table

    out = {}
    for seam in filter(_is_of_this_version, table.seams):
        *path, attribute = seam.name.split(".")
        holder = sys.modules.get(seam.module)
        for part in path:
            holder = getattr(holder, part, None)
        value = getattr(holder, "__dict__", {}).get(attribute)
        if path and value is not None:
            out[str(seam)] = value
        elif value is not None:
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(attribute) is value:
                    out[f"{module.__name__}:{attribute}"] = value
    assert accelerate.accelerator.__name__ + ":save_fsdp_model" in out
    return out


def test_install_replaces_the_table_and_uninstall_leaves_nothing(ours):
    before = everything()
    ours.install()
    during = everything()
    assert [name for name in before if during[name] is before[name]] == []
    signatures = {name: inspect.signature(value) for name, value in before.items()}
    assert {name: inspect.signature(value) for name, value in during.items()} == signatures
    ours.install()
    assert all(value is during[name] for name, value in everything().items())
    ours.uninstall()
    after = everything()
    assert all(after[name] is before[name] for name in before)


def test_status_says_what_is_replaced_for_whom_and_in_which_versions(ours):
    import accelerate

    status = ours.status()
    assert not status["installed"] and not status["always"]
    assert status["versions"].keys() == {"shardkit", "accelerate", "transformers", "trl"}
    assert status["versions"]["accelerate"] == accelerate.__version__
    ours.install(always=False)
    assert ours.status()["installed"] and not ours.status()["always"]
    entries = ours.status()["entries"]
    assert entries["accelerate.accelerator.Accelerator.prepare"] == "installed"
    assert "transformers.trainer.Trainer.save_model" in entries
    ours.install()
    assert ours.status()["always"]
    ours.install(always=False)  # less is not asked for by asking again
    assert ours.status()["always"]
    ours.uninstall()
    assert not ours.status()["always"]
    ours.install(always=False)
    assert not ours.status()["always"]


@pytest.mark.parametrize("change", ["gone", "renamed"])
def test_an_accelerate_that_does_not_fit_changes_nothing(ours, monkeypatch, change):
    import accelerate
    from accelerate import Accelerator

    if change == "gone":
        monkeypatch.delattr(Accelerator, "clip_grad_value_")
    else:
        monkeypatch.setattr(Accelerator, "clip_grad_value_", lambda self, parameters, value: None)
    before = everything()
    with pytest.raises(ShardkitIncompatible) as error:
        ours.install()
    named = f"accelerate.accelerator.Accelerator.clip_grad_value_ of accelerate {accelerate.__version__}"
    assert named in str(error.value)
    assert all(value is before[name] for name, value in everything().items())
    assert not ours.status()["installed"] and not ours.status()["always"]


def test_who_did_not_ask_gets_what_accelerate_makes(ours, monkeypatch):
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model

    monkeypatch.delenv("FSDP_VERSION", raising=False)
    stock = [FullyShardedDataParallelPlugin(), FullyShardedDataParallelPlugin(fsdp_version=2)]
    ours.install(always=False)
    plugins = [FullyShardedDataParallelPlugin(), FullyShardedDataParallelPlugin(fsdp_version=2)]
    assert [type(plugin) for plugin in plugins] == [FullyShardedDataParallelPlugin] * 2
    assert [vars(plugin) for plugin in plugins] == [vars(plugin) for plugin in stock]
    assert save_fsdp_model.__module__ == "accelerate.utils.fsdp_utils"
    assert type(FullyShardedDataParallelPlugin(fsdp_version="shardkit")) is ours.ShardkitPlugin
    ours.install(always=True)
    assert type(FullyShardedDataParallelPlugin(fsdp_version=1)) is ours.ShardkitPlugin
    ours.uninstall()
    assert type(FullyShardedDataParallelPlugin(fsdp_version=1)) is FullyShardedDataParallelPlugin


def test_a_plugin_survives_pickle(ours):
    made = ours.ShardkitPlugin(sharding_strategy="zero2", no_sync=True)
    copied = pickle.loads(pickle.dumps(made))
    assert type(copied) is ours.ShardkitPlugin and copied.wrap_options == made.wrap_options and copied.no_sync


# ------------------------------------------------------------------------------- in processes, by the environment


def test_transformers_that_is_imported_later_or_halfway_gets_its_seams():
    out = python(
        """
        from transformers import Trainer  # imports Accelerate in the middle of its own import
        import shardkit.accelerate
        print(shardkit.accelerate.status()["entries"]["transformers.trainer.Trainer.save_model"])
        print(hasattr(Trainer.save_model, "__wrapped__"))
        import inspect, transformers.trainer
        print("adapter_only" in inspect.signature(transformers.trainer.save_fsdp_model).parameters)
        gates = [transformers.trainer.save_fsdp_model, transformers.trainer.load_fsdp_optimizer]
        shardkit.accelerate.uninstall()
        print([hasattr(f, "__wrapped__") for f in [transformers.trainer.save_fsdp_model, Trainer.save_model]])
        """,
        SHARDKIT_ACCELERATE="1",
    )
    assert out.split("\n")[:4] == ["installed", "True", "True", "[False, False]"]


@pytest.mark.parametrize(
    "code",
    [
        "import accelerate",  # which imports torch, and so runs the hook, in the middle
        "import torch, accelerate",
        "from shardkit.accelerate import ShardkitPlugin",
        "import shardkit.accelerate; shardkit.accelerate.install()",
        "from shardkit.accelerate import Accelerator",
        "import shardkit.accelerate.checkpoints",
    ],
)
def test_the_hook_installs_whoever_imports_accelerate_first(code):
    ask = "import shardkit.accelerate as a; print({v for k, v in a.status()['entries'].items() if k[0] == 'a'})"
    made = "from accelerate import FullyShardedDataParallelPlugin as P; print(type(P(fsdp_version=1)).__name__)"
    environment = {"FSDP_VERSION": "shardkit", "SHARDKIT_ACCELERATE": "always"}
    assert python(f"{code}; {made}; {ask}", **environment).split() == ["ShardkitPlugin", "{'installed'}"]


def test_an_idle_hook_imports_nothing_of_ours():
    out = python("import sys, torch; print([n for n in sys.modules if n.startswith('shardkit')])")
    assert eval(out) == ["shardkit_autoload"]


def test_a_hook_that_is_asked_imports_no_more_of_torch_than_accelerate_does():
    code = """
        import sys, torch, accelerate
        print("\\n".join(sorted(n for n in sys.modules if n.partition(".")[0] in ("torch", "accelerate"))))
        """
    stock, asked = python(code, SHARDKIT_ACCELERATE="0"), python(code, FSDP_VERSION="shardkit")
    assert set(asked.split()) - set(stock.split()) == set()
    assert "torch.distributed.checkpoint" not in asked.split() and "torch.distributed.fsdp" not in asked.split()
    loaded = python("import sys, torch, accelerate; print([n for n in sys.modules if 'shardkit.accelerate' in n])",
                    FSDP_VERSION="shardkit")  # fmt: skip
    assert set(eval(loaded)) == {"shardkit.accelerate", "shardkit.accelerate.table", "shardkit.accelerate.seams"}


def test_the_hook_never_raises(monkeypatch, capsys):
    import shardkit_autoload

    monkeypatch.setattr(shardkit_autoload, "_install_with_accelerate", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setenv("SHARDKIT_ACCELERATE", "1")
    shardkit_autoload.hook()
    assert "shardkit was not loaded into Accelerate: ZeroDivisionError" in capsys.readouterr().err
