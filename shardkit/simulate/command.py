"""`shardkit estimate` and `shardkit plan`: arguments in, reports out. Added to the command line by `cli.py`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from ..errors import ConfigError

_MODEL = (
    "a preset (llama-7b, mixtral-8x7b, t5-3b, gpt2, vit-base, resnet-50, ...), a config.json of transformers, the name "
    "of a configuration class (LlamaConfig), or module:function that builds the model"
)
_STRATEGIES = ("full", "grad_op", "zero2", "zero1", "none", "hybrid", "hybrid_grad_op")


def add_estimate(commands) -> None:
    about = "memory of a training step by category, phase and unit, without the memory and the ranks"
    command = commands.add_parser(
        "estimate", help=about, description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  shardkit estimate llama-7b --world-size 64 --batch 1 --seq 4096 --checkpoint 1\n"
        "  shardkit estimate my_project.model:build --batch-function my_project.data:one_batch --world-size 8\n"
        "  shardkit estimate llama-8b --world-size 8 64 512 --seq 4096 --output memory.html\n"
        "exit status: 0; 1 for settings that cannot work or do not fit --memory; 2 for bad usage",
    )  # fmt: skip
    _add_common(command)
    command.add_argument("--world-size", type=int, nargs="+", default=[8], metavar="N", help="ranks, one or more; 8")
    command.add_argument("--strategy", choices=_STRATEGIES, default="full", help="what is sharded; full")
    command.add_argument("--mesh", type=_mesh, metavar="RxS", help="replicas x shards, for the hybrid strategies")
    command.add_argument(
        "--checkpoint", type=float, default=0, metavar="SHARE", help="of blocks computed again; 0 to 1"
    )
    command.add_argument(
        "--offload", action="store_true", help="keep shards, gradients and optimizer state on the host"
    )
    command.add_argument("--offload-activations", action="store_true", help="keep activations on the host")
    command.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="micro-batches a step, under no_sync; 1"
    )
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the engine does there; cuda")
    command.add_argument(
        "--save", choices=("sharded", "async", "full", "none"), default="sharded",
        help="what is saved at the end: sharded (save_checkpoint), async (async_save), full (full_state_dict); sharded",
    )  # fmt: skip
    command.add_argument("--whole-init", action="store_true", help="every rank builds the whole model before sharding")
    command.add_argument("--memory", metavar="GPU|BYTES", help="say whether it fits: h100-80g, or a number of bytes")
    command.set_defaults(run=_estimate)


def add_plan(commands) -> None:
    about = "settings with which a model fits on given GPUs, the fastest first"
    command = commands.add_parser(
        "plan", help=about, description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  shardkit plan llama-8b --gpus 8 --gpu h100-80g --batch 1 --seq 8192\n"
        "  shardkit plan llama-70b --gpus 64 --gpu a100-80g --seq 4096 --yaml accelerate.yaml\n"
        "exit status: 0 where something fits, 1 where nothing does or settings cannot work, 2 for bad usage",
    )  # fmt: skip
    _add_common(command)
    command.add_argument("--gpus", type=int, default=8, metavar="N", help="number of GPUs; 8")
    command.add_argument("--gpu", default="h100-80g", metavar="NAME", help="kind of GPU, such as a100-40g; h100-80g")
    command.add_argument("--keep", type=int, default=4, metavar="N", help="stop after so many settings that fit; 4")
    command.add_argument("--yaml", metavar="FILE", help="write the best settings as a configuration file of Accelerate")
    command.set_defaults(run=_plan)


def _add_common(command) -> None:
    command.add_argument("model", help=_MODEL)
    command.add_argument("--batch", type=int, default=1, metavar="N", help="samples of one rank's micro-batch; 1")
    command.add_argument("--seq", type=int, metavar="N", help="tokens of a sample; 2048")
    command.add_argument("--batch-function", metavar="M:F", help="module:function that makes the batch instead")
    command.add_argument(
        "--loss-function", metavar="M:F", help="module:function of (model, batch) that returns the loss"
    )
    command.add_argument("--optimizer", default="adamw", help="adamw, adamw-fused, sgd-momentum, ...; adamw")
    command.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="of computing; bf16")
    command.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="fields of the configuration: num_hidden_layers=4"
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.add_argument("--output", metavar="FILE", help="write a .json, .png or self-contained .html as well")


def _estimate(args) -> int:
    from . import plots
    from .choice import Choice
    from .estimate import estimate

    if args.output:
        plots.check(args.output)  # before minutes of simulation, not after
    sys.path.insert(0, "")  # module:function of the folder one is in
    chosen = Choice(
        args.strategy, args.checkpoint, args.offload, args.mesh, offload_activations=args.offload_activations
    )
    limit, reports = _limit(args.memory), []
    for ranks in args.world_size:
        _progress(f"simulating {args.model} on {ranks} ranks")
        reports.append(estimate(
            args.model, _batch(args), args.optimizer, ranks, device=args.device, loss_fn=_function(args.loss_function),
            overrides=_fields(args.set), deferred_init=not args.whole_init, accumulate=args.accumulate,
            save=None if args.save == "none" else args.save, mixed_precision=args.precision, **chosen.options(),
        ))  # fmt: skip
    fits = [limit is None or _needed(report) <= limit for report in reports]
    if args.json:
        data = [{**report.to_dict(), "fits": None if limit is None else ok} for report, ok in zip(reports, fits)]
        print(json.dumps(data if len(data) > 1 else data[0], indent=1))
    else:
        for report, ok in zip(reports, fits):
            print(report)
            if limit is not None:
                print(f"{'fits in' if ok else 'does not fit in'} {limit / 1e9:.1f} GB")
            print()
    if args.output:
        if args.output.endswith(".json"):
            with open(args.output, "w") as file:
                json.dump([report.to_dict() for report in reports], file, indent=1)
        else:
            plots.save(reports, args.output, limit)
    return 0 if all(fits) else 1


def _needed(report) -> int:
    return report.extra.get("reserved_bytes", report.training_peak)


def _plan(args) -> int:
    from .planner import plan

    if args.output and not args.output.endswith(".json"):
        raise ConfigError(f"{args.output}: a plan is written as .json; pictures are made by `shardkit estimate`.")
    sys.path.insert(0, "")
    found = plan(
        args.model, _batch(args), args.gpus, args.gpu, args.optimizer, precision=args.precision,
        loss_fn=_function(args.loss_function), overrides=_fields(args.set), keep=args.keep, progress=_progress,
    )  # fmt: skip
    text = json.dumps(found.to_dict(), indent=1)
    print(text if args.json else found)
    if args.output:
        with open(args.output, "w") as file:
            file.write(text + "\n")
    if args.yaml and found.best is not None:
        with open(args.yaml, "w") as file:
            file.write(found.yaml() + "\n")
        _progress(f"wrote {args.yaml}. Start with: {found.launch(file=args.yaml)}")
    return 0 if found.best is not None else 1


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _batch(args) -> Any:
    if args.batch_function:
        return _function(args.batch_function)
    images = args.model.startswith(("vit", "resnet"))
    return args.batch if images and args.seq is None else (args.batch, args.seq or 2048)


def _function(text: str | None) -> Any:
    if text is None:
        return None
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{text!r} is no module:function that can be imported ({e}). Is it on PYTHONPATH?") from e


def _fields(pairs: list[str]) -> dict[str, Any] | None:
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: expected FIELD=VALUE, such as num_hidden_layers=4.")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out or None


def _mesh(text: str) -> tuple[int, ...]:
    try:
        replicas, shards = (int(n) for n in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected REPLICASxSHARDS, such as 8x8") from None
    return replicas, shards


def _limit(text: str | None) -> int | None:
    from .devices import device

    if text is None:
        return None
    try:
        return int(float(text))
    except ValueError:
        return device(text).usable
