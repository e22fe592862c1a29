"""An ordinary Accelerate loop, which knows nothing of shardkit: the YAML says who shards.

    accelerate launch --config_file examples/fsdp_before.yaml examples/accelerate_train.py    # PyTorch's FSDP2, on GPUs
    accelerate launch --config_file examples/fsdp_after.yaml examples/accelerate_train.py     # shardkit, GPUs or CPUs
    accelerate launch --config_file examples/fsdp_before.yaml -m shardkit.run examples/accelerate_train.py   # shardkit
    ... examples/accelerate_train.py --resume                                                 # from its checkpoint

A small Llama learns the standard library's sources byte by byte, which every machine with Python has.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


def rows_of_text(length: int, megabytes: float = 1.0) -> torch.Tensor:
    """Bytes of the standard library as rows of `length` tokens: (rows, length), int64."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: int(megabytes * 2**20)]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Mean loss over all rows, each counted once."""
    model.eval()
    losses = [accelerator.gather_for_metrics(model(rows, labels=rows).loss.repeat(len(rows))) for rows in loader]
    model.train()
    return float(torch.cat(losses).mean())


def main(args: argparse.Namespace) -> float:
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, project_dir=args.out)
    set_seed(0)
    rows = rows_of_text(args.length)
    order = torch.randperm(len(rows))
    train, held_out = rows[order[64:]], rows[order[:64]]
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.dim, intermediate_size=3 * args.dim, num_hidden_layers=4,
        num_attention_heads=max(1, args.dim // 32), max_position_embeddings=args.length,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    # Accelerate steps a scheduler once for every process.
    total = args.steps * accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    loaders = DataLoader(train, batch_size=args.batch, shuffle=True), DataLoader(held_out, batch_size=args.batch)
    model, optimizer, scheduler, *loaders = accelerator.prepare(model, optimizer, scheduler, *loaders)
    here = sum(p.numel() for p in model.parameters())
    ranks = accelerator.num_processes
    accelerator.print(f"{accelerator.distributed_type}: {here:,} parameters on each of {ranks} ranks")

    checkpoint = Path(args.out) / "checkpoint"
    done = 0
    if args.resume:
        accelerator.load_state(str(checkpoint))
        done = scheduler.scheduler.last_epoch // accelerator.num_processes
    bar = tqdm(total=args.steps, initial=done, disable=not accelerator.is_main_process, unit="step")
    while done < args.steps:
        for batch in loaders[0]:
            with accelerator.accumulate(model):
                loss = model(batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.3f}")
                if done == args.steps:
                    break
    bar.close()
    accelerator.save_state(str(checkpoint))
    final = evaluate(accelerator, model, loaders[1])
    accelerator.print(f"validation loss {final:.3f} nats per byte ({final / math.log(2):.2f} bits)")

    state = accelerator.get_state_dict(model)  # on all ranks: they gather it together
    folder = Path(args.out) / "model"
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=state
    )
    accelerator.wait_for_everyone()
    accelerator.print(f"LlamaForCausalLM.from_pretrained({str(folder)!r}) opens the result")
    accelerator.end_training()
    return final


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows per rank and micro-batch (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes in a row (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--out", default="out/accelerate", help="folder of what is saved (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
