"""A world of any size in one process: ranks that are not there, and tensors without memory.

Process groups here answer every collective at once and move nothing. Their backend's name says what they stand for,
because the engine chooses its transport by that name: "fake_gloo" what it does between CPUs, "fake_nccl" what it does
between GPUs.
"""

from __future__ import annotations

import contextlib
import math
import warnings

import torch
import torch.distributed as dist

from ..errors import ConfigError, StateError

TRANSPORTS = ("fake_gloo", "fake_nccl")


def _register() -> None:
    from torch._C._distributed_c10d import FakeProcessGroup

    def create(store, rank, size, timeout):
        return FakeProcessGroup._create_internal(rank, size)

    for name in TRANSPORTS:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, create, devices=["cpu", "cuda", "xpu"])


@contextlib.contextmanager
def world(size: int, rank: int = 0, transport: str = "fake_nccl"):
    """This process as `rank` of `size`, in a default process group of that transport.

    Raises StateError where torch.distributed is initialised already: a process has one default group.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank={rank} is not one of world_size={size} ranks.")
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport={transport!r} is not known. Use one of {', '.join(TRANSPORTS)}.")
    if dist.is_initialized():
        raise StateError(
            "torch.distributed is initialised in this process, and a simulation needs a default process group of its "
            "own. Run the estimate before init_process_group(), or in another process (`shardkit estimate`)."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _register()
    dist.init_process_group(transport, rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups(mesh: tuple[int, ...] | None):
    """The process group, or (shard group, replicate group) pair, of a mesh given by its sizes: (shards,) or
    (replicas, shards), laid out as `init_device_mesh` does: neighbouring ranks share a parameter."""
    if mesh is None or len(mesh) == 1:
        return None
    replicas, shards = mesh
    size, rank = dist.get_world_size(), dist.get_rank()
    if len(mesh) != 2 or math.prod(mesh) != size:
        raise ConfigError(f"device_mesh={mesh} does not have world_size={size} ranks. Use (replicas, shards).")
    first = rank // shards * shards
    shard = dist.new_group(list(range(first, first + shards)), use_local_synchronization=True)
    replicate = dist.new_group(list(range(rank % shards, size, shards)), use_local_synchronization=True)
    return shard, replicate


@contextlib.contextmanager
def no_memory():
    """Tensors made inside have a shape, a dtype and a device, but no memory; operators on them only do this
    arithmetic."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        # Addresses are zero here; the engine only compares them, with the outcome that nothing needs copying.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode


def is_simulated(t: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)
