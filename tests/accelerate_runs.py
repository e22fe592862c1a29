"""Accelerate inside the kept ranks of the harness: one configuration at a time, everything put back afterwards.

    with accelerate(shardkit=True, FSDP_STATE_DICT_TYPE="FULL_STATE_DICT"):      # what a YAML would export
        accelerator = Accelerator(...)
    with accelerate(): ...                       # the same ranks as DDP
    with accelerate(fsdp2=True): ...             # the same ranks as stock FSDP version 2, forced to run on CPUs

Accelerate keeps its state in class attributes and its settings in the environment; the harness restores the latter
after each test, this does both after each block, so that one test can compare several.
"""

import contextlib
import functools
import gc
import importlib.metadata
import os
import sys
import unittest.mock

import torch


@contextlib.contextmanager
def accelerate(*, shardkit=False, fsdp2=False, always=False, **environment):
    from accelerate.state import AcceleratorState, GradientState

    import shardkit.accelerate as ours

    if "transformers.trainer" in sys.modules:
        _freeze_imports()
    chosen = {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "MASTER_ADDR": "127.0.0.1", **environment}
    if not shardkit:
        chosen["ACCELERATE_USE_CPU"] = "true"  # with shardkit, several processes on a machine of CPUs are CPU ranks
    if shardkit or fsdp2:
        chosen |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2" if fsdp2 else "shardkit"}
        chosen.setdefault("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    with unittest.mock.patch.dict(os.environ, chosen), _forced_fsdp2() if fsdp2 else contextlib.nullcontext():
        if not (shardkit or fsdp2):
            os.environ.pop("ACCELERATE_USE_FSDP", None)  # a plugin that a script made has set it
        if shardkit:
            ours.install(always=always)
        try:
            yield
        finally:
            if shardkit:
                ours.uninstall()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@functools.cache
def _freeze_imports():
    """The Trainer collects garbage each time it trains, which takes a second with all that it imports."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _forced_fsdp2():
    """Stock Accelerate gives CPU ranks DDP whatever the settings say. As the type FSDP, its version 2 runs on CPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with unittest.mock.patch.object(AcceleratorState, "__init__", init):
        yield


def older(package, version):
    """Whether the installed release is one from before `version`, for what only newer ones do: tests/matrix/run.py."""
    there = importlib.metadata.version(package).split(".")
    return [int(part) for part in there[:2]] < [int(part) for part in version.split(".")]


def tiny_llama(seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**config | changes))


def recomputed_llama(**changes):
    """For activation checkpointing. Before transformers 5, a layer that is recomputed extends the cache once more."""
    return tiny_llama(**({"use_cache": False} if older("transformers", "5.0") else {}), **changes)


def token_rows(count=32, length=12, vocabulary=96, seed=1):
    return torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(seed))
