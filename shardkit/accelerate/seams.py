"""Replacing a fixed list of functions that others own: each checked before, gated while it runs, and taken back whole.

A `Seam` names a public function or method and the parameters that its replacement relies on. `Table.install` looks all
of them up and checks them before it changes the first; what does not fit raises `ShardkitIncompatible` with everything
as it was. A module that is not imported yet gets its seams when it is, and one whose import is under way when the names
are there: whenever a replaced function is called or another module is imported meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ShardkitIncompatible


@dataclasses.dataclass(frozen=True)
class Seam:
    """One replaced function. `replacement(stock, *args, **kwargs)` runs where `ours(*args, **kwargs)` is true; in all
    other cases the stock function runs, as if nothing had been installed."""

    module: str
    name: str  # "function" or "Class.method"
    parameters: tuple[str, ...]
    ours: Callable[..., bool]
    replacement: Callable[..., Any]
    since: str = ""
    """Oldest version of the module's package that has it; it is passed over in older ones."""
    until: str = ""
    """First version that has no use for it any more."""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(frozen=True)
class _Change:
    """`stock`, found as `attribute` of `holders`, was replaced by `new`."""

    holders: tuple[Any, ...]
    attribute: str
    stock: Any
    new: Any

    def undo(self) -> None:
        """Puts `stock` back wherever `new` is, also in modules that imported it since. What somebody else has put in
        its place stays: it may call `new`, which then only passes on."""
        for holder in self.holders:
            if vars(holder).get(self.attribute) is self.new:
                setattr(holder, self.attribute, self.stock)
        if not inspect.isclass(self.holders[0]):
            for module, name in _names_of(self.new):
                setattr(module, name, self.stock)


class Table:
    """Seams that are installed and removed together."""

    def __init__(self, seams: Iterable[Seam]):
        self.seams = tuple(seams)
        self.installed: dict[Seam, _Change] = {}
        self.is_waiting = False  # for names of a module that is being imported
        self._finder: _AfterImport | None = None

    def install(self, needed: str) -> None:
        """Installs every seam: those in the package `needed` now, those of others when their modules are imported. ""
        imports nothing.

        Does nothing for seams that are installed. Raises ShardkitIncompatible, with everything taken back.
        """
        for seam in self.seams:
            if seam.package == needed and _is_of_this_version(seam):
                _import(seam)
        if self._finder is None:
            self._finder = _AfterImport(self)
            sys.meta_path.insert(0, self._finder)
        self.complete()

    def complete(self) -> None:
        """Installs the seams whose modules have been imported meanwhile. Raises ShardkitIncompatible as `install`."""
        self.is_waiting = False  # first: looking up imports nothing, but what others do in another thread may
        pending = [seam for seam in self.seams if seam not in self.installed and seam.module in sys.modules]
        pending = [seam for seam in pending if _is_of_this_version(seam)]
        ready = [seam for seam in pending if _is_ready(seam)]
        try:
            self._install(ready)
        except BaseException:
            self.uninstall()
            raise
        self.is_waiting = len(ready) < len(pending)

    def uninstall(self) -> None:
        """Puts back what was there."""
        self.is_waiting = False
        if self._finder is not None:
            with contextlib.suppress(ValueError):  # somebody else has taken it out
                sys.meta_path.remove(self._finder)
            self._finder = None
        changes = list(self.installed.values())
        self.installed.clear()
        for change in reversed(changes):
            change.undo()

    def _install(self, seams: list[Seam]) -> None:
        found = [(seam, *_look_up(seam)) for seam in seams]  # all of them before the first change
        for seam, holder, stock in found:
            attribute, new = seam.name.rpartition(".")[2], self._gated(seam, stock)
            holders = (holder,) if inspect.isclass(holder) else (holder, *_who_imported(attribute, stock))
            self.installed[seam] = _Change(holders, attribute, stock, new)
            for place in holders:
                setattr(place, attribute, new)

    def _gated(self, seam: Seam, stock: Callable) -> Callable:
        @functools.wraps(stock)
        def gate(*args, **kwargs):
            if self.is_waiting:
                self.complete()
            # Copies of the gate that nobody can find, in a closure for one, are stock again after uninstall().
            if seam in self.installed and seam.ours(*args, **kwargs):
                return seam.replacement(stock, *args, **kwargs)
            return stock(*args, **kwargs)

        return gate

    def describe(self) -> dict[str, str]:
        """{entry: "installed", "waits for its import", "not in PACKAGE VERSION" or "not installed"}."""
        out = {}
        for seam in self.seams:
            if seam in self.installed:
                out[str(seam)] = "installed"
            elif not _is_of_this_version(seam):
                out[str(seam)] = f"not in {seam.package} {version_of(seam.package)}"
            elif self._finder is not None:
                out[str(seam)] = "waits for its import"
            else:
                out[str(seam)] = "not installed"
        return out


@functools.lru_cache  # an import that is under way asks many times
def version_of(package: str) -> str:
    """The installed version; "?" where there is no record of one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _is_of_this_version(seam: Seam) -> bool:
    """Whether the installed package has it. Of a package without a version, everything is expected."""
    there = _numbers(version_of(seam.package)) if seam.since or seam.until else ()
    return not there or _numbers(seam.since) <= there and not (seam.until and _numbers(seam.until) <= there)


def _numbers(version: str) -> tuple[int, ...]:
    """Those of a release; a release of development counts as the release."""
    out = []
    for part in version.split("."):
        if not part.isdigit():
            break
        out.append(int(part))
    return tuple(out)


def _is_ready(seam: Seam) -> bool:
    """False where the import has begun and has not come to the name yet."""
    module = sys.modules[seam.module]
    importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return not importing or hasattr(module, seam.name.partition(".")[0])


def _import(seam: Seam) -> None:
    try:
        importlib.import_module(seam.module)
    except ModuleNotFoundError as error:
        if error.name != seam.module:
            raise
        raise _incompatible(seam, "is not there, and shardkit replaces it") from None


def _look_up(seam: Seam) -> tuple[Any, Callable]:
    """Where the stock function is, and the function. Raises ShardkitIncompatible."""
    holder: Any = sys.modules[seam.module]
    *path, attribute = seam.name.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    stock = getattr(holder, "__dict__", {}).get(attribute)
    if not callable(stock):
        raise _incompatible(seam, "is not there, and shardkit replaces it")
    known = inspect.signature(stock).parameters
    kinds = {parameter.kind for parameter in known.values()}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return holder, stock  # somebody else's replacement, which passes everything on
    missing = [name for name in seam.parameters if name not in known]
    if missing or [name for name in known if name in seam.parameters] != list(seam.parameters):
        relied = f"relies on {', '.join(missing)}" if missing else f"takes ({', '.join(seam.parameters)}) in this order"
        raise _incompatible(seam, f"takes ({', '.join(known)}); shardkit's replacement {relied}")
    return holder, stock


def _incompatible(seam: Seam, why: str) -> ShardkitIncompatible:
    return ShardkitIncompatible(
        f"{seam} of {seam.package} {version_of(seam.package)} {why} (shardkit {version_of('shardkit')}). Install "
        "versions that shardkit was tested with (see its README), or run without shardkit.accelerate."
    )


def _who_imported(name: str, function: Callable) -> list[Any]:
    """Every module that has the function under its name: `from accelerate.utils import save_fsdp_model` made copies."""
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]


def _names_of(function: Callable) -> list[tuple[Any, str]]:
    """Every (module, name) that is the function, under whatever name."""
    modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
    return [(m, name) for m in modules for name, value in list(vars(m).items()) if value is function]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Has the table completed after each of its modules was imported, and whenever it waits for one."""

    def __init__(self, table: Table):
        self.table, self.modules = table, {seam.module for seam in table.seams}

    def find_spec(self, fullname, path=None, target=None):
        if self.table.is_waiting:
            self.table.complete()
        if fullname not in self.modules:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, self._completed)
                return spec
        return None

    def _completed(self) -> None:
        if self.table._finder is self:  # or it was uninstalled while the module was being imported
            self.table.complete()


class _Then(importlib.abc.Loader):
    """A loader, and something to do after it."""

    def __init__(self, loader: Any, then: Callable[[], Any]):
        self._loader, self._then = loader, then

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # who looks later finds the real one
        self._loader.exec_module(module)
        self._then()
