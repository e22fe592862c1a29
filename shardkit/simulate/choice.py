"""What `plan` may choose: one set of settings, as arguments of `auto_wrap` and as words in a table, and which modules
can be units."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch.nn as nn

from ..wrap import Policy, find_units, size_policy

# From the most memory to the least.
STRATEGIES = ("none", "zero2", "grad_op", "hybrid_grad_op", "hybrid", "full")


@dataclasses.dataclass(frozen=True)
class Units:
    """Which modules are units: those of some classes, of at least so many parameters, or what `name` says."""

    name: str = "auto"
    classes: tuple[str, ...] = ()
    at_least: int = 0

    @property
    def policy(self) -> Policy:
        """As `auto_wrap` takes it."""
        if self.classes:
            return lambda module: type(module).__name__ in self.classes
        if self.at_least:
            return size_policy(self.at_least)
        return "auto" if self == AUTO else None


AUTO, ONE = Units(), Units("the whole model")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One set of settings. recomputed: share of the blocks whose activations are computed again."""

    strategy: str
    recomputed: float = 0.0
    offload: bool = False
    mesh: tuple[int, int] | None = None
    units: Units = AUTO
    offload_activations: bool = False

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `auto_wrap`; the mesh as sizes."""
        out: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.units != AUTO:
            out["policy"] = self.units.policy
        if self.recomputed:
            out["activation_checkpointing"] = True if self.recomputed == 1 else self.recomputed
        if self.offload_activations:
            out["activation_offload"] = True
        if self.offload:
            out["cpu_offload"] = True
        if self.mesh is not None:
            out["device_mesh"] = self.mesh
        return out

    def needs_no_more_than(self, other: Choice) -> bool:
        """True where this one surely takes at most the other's memory."""
        if self.units != other.units or (self.mesh != other.mesh and self.mesh is not None):
            return False
        less = STRATEGIES.index(self.strategy) >= STRATEGIES.index(other.strategy)
        offloaded = self.offload >= other.offload and self.offload_activations >= other.offload_activations
        return less and self.recomputed >= other.recomputed and offloaded

    def __str__(self) -> str:
        parts = [self.strategy + (f" {self.mesh[0]}x{self.mesh[1]}" if self.mesh else "")]
        if self.units != AUTO:
            parts.append(f"units {self.units.name}")
        if self.recomputed:
            parts.append("checkpoint all blocks" if self.recomputed == 1 else f"checkpoint {self.recomputed:.0%}")
        if self.offload_activations:
            parts.append("activation offload")
        return ", ".join(parts + (["cpu offload"] if self.offload else []))


@dataclasses.dataclass(frozen=True)
class Granularity:
    """What a model's units can be, besides "auto". finer: None where blocks have no large parts. coarser: from the
    smallest to the whole model."""

    finer: Units | None
    coarser: tuple[Units, ...]


def granularity(model: nn.Module) -> Granularity:
    """Of a model that is not wrapped.

    Units are modules that are called, so several blocks are one unit only where a module holds them (the stages of a
    ResNet): a list of blocks is none.
    """
    auto = find_units(model)
    usual = _sizes(model, "auto")
    count = Counter(type(module).__name__ for _, module in auto)
    blocks = [module for _, module in auto if count[type(module).__name__] > 1]
    if not blocks:
        return Granularity(None, (ONE,) if auto else ())
    coarser = []
    if len(blocks) < len(auto):
        coarser.append(Units("blocks alone", classes=tuple(sorted({type(b).__name__ for b in blocks}))))
    groups = Units("groups of blocks", at_least=4 * int(median(_numel(b) for b in blocks)))
    *sizes, rest = _sizes(model, groups.policy)
    if 1 < len(sizes) < len(auto) and rest <= max(sizes):
        coarser.append(groups)
    finer = None
    parts = [min(large) for block in blocks for large in [_large_parts(block)] if len(large) > 1]
    if parts:
        finer = Units("parts of blocks", at_least=min(parts))
        *sizes, rest = _sizes(model, finer.policy)
        if len(sizes) <= len(auto) or rest > max(usual):  # what is too small for a unit stays with the root, all of it
            finer = None
    return Granularity(finer, (*coarser, ONE))


def _sizes(model: nn.Module, policy: Policy) -> list[int]:
    """Parameters of each unit that are in none inside it; the model's own last."""
    seen: set[nn.Parameter] = set()
    out = []
    for _, module in [*find_units(model, policy), ("", model)]:
        own = set(module.parameters()) - seen
        seen |= own
        out.append(sum(p.numel() for p in own))
    return out


def _large_parts(block: nn.Module) -> list[int]:
    """Parameters of the modules directly in a block, lists seen through, that hold a tenth of it or more."""
    whole = _numel(block)
    return [n for n in map(_numel, _parts(block)) if 10 * n >= whole]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
