"""From a module tree to units: who owns which parameter, which units borrow it, and whether all ranks agree."""

from __future__ import annotations

import warnings
import zlib

import torch
import torch.nn as nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm import Mesh
from ..config import MixedPrecision, Options
from ..errors import ConfigError, PlanMismatchError
from . import precision
from .flat_param import FlatParam, home_of
from .managed import KeepsPrecision, manage, unit_of
from .materialise import Materialiser
from .step import Step
from .unit import Entry, Unit

# Modules that only look rows up: their weight takes part in no backward formula.
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class _Draft:
    """A unit in the making: its modules, and the parameters it will own, in order of first sight."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.modules: list[nn.Module] = []
        self.owned: dict[nn.Parameter, tuple[str, nn.Module]] = {}
        # every parameter it computes with: parameter -> [(module, attribute or None, key)]
        self.places: dict[nn.Parameter, list[tuple[nn.Module, str | None, object]]] = {}


def build(
    root: nn.Module,
    nested: list[tuple[str, nn.Module]],
    mesh: Mesh,
    options: Options,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    mixin: type,
) -> Step:
    """Shards `root` in place, with a unit for it and one for each of `nested`, around units that exist already.

    Collective over the mesh: ranks compare the plan before anything is changed, and the weights (or, with
    `sync_module_states`, receive them from the first rank).
    Raises ConfigError for what cannot be wrapped, PlanMismatchError on all ranks where ranks differ.
    """
    existing = _existing_units(root)
    drafts = _draft(root, {m for _, m in nested}, existing, ignored_modules, ignored_params)
    _compare_plans(drafts, mesh, options)
    device = _compute_device(drafts, options)
    all_low = _is_all_low(drafts, mesh, options)
    borrowers = _borrowers(drafts)

    homes: dict[nn.Parameter, tuple[FlatParam, int]] = {}
    flats: dict[_Draft, list[FlatParam]] = {}
    materialiser = Materialiser(root, device, options.param_init_fn)
    without_values = _names_on_meta(drafts, mesh, options)
    for module, draft, is_last in _in_tree_order(root, drafts):
        # Values are made in the order in which building the model would have made them, so that random numbers fall
        # on the same weights; and a unit is sharded as soon as it is complete, so that only one is whole at a time.
        materialiser.fill(module)
        if is_last:
            _agree_on_weights(draft, mesh, options, without_values)
            flats[draft] = _make_flats(draft, borrowers, mesh, options, device, all_low)
            homes.update((p, (flat, i)) for flat in flats[draft] for i, p in enumerate(flat.params))
    units = [_make_unit(draft, flats[draft], homes, options) for draft in drafts]
    for draft, unit in zip(drafts, units, strict=True):
        for flat in unit.flats:
            flat.unit = unit
        for module in draft.modules:
            _take_over(module, unit, root, device, options, mixin)
    step = Step(units + existing, mesh, options)
    step.order.forget()  # sequences of models that came before, which may be gone
    return step


def _in_tree_order(root: nn.Module, drafts: list[_Draft]):
    """(module, its draft, whether it is the draft's last) in the order of `root.modules()`."""
    draft_of = {module: draft for draft in drafts for module in draft.modules}
    for module in root.modules():
        draft = draft_of.get(module)
        if draft is not None:
            yield module, draft, module is draft.modules[-1]


def _take_over(module, unit: Unit, root, device, options: Options, mixin: type) -> None:
    """Gives a module of a unit the class, the device and the dtypes it needs."""
    _move_buffers(module, device)
    mp = options.mixed_precision
    kept = False
    if mp is not None:
        cast = precision.cast_buffers(mp, module)
        unit.buffer_dtypes.update({(module, name): dtype for name, dtype in cast.items()})
        kept = mp.param_dtype is not None and precision.computes_apart(mp, module)
    if module is unit.module:
        manage(module, unit, mixin, ("forward", *(options.forward_methods if module is root else ())))
    elif kept:
        manage(module, unit, KeepsPrecision)
    elif _is_concerned(module, unit):
        manage(module, unit)


# ------------------------------------------------------------------------------------------------------ drafting


def _existing_units(root: nn.Module) -> list[Unit]:
    """Units made earlier below `root`, in the order of the module tree."""
    here = list(root.modules())
    units = list(dict.fromkeys(u for u in (unit_of(m) for m in here) if u is not None))
    inside = set(here)
    for unit in units:
        if unit.module is root:
            raise ConfigError(
                f"{type(root).__name__} is sharded already. Wrap a model once; to change its options, build it anew."
            )
        if unit.module not in inside:
            raise ConfigError(
                f"{type(root).__name__} is part of unit {unit.name!r}, which is sharded already. Wrap inner modules "
                "before outer ones."
            )
        unit.step.check_idle("wrapping")
    return units


def _draft(root, nested, existing, ignored_modules, ignored_params) -> list[_Draft]:
    done = {unit.module for unit in existing}
    drafts: list[_Draft] = []
    owner: dict[nn.Parameter, _Draft] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, draft: _Draft | None) -> None:
        if module in seen or module in ignored_modules or module in done:
            return
        seen.add(module)
        if draft is None or module in nested:
            draft = _Draft(name, module)
            drafts.append(draft)
        draft.modules.append(module)
        for key, param in module._parameters.items():
            if param is None or param in ignored_params:
                continue
            _check_param(param, f"{name}.{key}" if name else key)
            if param not in owner and home_of(param) is None:
                owner[param] = draft
                draft.owned[param] = (f"{name}.{key}" if name else key, module)
            draft.places.setdefault(param, []).append((module, "_parameters", key))
        for key, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key, draft)

    visit(root, "", None)
    for draft in drafts:
        for module in draft.modules:
            for attribute, key, param in _cached_params(module):
                if param in owner or home_of(param) is not None:
                    draft.places.setdefault(param, []).append((module, attribute, key))
    return drafts


def _cached_params(module: nn.Module):
    """(attribute or None, key, parameter) of parameters that a module keeps outside of `_parameters`: an RNN's
    `_flat_weights`, or a plain list of another module's weights."""
    for attribute, value in module.__dict__.items():
        if isinstance(value, nn.Parameter):
            yield None, attribute, value
        elif isinstance(value, list) and not attribute.startswith("_forward"):
            for i, item in enumerate(value):
                if isinstance(item, nn.Parameter):
                    yield attribute, i, item
        elif isinstance(value, dict) and attribute not in ("_parameters", "_buffers", "_modules"):
            for key, item in value.items():
                if isinstance(item, nn.Parameter):
                    yield attribute, key, item


def _check_param(param: nn.Parameter, name: str) -> None:
    if is_traceable_wrapper_subclass(param):  # DTensor, quantised weights: their memory is elsewhere
        raise ConfigError(
            f"{name} is a {type(param).__name__}. Only plain parameters can be sharded; pass it in ignored_states."
        )
    if param.layout != torch.strided:
        raise ConfigError(f"{name} has layout {param.layout}. Only dense parameters can be sharded.")


def _borrowers(drafts: list[_Draft]) -> dict[nn.Parameter, tuple[str, ...]]:
    """For each new parameter, the names of the units that compute with it."""
    users: dict[nn.Parameter, list[str]] = {}
    for draft in drafts:
        for param in draft.places:
            users.setdefault(param, []).append(draft.name)
    return {param: tuple(names) for param, names in users.items()}


# ---------------------------------------------------------------------------------------------------- agreement


def _compare_plans(drafts: list[_Draft], mesh: Mesh, options: Options) -> None:
    """Raises PlanMismatchError on all ranks unless every rank is about to build the same units."""
    if mesh.world.size == 1 or not mesh.world.talks:
        return
    lines = [f"options {dataclass_summary(options)}"]
    for draft in drafts:
        lines.append(f"unit {draft.name or '(root)'}: {type(draft.module).__name__}")
        for param, (name, _) in draft.owned.items():
            lines.append(f"{name}: {tuple(param.shape)} {param.dtype} requires_grad={param.requires_grad}")
    digest = zlib.crc32("\n".join(lines).encode())
    digests = mesh.world.all_gather_object(digest)
    if len(set(digests)) == 1:
        return
    plans = mesh.world.all_gather_object(lines)
    for rank, other in enumerate(plans):
        for mine, theirs in zip([*plans[0], "(nothing)"], [*other, "(nothing)"], strict=False):
            if mine != theirs:
                raise PlanMismatchError(
                    f"ranks {mesh.world.ranks[0]} and {mesh.world.ranks[rank]} wrap different models: {mine!r} on the "
                    f"first, {theirs!r} on the second. Build the same model with the same options on every rank."
                )
    raise PlanMismatchError("ranks wrap models of different length. Build the same model on every rank.")


def dataclass_summary(options: Options) -> str:
    return f"{options.sharding_strategy} {options.drop_after_forward} {options.mixed_precision} {options.cpu_offload}"


def _names_on_meta(drafts: list[_Draft], mesh: Mesh, options: Options) -> set[str]:
    """Names of parameters that have no values yet on some rank, where `sync_module_states` asks for those."""
    if options.sync_module_states != "differing" or mesh.world.size == 1 or not mesh.world.talks:
        return set()
    mine = [name for draft in drafts for param, (name, _) in draft.owned.items() if param.is_meta]
    return {name for names in mesh.world.all_gather_object(mine) for name in names}


def _agree_on_weights(draft: _Draft, mesh: Mesh, options: Options, without_values: set[str]) -> None:
    """Takes the first rank's parameters and buffers, or raises PlanMismatchError on all ranks if they differ."""
    if mesh.world.size == 1 or not mesh.world.talks:
        return
    if not options.sync_module_states:
        _verify_weights(draft, mesh)
        return
    taken = {param: name for param, (name, _) in draft.owned.items()}
    if options.sync_module_states == "differing":
        different = without_values | _differing(taken, mesh)
        taken = {param: name for param, name in taken.items() if name in different}
    tensors = [p.data for p in taken]
    tensors += [b for module in draft.modules for b in module._buffers.values() if b is not None]
    for tensor in tensors:
        whole = tensor.contiguous()
        mesh.world.broadcast(whole).wait()
        if whole is not tensor:
            tensor.copy_(whole)


def _differing(named: dict[nn.Parameter, str], mesh: Mesh) -> set[str]:
    """Names of the parameters whose sample is not the same on all ranks. One object gather."""
    sums = {name: _checksum(param, sample=True) for param, name in named.items()}
    return {name for other in mesh.world.all_gather_object(sums) for name in other if other[name] != sums[name]}


def _verify_weights(draft: _Draft, mesh: Mesh) -> None:
    """Raises PlanMismatchError on all ranks if their parameters differ."""
    sums = [(name, _checksum(param)) for param, (name, _) in draft.owned.items()]
    if len(set(mesh.world.all_gather_object(zlib.crc32(repr(sums).encode())))) == 1:
        return
    details = mesh.world.all_gather_object(sums)
    for rank, other in enumerate(details):
        different = [mine[0] for mine, theirs in zip(details[0], other, strict=True) if mine != theirs]
        if different:
            raise PlanMismatchError(
                f"{different[0]} and {len(different) - 1} more parameters of unit {draft.name or '(root)'!r} differ "
                f"between ranks {mesh.world.ranks[0]} and {mesh.world.ranks[rank]}; sharding would mix "
                "two models. Seed every rank alike before building the model, or pass sync_module_states=True to take "
                "the first rank's."
            )


_SAMPLE = 4096  # elements from each end of a parameter


def _checksum(param: nn.Parameter, sample: bool = False) -> int:
    data = param.detach()
    if sample and data.is_contiguous() and data.numel() > 2 * _SAMPLE:
        data = data.view(-1)
        data = torch.cat([data[:_SAMPLE], data[-_SAMPLE:]])
    data = data.contiguous().view(-1)
    if data.numel() == 0 or data.device.type == "meta":
        return 0
    if data.is_complex():
        data = torch.view_as_real(data).view(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
    # Weighted by position, so that permuted rows differ; in pieces, because each becomes int64 first.
    weights = torch.arange(1, (1 << 18) + 1, device=data.device)
    pieces = data.view(integers).split(1 << 18)
    return sum((i + 1) * int((piece.long() * weights[: len(piece)]).sum()) for i, piece in enumerate(pieces))


# ------------------------------------------------------------------------------------------------------- dtypes

_LOW = (torch.float16, torch.bfloat16)


def _is_all_low(drafts: list[_Draft], mesh: Mesh, options: Options) -> bool:
    """True for a model that arrives in a 16-bit dtype throughout, as `transformers` loads them. Says once what that
    means."""
    dtypes = {p.dtype for draft in drafts for p in draft.owned if p.dtype.is_floating_point}
    if len(dtypes) != 1 or not dtypes <= set(_LOW):
        return False
    chosen = options.mixed_precision.master_dtype if options.mixed_precision is not None else None
    if chosen is None and mesh.world.rank == 0:
        warnings.warn(
            f"the model's parameters are {dtypes.pop()}; trainable ones get float32 masters, which the optimizer "
            "updates, and compute in the dtype they had. MixedPrecision(master_dtype=...) chooses another.",
            stacklevel=2,
        )
    return True


def _master_dtype(param: nn.Parameter, mp: MixedPrecision | None, all_low: bool) -> torch.dtype:
    """dtype of the local shard: updates smaller than a 16-bit step would be lost in 16 bits."""
    if not param.dtype.is_floating_point or not param.requires_grad:
        return param.dtype
    if mp is not None and mp.master_dtype is not None:
        return mp.master_dtype
    mixed = mp is not None and mp.param_dtype in _LOW
    return torch.float32 if param.dtype in _LOW and (all_low or mixed) else param.dtype


# ----------------------------------------------------------------------------------------------------- devices


def _compute_device(drafts: list[_Draft], options: Options) -> torch.device:
    if options.device_id is not None:
        return options.device_id
    kinds = {p.device.type for draft in drafts for p in draft.owned} - {"meta"}
    accelerator = torch.accelerator.current_accelerator()
    if kinds == {"cpu"} or not kinds:
        if options.cpu_offload is not None and accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
        if not kinds and accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
        return torch.device("cpu")
    devices = {p.device for draft in drafts for p in draft.owned if p.device.type not in ("meta", "cpu")}
    if len(devices) > 1:
        raise ConfigError(f"the model's parameters are on several devices: {sorted(map(str, devices))}. Use one.")
    return devices.pop()


def _is_concerned(module: nn.Module, unit: Unit) -> bool:
    """True for a module that keeps something of which a state dict must know more than the value in place."""
    sharded = any(home_of(p) for p in module._parameters.values() if p is not None)
    return sharded or any(m is module for m, _ in unit.buffer_dtypes)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.device.type != device.type:
            module._buffers[key] = buffer.to(device)


# -------------------------------------------------------------------------------------------------------- making


def _make_flats(draft, borrowers, mesh: Mesh, options: Options, device: torch.device, all_low: bool) -> list[FlatParam]:
    """One flat parameter per kind: dtypes, requires_grad, the units that need it, and whether backward does."""
    mp = options.mixed_precision
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for param, (name, module) in draft.owned.items():
        compute = param.dtype
        if mp is not None and mp.param_dtype is not None and param.dtype.is_floating_point:
            if not precision.keeps_own_dtype(mp, module, name):
                compute = mp.param_dtype
        master = _master_dtype(param, mp, all_low)
        looked_up = all(isinstance(m, _LOOKUPS) and m.max_norm is None for m, _, _ in draft.places[param])
        looked_up &= len(borrowers[param]) == 1
        kind = (master, compute, param.requires_grad, borrowers[param], looked_up)
        kinds.setdefault(kind, []).append(param)
    offload = options.cpu_offload
    return [
        FlatParam(
            [draft.owned[p][0] for p in params],
            params,
            mesh,
            master_dtype=master,
            compute_dtype=compute,
            reduce_dtype=mp.reduce_dtype if mp is not None else None,
            device=device,
            shard_device=torch.device("cpu") if offload is not None else device,
            pin_memory=offload is not None and offload.pin_memory,
            persistent=not options.strategy.drop_after_backward,
            needed_in_backward=not looked_up,
        )
        for (master, compute, _, _, looked_up), params in kinds.items()
    ]


def _make_unit(draft: _Draft, flats: list[FlatParam], homes, options: Options) -> Unit:
    entries = []
    for param, places in draft.places.items():
        flat, index = homes.get(param) or home_of(param)  # type: ignore[misc]
        entries.append(Entry(flat, index, places))
    return Unit(draft.name, draft.module, flats, entries, options.mixed_precision)
