"""A choice of settings written down: a call of `auto_wrap`, or a configuration file of Accelerate and how to launch
with it."""

from __future__ import annotations

import json
from typing import Any

from .choice import AUTO, ONE, Choice, Units

# FSDP's word for each strategy; for zero2, which it lacks, the next one.
_ACCELERATE = {
    "none": "NO_SHARD", "zero2": "SHARD_GRAD_OP", "grad_op": "SHARD_GRAD_OP", "full": "FULL_SHARD",
    "hybrid": "HYBRID_SHARD", "hybrid_grad_op": "HYBRID_SHARD_ZERO2",
}  # fmt: skip


def call(choice: Choice, precision: str) -> str:
    """A line of Python. precision: "bf16", "fp16" or "fp32"."""
    options = choice.options()
    mesh = options.pop("device_mesh", None)
    if "policy" in options:
        options["policy"] = _Verbatim(_policy(choice.units))
    args = [f"{k}={v!r}" for k, v in options.items()]
    if mesh is not None:
        args.insert(0, f'device_mesh=init_device_mesh("cuda", {mesh}, mesh_dim_names=("replicate", "shard"))')
    if precision in ("bf16", "fp16"):
        kind = {"bf16": "bfloat16", "fp16": "float16"}[precision]
        args.append(f"mixed_precision=shardkit.MixedPrecision(param_dtype=torch.{kind})")
    return f"model = shardkit.auto_wrap(model, {', '.join(args)})"


class _Verbatim(str):
    def __repr__(self) -> str:
        return str(self)


def _policy(units: Units) -> str:
    if units.classes:
        return f"lambda module: type(module).__name__ in {units.classes!r}"
    return f"shardkit.size_policy({units.at_least})" if units.at_least else "None"


def yaml(choice: Choice, precision: str, ranks: int, machines: int) -> str:
    """The text of a configuration file of Accelerate, without a newline at its end."""
    lines = [
        f"# {launch(choice, '<this file>')}",
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: FSDP",
        f"mixed_precision: {'no' if precision == 'fp32' else precision}",
        f"num_machines: {machines}",
        f"num_processes: {ranks}",
        "fsdp_config:",
        "  fsdp_version: shardkit",
        f"  fsdp_sharding_strategy: {_ACCELERATE[choice.strategy]}",
        *_wrapping(choice.units),
        f"  fsdp_activation_checkpointing: {str(choice.recomputed > 0).lower()}",
        f"  fsdp_offload_params: {str(choice.offload).lower()}",
        "  fsdp_state_dict_type: SHARDED_STATE_DICT",
    ]
    return "\n".join(lines)


def _wrapping(units: Units) -> list[str]:
    if units == ONE:
        return ["  fsdp_auto_wrap_policy: NO_WRAP"]
    if units.at_least:
        return ["  fsdp_auto_wrap_policy: SIZE_BASED_WRAP", f"  fsdp_min_num_params: {units.at_least}"]
    out = ["  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"]  # without classes: "auto"
    if units != AUTO:
        out.append(f"  fsdp_transformer_layer_cls_to_wrap: {','.join(units.classes)}")
    return out


def environment(choice: Choice) -> dict[str, Any]:
    """What the file has no words for, as the keys of SHARDKIT_OPTIONS, which Accelerate hands to the ranks."""
    out: dict[str, Any] = {}
    if choice.strategy == "zero2":
        out["sharding_strategy"] = choice.strategy
    if 0 < choice.recomputed < 1:
        out["activation_checkpointing"] = choice.recomputed
    if choice.offload_activations:
        out["activation_offload"] = True
    return out


def launch(choice: Choice, file: str) -> str:
    """The command line that starts a script with such a file."""
    options = environment(choice)
    before = f"SHARDKIT_OPTIONS='{json.dumps(options)}' " if options else ""
    return f"{before}accelerate launch --config_file {file} -m shardkit.run train.py"
