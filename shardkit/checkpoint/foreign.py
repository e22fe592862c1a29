"""Weights in files of torch.save: a whole state dict, or one file per rank, as fairscale's FSDP leaves them.

A fairscale rank saves `{"model": model.local_state_dict(), "shard_metadata": model.local_metadata_dict()}`, or the
like: flat parameters, each with padding at its end, and what is needed to take them apart again.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .safetensors import Place

_WEIGHTS = ("model", "state_dict", "weights", "local_state_dict")
_METADATA = ("shard_metadata", "local_metadata", "local_metadata_dict", "metadata")


class TorchFile:
    """A state dict in one file, mapped into memory: what is not read is not loaded."""

    def __init__(self, path: Path):
        self.path = path
        state = _load(path)
        if not any(isinstance(v, torch.Tensor) for v in state.values()):
            state = next((state[k] for k in _WEIGHTS if isinstance(state.get(k), dict)), state)
        self._tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        if not self._tensors:
            raise CheckpointError(f"{path} holds no state dict. Its keys are {', '.join(map(str, list(state)[:8]))}.")

    def places(self) -> list[Place]:
        return [Place(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def aliases(self) -> dict[str, str]:
        """Names of a tensor that was listed before under another name."""
        first: dict[tuple, str] = {}
        keys = {n: (t.untyped_storage()._cdata, t.storage_offset(), t.shape) for n, t in self._tensors.items()}
        return {n: first[key] for n, key in keys.items() if first.setdefault(key, n) != n}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach().contiguous()


class FairscaleShards:
    """A folder with one file per rank, in the order of their names (numbers in them count as numbers)."""

    def __init__(self, folder: Path):
        import re

        found = [p for p in folder.iterdir() if p.suffix in (".pt", ".pth", ".bin")]
        files = sorted(found, key=lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", p.name)])
        if not files:
            raise CheckpointError(f"{folder} holds no .pt, .pth or .bin files.")
        self.weights, self.metadata = [], []
        for file in files:
            state = _load(file)
            weights = next((state[k] for k in _WEIGHTS if isinstance(state.get(k), dict)), None)
            metadata = next((state[k] for k in _METADATA if isinstance(state.get(k), dict)), None)
            if weights is None or metadata is None or "param_metadata" not in metadata:
                raise CheckpointError(
                    f"{file} is not what a rank of fairscale's FSDP saves: expected a dictionary with the weights "
                    f"(local_state_dict()) under one of {_WEIGHTS} and local_metadata_dict() under one of {_METADATA}."
                )
            self.weights.append(weights)
            self.metadata.append(metadata)
        self._where: dict[str, tuple[int, str, int, tuple[int, ...]]] = {}  # unit, flat parameter, offset, shape
        self._shared: dict[str, str] = {}
        for number, unit in enumerate(self.metadata[0]["param_metadata"]):
            for flat, described in unit["params"].items():
                at = 0
                for name, shape in zip(described["names"], described["shapes"], strict=True):
                    self._where[_join(unit["fsdp_path"], name)] = (number, flat, at, tuple(shape))
                    at += prod(shape)
            for source, target in unit["shared_param_info"]:
                path = unit["fsdp_path"]
                self._shared[_join(path, target)] = _join(path, source)
        self._buffers = {n: self.weights[0][n] for n in self.metadata[0]["buffer_names"] if n in self.weights[0]}

    def places(self) -> list[Place]:
        out = [Place(name, self._flat(at[0], at[1])[0].dtype, at[3]) for name, at in self._where.items()]
        out += [Place(name, t.dtype, tuple(t.shape)) for name, t in self._buffers.items()]
        known = {p.name: p for p in out}
        return out + [Place(n, known[s].dtype, known[s].shape) for n, s in self._shared.items() if s in known]

    def aliases(self) -> dict[str, str]:
        return dict(self._shared)

    def read(self, name: str) -> torch.Tensor:
        name = self._shared.get(name, name)
        if name in self._buffers:
            return self._buffers[name].detach().contiguous()
        number, flat, at, shape = self._where[name]
        parts, stop, start = [], at + prod(shape), 0
        for shard in self._flat(number, flat):
            low, high = max(at, start), min(stop, start + shard.numel())
            if low < high:
                parts.append(shard[low - start : high - start])
            start += shard.numel()
        out = torch.cat(parts) if len(parts) > 1 else (parts[0].clone() if parts else torch.empty(0))
        if out.numel() != prod(shape):
            raise CheckpointError(f"{name} is not complete: {out.numel()} of {prod(shape)} elements are in the files.")
        return out.view(shape)

    def _flat(self, number: int, flat: str) -> list[torch.Tensor]:
        """The ranks' parts of a flat parameter, without padding."""
        unit = self.metadata[0]["param_metadata"][number]
        out = []
        for weights, metadata in zip(self.weights, self.metadata, strict=True):
            shard = weights[_join(unit["fsdp_path"], flat)].detach().reshape(-1)
            padding = metadata["param_metadata"][number]["params"][flat]["padding"]
            out.append(shard[: shard.numel() - padding])
            if unit["no_broadcast_optim_state"]:  # a parameter that every rank has whole
                break
        return out


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _load(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is not a file of tensors that torch.load reads: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, expected a dictionary of tensors.")
    return state
