"""Which modules become units: a module tree and a policy in, a list of unit roots out. Changes no module.

A policy is one of

- ``"auto"``: the repeated blocks, and large embeddings and heads outside them (see :func:`find_units`);
- a set, tuple or list of module classes: every instance, as FSDP1's ``ModuleWrapPolicy``;
- a predicate ``module -> bool``, as FSDP1's ``lambda_auto_wrap_policy``;
- ``size_policy(n)``: every module that gathers n parameters or more, as FSDP1's ``size_based_auto_wrap_policy``;
- ``None``: no units below the model itself.

Some modules are never units, whatever a policy says, and are passed over silently; their parameters belong to the
unit around them. A unit gathers its weights when it is *called*, so these could not work:

- containers without a forward of their own (``ModuleList``, ``ModuleDict``, ``ParameterList``, ...): nobody calls
  them. A ``Sequential`` has a forward;
- modules whose parent reads their weights without calling them: whatever is below an ``nn.MultiheadAttention``, below
  an ``nn.TransformerEncoderLayer`` (its inference fast path) or below the ``parametrizations`` of a module.

Nor is a module that is ignored, is below an ignored one, or has no parameters left for it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from .errors import ConfigError

__all__ = ["SizePolicy", "find_units", "size_policy"]

# What "auto" calls large. A class of blocks that holds less than this share of the model is not worth its own
# collectives; nor is an embedding or head much smaller than the blocks, whose gather it would only delay.
_SMALLEST_SHARE = 0.01
_SMALLEST_PART_OF_A_BLOCK = 0.25


@dataclass(frozen=True)
class SizePolicy:
    """A unit is a module whose parameters outside nested units number ``min_num_params`` or more, leaves first."""

    min_num_params: int


def size_policy(min_num_params: int) -> SizePolicy:
    """Policy that makes a unit of every module that gathers at least ``min_num_params`` parameters (elements).

    Leaves first: a large ``Linear`` is a unit, and small modules add up until one that contains them is large enough.

    Raises:
        ConfigError: ``min_num_params`` is not a whole number of at least 1.
    """
    if not isinstance(min_num_params, int | float) or min_num_params < 1 or not float(min_num_params).is_integer():
        raise ConfigError(f"size_policy(min_num_params={min_num_params!r}): expected a whole number of parameters, at "
                         "least 1, for example size_policy(100_000_000).")
    return SizePolicy(int(min_num_params))


Policy = str | Collection[type[nn.Module]] | Callable[[nn.Module], bool] | SizePolicy | None


def from_torch_policy(policy: object) -> Policy:
    """A policy of FSDP1 (`ModuleWrapPolicy`, `transformer_auto_wrap_policy`, `size_based_auto_wrap_policy`,
    `lambda_auto_wrap_policy`, or any callable of its signature) as one of ours; ours are returned as they are."""
    classes = getattr(policy, "_module_classes", None)
    if classes is not None:
        return set(classes)
    function, bound = (policy.func, policy.keywords) if isinstance(policy, partial) else (policy, {})
    if bound.get("transformer_layer_cls"):
        return set(bound["transformer_layer_cls"])
    if "min_num_params" in bound or getattr(function, "__name__", "") == "size_based_auto_wrap_policy":
        return SizePolicy(int(bound.get("min_num_params", 100_000_000)))
    if "lambda_fn" in bound:
        return bound["lambda_fn"]
    if callable(function) and "recurse" in getattr(getattr(function, "__code__", None), "co_varnames", ()):
        call = cast(Callable, policy)
        return lambda module: bool(call(module=module, recurse=False, nonwrapped_numel=_numel(module.parameters())))
    return cast(Policy, policy)


def find_units(
    model: nn.Module, policy: Policy = "auto", ignored: Collection[nn.Module] = frozenset()
) -> list[tuple[str, nn.Module]]:
    """The unit roots that ``policy`` finds in ``model``, other than ``model`` itself, as ``(name, module)``.

    Children come before parents, otherwise in order of registration; a module that is registered in several places
    is listed once, under its first name.

    ``"auto"`` takes, in this order:

    1. modules whose class is named in a ``_no_split_modules`` of the model or of a part of it, as models of
       ``transformers`` have them; one that is not repeated only if no other is, or if it is as large as the others;
    2. in what is left, the outermost elements of ``ModuleList`` and ``Sequential`` that share a class: the blocks of
       a ResNet's stages, the layers of a mixture of experts rather than its experts. Plain ``Sequential`` and lists in
       lists are seen through. Norms, and classes that hold less than 1 % of the model, are not worth a unit;
    3. outside all of these, an embedding, head or other leaf of at least a quarter of a typical block (of at least
       1 % of a model without blocks).

    A leaf whose parameter another module shares (tied embeddings) stays with the model, so that one gather serves
    both. Nothing inside a repeated block is a unit.

    Args:
        model: the tree to look at. Parameters may be on any device, meta and fake included.
        policy: see the module docstring.
        ignored: modules that are no units and contain none, and whose parameters count for nobody.

    Raises:
        ConfigError: (a ValueError) ``policy`` is none of the above, or the model or a unit is a
            ``torch.jit.ScriptModule``.

    Warns:
        UserWarning: ``policy`` is a collection of classes and yields no unit; names the classes that would.
    """
    _check_policy(policy)
    _refuse_script("the model", model)
    tree = _Tree(model, ignored)
    if isinstance(policy, SizePolicy):
        return _units_of_size(tree, policy.min_num_params)
    if policy is None:
        return []
    if isinstance(policy, str):
        return _units_among(tree, _automatic(tree))
    if not isinstance(policy, Collection):
        return _units_among(tree, {module for module in tree.names if policy(module)})
    classes = tuple(policy)
    units = _units_among(tree, {module for module in tree.names if isinstance(module, classes)})
    if not units and not isinstance(model, classes):
        _warn_no_match(tree, classes)
    return units


class _Tree:
    """Facts about one module tree.

    Attributes:
        names: every module but the model itself and what is below ignored ones, children before parents.
        passive: modules whose weights a module above them reads without calling them.
        owners: the modules that hold a parameter directly, ignored ones included, by the parameter.
    """

    def __init__(self, model: nn.Module, ignored: Collection[nn.Module]) -> None:
        self.model = model
        below_ignored = {module for root in ignored for module in root.modules()}
        self.names = {module: name for name, module in _bottom_up(model)
                      if module is not model and module not in below_ignored}
        self.passive: set[nn.Module] = set()
        self.owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
                self.passive.update(below for below in module.modules() if below is not module)
            if parametrize.is_parametrized(module):
                self.passive.update(module.get_submodule("parametrizations").modules())
            for param in module.parameters(recurse=False):
                self.owners.setdefault(param, []).append(module)
        self._ignored_params = {param for module in below_ignored for param in module.parameters(recurse=False)}

    def params(self, module: nn.Module) -> set[nn.Parameter]:
        """The parameters at and below ``module`` that are not ignored."""
        return set(module.parameters()) - self._ignored_params

    def may_be_unit(self, module: nn.Module) -> bool:
        return module in self.names and module not in self.passive and _has_forward(module)

    def is_leaf(self, module: nn.Module) -> bool:
        """Whether no module below could be a unit with parameters."""
        return not any(below is not module and self.may_be_unit(below) and self.params(below)
                       for below in module.modules())

    def is_tied(self, module: nn.Module) -> bool:
        """Whether a module outside of this one holds one of its parameters as well."""
        inside = set(module.modules())
        return any(owner not in inside for param in self.params(module) for owner in self.owners[param])


def _bottom_up(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(name, module)`` of every module once, after all modules below it."""
    seen = set()

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for key, child in module.named_children():
            yield from visit(f"{name}.{key}" if name else key, child)
        yield name, module

    return visit("", model)


def _kind(module: nn.Module) -> tuple[str, str]:
    """A module's class by name: the classes that shardkit generates keep the name of the class they extend."""
    return type(module).__module__, type(module).__qualname__


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _units_among(tree: _Tree, selected: Collection[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Those of ``selected`` that can be units, bottom-up."""
    units: dict[nn.Module, str] = {}
    for module, name in tree.names.items():
        if module not in selected or not tree.may_be_unit(module):
            continue
        nested = [tree.params(below) for below in module.modules() if below in units]
        if tree.params(module).difference(*nested):
            _refuse_script(f"unit {name!r}", module)
            units[module] = name
    return [(name, module) for module, name in units.items()]


def _units_of_size(tree: _Tree, min_num_params: int) -> list[tuple[str, nn.Module]]:
    units: list[tuple[str, nn.Module]] = []
    taken: set[nn.Parameter] = set()
    for module, name in tree.names.items():
        own = tree.params(module) - taken
        if tree.may_be_unit(module) and _numel(own) >= min_num_params:
            _refuse_script(f"unit {name!r}", module)
            units.append((name, module))
            taken |= own
    return units


def _automatic(tree: _Tree) -> set[nn.Module]:
    """The modules that ``"auto"`` selects; none is inside another."""
    blocks = _declared_blocks(tree)
    blocks |= _repeated_blocks(tree, blocks)
    inside = {module for block in blocks for module in block.modules()}
    if blocks:
        threshold = _SMALLEST_PART_OF_A_BLOCK * median(_numel(tree.params(block)) for block in blocks)
    else:
        threshold = _SMALLEST_SHARE * _numel(tree.params(tree.model))
    leaves = {module for module in tree.names
              if module not in inside and tree.may_be_unit(module) and tree.is_leaf(module)
              and not _is_norm_like(tree, module) and not tree.is_tied(module)
              and _numel(tree.params(module)) >= threshold}
    return blocks | leaves


def _declared_blocks(tree: _Tree) -> set[nn.Module]:
    """Outermost modules whose class a ``_no_split_modules`` names."""
    names = {name for module in tree.model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    declared = [module for module in tree.names if type(module).__name__ in names and tree.may_be_unit(module)]
    count = Counter(_kind(module) for module in declared)
    repeated = [module for module in declared if count[_kind(module)] > 1]
    if repeated:
        # Embeddings are declared as well, for they must stay on one device; so is the only layer of a small tower.
        large = _SMALLEST_PART_OF_A_BLOCK * median(_numel(tree.params(module)) for module in repeated)
        declared = [module for module in declared if count[_kind(module)] > 1
                    or (_numel(tree.params(module)) >= large and not tree.is_tied(module))]
    below = {module for block in declared for module in block.modules() if module is not block}
    return {module for module in declared if module not in below}


def _repeated_blocks(tree: _Tree, known: set[nn.Module]) -> set[nn.Module]:
    """Outermost elements of lists that share a class, neither inside a known block nor around one."""

    def could_be(module: nn.Module) -> bool:
        return (tree.may_be_unit(module) and not _is_norm_like(tree, module)
                and not (tree.is_leaf(module) and tree.is_tied(module))
                and known.isdisjoint(module.modules()))

    found: dict[tuple[str, str], set[nn.Module]] = {}
    regions, seen = [tree.model], set(known)
    while regions:
        elements = [element for region in regions for element in _elements(region, seen)]
        eligible = {element for element in dict.fromkeys(elements) if could_be(element)}
        # Counted by position: one module that is listed twice (shared layers) runs twice and is a block, too.
        count = Counter(_kind(element) for element in elements if element in eligible)
        repeated = {element for element in eligible if count[_kind(element)] > 1}
        for element in repeated:
            found.setdefault(_kind(element), set()).add(element)
        regions = [element for element in dict.fromkeys(elements) if element not in repeated]
    smallest = _SMALLEST_SHARE * _numel(tree.params(tree.model))
    worthwhile = (group for group in found.values()
                  if _numel(set().union(*(tree.params(module) for module in group))) >= smallest)
    return set().union(*worthwhile)


def _elements(region: nn.Module, seen: set[nn.Module], in_list: bool = False) -> Iterator[nn.Module]:
    """The elements of the outermost lists at and below ``region``; lists in lists are seen through.

    A module in ``seen`` is passed over. What is looked into joins it, so that a list which is registered in two places
    counts once.
    """
    if region in seen:
        return
    seen.add(region)
    in_list = in_list or isinstance(region, nn.ModuleList | nn.Sequential)
    for child in region._modules.values():  # children() would drop repetitions
        if child is not None and in_list and _has_forward(child) and type(child) is not nn.Sequential:
            yield child
        elif child is not None:
            yield from _elements(child, seen, in_list)


def _is_norm_like(tree: _Tree, module: nn.Module) -> bool:
    """Whether the module has no matrix: what it holds is small and joins the unit around it."""
    return all(param.ndim < 2 for param in tree.params(module))


def _check_policy(policy: object) -> None:
    if policy is None or isinstance(policy, SizePolicy) or (isinstance(policy, str) and policy == "auto"):
        return
    choices = ('Use "auto", a set of module classes such as {nn.TransformerEncoderLayer}, a predicate(module) -> bool, '
               "shardkit.size_policy(n), or None for no nested units.")
    if isinstance(policy, set | frozenset | tuple | list):
        wrong = [item for item in policy if not (isinstance(item, type) and issubclass(item, nn.Module))]
        if wrong:
            raise ConfigError(f"policy holds {wrong[0]!r}, which is not a subclass of nn.Module: a collection must "
                             f"hold the classes themselves, not their names or instances. {choices}")
        if not policy:
            raise ConfigError(f"policy is an empty {type(policy).__name__}, which selects nothing. {choices}")
        return
    if isinstance(policy, type):
        raise ConfigError(f"policy is the class {policy.__name__}; put it into a set: {{{policy.__name__}}}. {choices}")
    if isinstance(policy, Collection | nn.Module) or not callable(policy):
        raise ConfigError(f"policy={policy!r} is not a policy. {choices}")


def _refuse_script(what: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"{what} is a torch.jit.ScriptModule ({module.original_name}), which cannot be sharded: its compiled code "
            "holds its parameters where they cannot be replaced while it runs, and scripting after wrapping is not "
            "possible either. Pass the module it was scripted from (torch.compile works), or list it in "
            "ignored_modules.")


def _warn_no_match(tree: _Tree, classes: tuple[type[nn.Module], ...]) -> None:
    blocks = sorted({type(module).__name__ for module in _automatic(tree)})
    asked = ", ".join(sorted(cls.__name__ for cls in classes))
    there = f"Classes here that would make units: {', '.join(blocks)}." if blocks else "It has no repeated blocks."
    warnings.warn(f"policy {{{asked}}} selects no module of {type(tree.model).__name__} that can be a unit, so all of "
                  f"its parameters are gathered at once. {there} Pass one of those, or \"auto\".",
                  stacklevel=4)  # the line that called auto_wrap
