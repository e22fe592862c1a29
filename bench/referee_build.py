"""Plugs shardkit into the referee that measures peak bytes and bytes sent for any implementation:

torchrun --nproc-per-node 2 harness.py --impl PATH/bench/referee_build.py:build --comm [--bf16 --ac --reshard 0]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # measures this checkout, installed or not


def build(model, unit_cls, args):
    """(wrapped model, optimizer or None for the referee's own, extra hooks or None)."""
    import shardkit

    if args.ac:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, unit_cls))
    options = {"reshard_after_forward": bool(args.reshard)}
    if args.bf16:
        options["mixed_precision"] = shardkit.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return shardkit.auto_wrap(model, policy={unit_cls}, **options), None, None
