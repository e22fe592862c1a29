"""GPUs by name: memory, arithmetic, links. What `plan` and its predicted speeds rest on; every figure is stated here.

Peak arithmetic is the vendor's dense 16-bit figure, links are per direction and per GPU. Real programs reach a share of
each, stated as `ARITHMETIC` and `LINKS`; a prediction from them orders settings, it does not promise seconds.
"""

from __future__ import annotations

import dataclasses
import difflib

from ..errors import ConfigError

ARITHMETIC = 0.45  # share of peak arithmetic that matrix products of a training step reach
LINKS = 0.7  # share of link speed that large collectives reach
LATENCY = 20e-6  # seconds that a collective costs besides its bytes, times log2(ranks)
USABLE = 0.94  # share of memory for torch's allocator, after the CUDA context, NCCL and fragmentation


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of GPU in its usual machine. memory: bytes. flops: per second, 16-bit dense; flops32: TF32 or float32.
    node: GPUs of a machine. inside, across: bytes per second and direction of one GPU, within and between machines.
    host: bytes per second between GPU and host."""

    name: str
    memory: int
    flops: float
    flops32: float
    node: int
    inside: float
    across: float
    host: float

    @property
    def usable(self) -> int:
        """Bytes that training may use."""
        return int(self.memory * USABLE)


_GIB = 1 << 30
DEVICES = {
    d.name: d
    for d in (
        Device("v100-16g", 16 * _GIB, 125e12, 15.7e12, 8, 150e9, 12.5e9, 12e9),
        Device("v100-32g", 32 * _GIB, 125e12, 15.7e12, 8, 150e9, 12.5e9, 12e9),
        Device("t4-16g", 15 * _GIB, 65e12, 8.1e12, 4, 12e9, 3e9, 12e9),
        Device("a10-24g", 24 * _GIB, 125e12, 62e12, 4, 24e9, 6e9, 24e9),
        Device("l4-24g", 24 * _GIB, 121e12, 60e12, 8, 24e9, 6e9, 24e9),
        Device("l40s-48g", 48 * _GIB, 362e12, 183e12, 8, 24e9, 25e9, 24e9),
        Device("rtx3090-24g", 24 * _GIB, 71e12, 35e12, 4, 12e9, 1.2e9, 24e9),
        Device("rtx4090-24g", 24 * _GIB, 165e12, 82e12, 4, 24e9, 1.2e9, 24e9),
        Device("a100-40g", 40 * _GIB, 312e12, 156e12, 8, 300e9, 25e9, 24e9),
        Device("a100-80g", 80 * _GIB, 312e12, 156e12, 8, 300e9, 25e9, 24e9),
        Device("h100-80g", 80 * _GIB, 989e12, 494e12, 8, 450e9, 50e9, 50e9),
        Device("h200-141g", 141 * 10**9, 989e12, 494e12, 8, 450e9, 50e9, 50e9),
        Device("b200-180g", 180 * 10**9, 2250e12, 1100e12, 8, 900e9, 50e9, 50e9),
        Device("mi300x-192g", 192 * _GIB, 1307e12, 653e12, 8, 448e9, 50e9, 50e9),
    )
}


def device(name: str) -> Device:
    """The GPU of that name, "h100-80g", or another amount of its memory, "h100-64g". Raises ConfigError for others."""
    if name in DEVICES:
        return DEVICES[name]
    kind, _, amount = name.lower().rpartition("-")
    for known in DEVICES.values():
        if known.name.rpartition("-")[0] == kind and amount.endswith("g") and amount[:-1].replace(".", "", 1).isdigit():
            return dataclasses.replace(known, name=name, memory=int(float(amount[:-1]) * _GIB))
    near = difflib.get_close_matches(name, DEVICES, 3, 0.4)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"no GPU is called {name!r}.{hint} Known: {', '.join(DEVICES)}.")
