"""Predicted seconds of a training step, for putting settings in order: arithmetic, bytes on links, bytes to the host.

    step = max(arithmetic, messages) + 0.1 min(arithmetic, messages) + latency + host

Arithmetic: the forward's matrix products, counted by running it under fake tensors, three times (backward is two), and
once more for the share that is recomputed. Messages: what a rank sends with bandwidth-optimal collectives, over the
slowest link its group uses. They overlap, a tenth aside: the first gather and the last reduction have nothing to hide
behind. Host: bytes of offloaded shards, gradients and activations, and the optimizer's step at the host's memory speed;
of these, activations overlap. All rates are those of `devices.py`.
"""

from __future__ import annotations

import dataclasses
import math

import torch.nn as nn

from .devices import ARITHMETIC, LATENCY, LINKS, Device
from .observe import steps_in

HOST_MEMORY = 15e9  # bytes per second at which one process's optimizer step goes through host memory


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one rank sends in a training step: bytes within the shard group and across replicas, number of collectives;
    and bytes that cross to the host and that the host's optimizer touches."""

    shard_ranks: int
    replicas: int
    shard: float
    replicate: float
    collectives: int
    host: float = 0.0
    host_optimizer: float = 0.0


def traffic(model: nn.Module) -> Traffic:
    """Of a wrapped model; zeros where nothing is sharded."""
    from ..describe import _sent

    shard = replicate = host = touched = 0.0
    collectives, n, m = 0, 1, 1
    for step in steps_in(model):
        n, m = step.mesh.shard.size, step.mesh.replicate.size
        for flat in step.flats:
            sent = _sent(step, flat.unit, flat)
            trained = any(p.requires_grad for p in flat.params)
            reduced = flat.layout.numel * flat.reduce_dtype.itemsize if trained else 0
            across = 2 * reduced / n * (m - 1) / m
            shard += sent - across
            replicate += across
            collectives += 2 + (step.options.drop_after_forward and flat.needed_in_backward) + (m > 1)
            if step.options.cpu_offload is not None:
                local = flat.layout.shard_numel
                host += local * (2 * flat.compute_dtype.itemsize + flat.reduce_dtype.itemsize * trained)
                touched += local * 4 * 7 * trained  # Adam reads four and writes three values of each parameter
    return Traffic(n, m, shard, replicate, collectives, host, touched)


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Parts of a step's predicted time."""

    arithmetic: float
    messages: float
    latency: float
    host: float

    @property
    def total(self) -> float:
        overlapped = max(self.arithmetic, self.messages) + 0.1 * min(self.arithmetic, self.messages)
        return overlapped + self.latency + self.host


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
    )
