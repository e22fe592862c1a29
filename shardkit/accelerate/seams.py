"""Replacing a fixed list of functions that others own: each checked before, gated while it runs, and taken back whole.

A `Seam` names a public function or method and the parameters that its replacement relies on. `Table.install` looks all
of them up and checks them before it changes the first; what does not fit raises `ShardkitIncompatible` with everything
as it was. A module that is not imported yet gets its seams when it is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
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

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass
class _Change:
    """`holder.attribute` was `before`."""

    holder: Any
    attribute: str
    before: Any

    def undo(self) -> None:
        setattr(self.holder, self.attribute, self.before)


class Table:
    """Seams that are installed and removed together."""

    def __init__(self, seams: Iterable[Seam]):
        self.seams = tuple(seams)
        self.installed: dict[Seam, list[_Change]] = {}
        self._finder: _AfterImport | None = None

    def install(self, needed: str) -> None:
        """Installs every seam: those in the package `needed` now, those of others when their modules are imported.

        Does nothing for seams that are installed. Raises ShardkitIncompatible, with everything taken back.
        """
        for seam in self.seams:
            if seam.package == needed:
                importlib.import_module(seam.module)
        if self._finder is None:
            self._finder = _AfterImport({seam.module for seam in self.seams}, self.complete)
            sys.meta_path.insert(0, self._finder)
        self.complete()

    def complete(self) -> None:
        """Installs the seams whose modules have been imported meanwhile. Raises ShardkitIncompatible as `install`."""
        try:
            self._install([seam for seam in self.seams if seam not in self.installed and _is_ready(seam)])
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Puts back what was there."""
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None
        for changes in self.installed.values():
            for change in reversed(changes):
                change.undo()
        self.installed.clear()

    def _install(self, seams: list[Seam]) -> None:
        found = [(seam, *_look_up(seam)) for seam in seams]  # all of them before the first change
        for seam, holder, stock in found:
            attribute = seam.name.rpartition(".")[2]
            new = _gated(seam, stock)
            changes = self.installed.setdefault(seam, [])
            for place in [holder] if inspect.isclass(holder) else _who_imported(attribute, stock):
                changes.append(_Change(place, attribute, stock))
                setattr(place, attribute, new)

    def describe(self) -> dict[str, str]:
        """{entry: "installed", "waits for its import" or why not}."""
        out = {}
        for seam in self.seams:
            if seam in self.installed:
                out[str(seam)] = "installed"
            elif self._finder is not None and seam.module not in sys.modules:
                out[str(seam)] = "waits for its import"
            elif self._finder is not None and _is_too_old(seam):
                out[str(seam)] = f"not in {seam.package} {version_of(seam.package)}"
            else:
                out[str(seam)] = "not installed"
        return out


def version_of(package: str) -> str:
    """The installed version; "?" where there is no record of one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _is_too_old(seam: Seam) -> bool:
    return bool(seam.since) and _numbers(version_of(seam.package)) < _numbers(seam.since)


def _numbers(version: str) -> tuple[int, ...]:
    out = []
    for part in version.split("."):
        if not part.isdigit():
            break
        out.append(int(part))
    return tuple(out)


def _is_ready(seam: Seam) -> bool:
    """False where the module is not imported, or where its import has begun and has not come to the name yet."""
    module = sys.modules.get(seam.module)
    if module is None or _is_too_old(seam):
        return False
    importing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return not importing or hasattr(module, seam.name.partition(".")[0])


def _look_up(seam: Seam) -> tuple[Any, Callable]:
    """Where the stock function is, and the function. Raises ShardkitIncompatible."""
    holder: Any = sys.modules[seam.module]
    *path, attribute = seam.name.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    stock = vars(holder).get(attribute) if holder is not None else None
    where = f"{seam} of {seam.package} {version_of(seam.package)}"
    advice = "Install versions that shardkit was tested with (see its README), or run without shardkit.accelerate."
    if not callable(stock):
        raise ShardkitIncompatible(f"{where} is not there, and shardkit replaces it. {advice}")
    known = inspect.signature(stock).parameters
    missing = [name for name in seam.parameters if name not in known]
    if missing and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        raise ShardkitIncompatible(
            f"{where} takes ({', '.join(known)}); shardkit's replacement relies on {', '.join(missing)}. {advice}"
        )
    return holder, stock


def _gated(seam: Seam, stock: Callable) -> Callable:
    @functools.wraps(stock)
    def gate(*args, **kwargs):
        if seam.ours(*args, **kwargs):
            return seam.replacement(stock, *args, **kwargs)
        return stock(*args, **kwargs)

    return gate


def _who_imported(name: str, function: Callable) -> list[Any]:
    """Every module that has the function under its name: `from accelerate.utils import save_fsdp_model` made copies."""
    return [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then()` whenever one of `modules` has been imported."""

    def __init__(self, modules: set[str], then: Callable[[], Any]):
        self.modules, self.then = modules, then

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.then)  # type: ignore[assignment]
        return spec


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
