"""Predicted seconds of a training step, for putting settings in order: arithmetic, bytes on links, bytes to the host.

    overlapped = max(arithmetic, messages) + exposed min(arithmetic, messages)
    step = max(overlapped, activations) + 0.1 min(overlapped, activations) + latency + host

Arithmetic: the forward's matrix products, counted by running it under fake tensors, three times (backward is two), and
once more for the share that is recomputed. Messages: what a rank sends with bandwidth-optimal collectives, over the
slowest link its group uses. They overlap but for the first gather and the last reduction, which have nothing to hide
behind: `exposed` is the largest unit's share of the bytes, and a tenth at least. Latency: of each collective, so that
many small units cost more than few large ones. Host: bytes of offloaded shards and gradients, and the optimizer's step
at the host's memory speed. Activations: bytes of those that go to the host and come back, beside the computation. All
rates are those of `devices.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch.nn as nn

from .devices import ARITHMETIC, LATENCY, LINKS, Device
from .observe import steps_in

SHOWS = 0.1  # share of what overlaps that still shows
HOST_MEMORY = 15e9  # bytes per second at which one process's optimizer step goes through host memory


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one rank sends in a training step: bytes within the shard group and across replicas, number of collectives;
    bytes of shards and gradients that cross to the host, and that the host's optimizer touches; bytes of activations
    that cross. exposed: share of the messages that nothing can hide."""

    shard_ranks: int
    replicas: int
    shard: float
    replicate: float
    collectives: int
    host: float = 0.0
    host_optimizer: float = 0.0
    activations: float = 0.0
    exposed: float = SHOWS


def traffic(model: nn.Module) -> Traffic:
    """Of a wrapped model; zeros where nothing is sharded."""
    from ..describe import _sent

    shard = replicate = host = touched = 0.0
    collectives, n, m = 0, 1, 1
    units: dict[Any, float] = {}
    for step in steps_in(model):
        n, m = step.mesh.shard.size, step.mesh.replicate.size
        for flat in step.flats:
            sent = _sent(step, flat.unit, flat)
            trained = any(p.requires_grad for p in flat.params)
            reduced = flat.layout.numel * flat.reduce_dtype.itemsize if trained else 0
            across = 2 * reduced / n * (m - 1) / m
            units[flat.unit] = units.get(flat.unit, 0.0) + sent
            shard += sent - across
            replicate += across
            collectives += 2 + (step.options.drop_after_forward and flat.needed_in_backward) + (m > 1)
            if step.options.cpu_offload is not None:
                local = flat.layout.shard_numel
                host += local * (2 * flat.compute_dtype.itemsize + flat.reduce_dtype.itemsize * trained)
                touched += local * 4 * 7 * trained  # Adam reads four and writes three values of each parameter
    largest = max(units.values(), default=0.0)
    exposed = max(SHOWS, largest / sum(units.values())) if largest else SHOWS
    return Traffic(n, m, shard, replicate, collectives, host, touched, exposed=exposed)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Parts of a step's predicted time."""

    arithmetic: float
    messages: float
    latency: float
    host: float
    activations: float = 0.0
    exposed: float = SHOWS

    @property
    def total(self) -> float:
        overlapped = _beside(self.arithmetic, self.messages, self.exposed)
        return _beside(overlapped, self.activations, SHOWS) + self.latency + self.host


def _beside(a: float, b: float, shows: float) -> float:
    """Seconds of two things at the same time, of which a share of the shorter shows."""
    return max(a, b) + shows * min(a, b)


def seconds(sent: Traffic, flops: float, recomputed: float, low: bool, gpu: Device) -> Seconds:
    """flops: of one forward of one rank. recomputed: share of it that backward repeats. low: matrix products in 16
    bits."""
    rate = (gpu.flops if low else gpu.flops32) * ARITHMETIC
    inside = sent.shard_ranks <= gpu.node
    one_node = sent.shard_ranks * sent.replicas <= gpu.node
    shard = sent.shard / ((gpu.inside if inside else gpu.across) * LINKS)
    replicate = sent.replicate / ((gpu.inside if one_node else gpu.across) * LINKS)
    ranks = sent.shard_ranks * sent.replicas
    return Seconds(
        arithmetic=flops * (3 + recomputed) / rate,
        messages=shard + replicate,
        latency=sent.collectives * LATENCY * math.log2(max(ranks, 1)) * 0.1,
        host=sent.host / gpu.host + sent.host_optimizer / HOST_MEMORY,
        activations=sent.activations / gpu.host,
        exposed=sent.exposed,
    )
