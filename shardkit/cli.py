"""The command line: `shardkit inspect PATH`, `shardkit convert SOURCE TARGET`, `shardkit estimate MODEL`,
`shardkit plan MODEL`; also as `python -m shardkit ...`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import torch

from .errors import ShardkitError
from .simulate.command import add_estimate, add_plan


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 where shardkit refused or a file was damaged, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="shardkit", description="Will it fit, and what is in a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_estimate, add_plan, _add_inspect, _add_convert):
        add(commands)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (ShardkitError, OSError) as error:
        print(f"shardkit {args.command}: {error}", file=sys.stderr)
        return 1


def _add_inspect(commands) -> None:
    about = "list tensors, shapes, dtypes, bytes, the ranks that wrote them, step and versions"
    command = commands.add_parser("inspect", help=about, description=about)
    command.add_argument("path", help="a checkpoint, a folder of them (the newest is taken), or safetensors files")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=_inspect)


def _inspect(args) -> int:
    from .checkpoint.inspection import inspect

    contents = inspect(args.path)
    print(json.dumps(dataclasses.asdict(contents), indent=1, default=str) if args.json else contents)
    return 0


def _add_convert(commands) -> None:
    about = "turn weights into safetensors or into a distributed checkpoint, one tensor at a time"
    command = commands.add_parser("convert", help=about, description=about)
    command.add_argument("source", help="a distributed checkpoint, safetensors, a torch.save file, fairscale's shards")
    command.add_argument("target", help="a folder that does not exist yet")
    command.add_argument("--to", choices=("safetensors", "dcp"), help="default: the other one of the two")
    command.add_argument("--dtype", help="of floating-point tensors, as float32 or bfloat16; default: as they are")
    command.add_argument("--file-bytes", type=int, default=5_000_000_000, help="of tensors in one file of safetensors")
    command.set_defaults(run=_convert)


def _convert(args) -> int:
    from .checkpoint.convert import convert

    dtype = getattr(torch, args.dtype, None) if args.dtype else None
    if args.dtype and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        print(f"shardkit convert: --dtype {args.dtype} is no floating-point dtype of torch.", file=sys.stderr)
        return 2
    made = convert(args.source, args.target, to=args.to, dtype=dtype, file_bytes=args.file_bytes)
    print(f"wrote {made} to {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
