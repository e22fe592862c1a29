"""peft's LoRA in transformers' Trainer, which knows nothing of shardkit: the YAML says who shards.

    accelerate launch --config_file examples/fsdp_after.yaml examples/trainer_lora.py              # GPUs or CPUs
    accelerate launch --config_file examples/fsdp_after.yaml examples/trainer_lora.py --resume     # from a checkpoint

A small Llama with random weights gets adapters that learn the standard library's sources byte by byte.
Checkpoints and the final save hold the adapters alone.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def rows_of_text(length: int, megabytes: float = 1.0) -> list[dict[str, torch.Tensor]]:
    """Bytes of the standard library in rows of `length` tokens."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[: int(megabytes * 2**20)]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in tokens[: len(tokens) // length * length].view(-1, length)]


def main(args: argparse.Namespace) -> float:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.dim, intermediate_size=3 * args.dim, num_hidden_layers=4,
        num_attention_heads=max(1, args.dim // 32), max_position_embeddings=args.length,
    )  # fmt: skip
    adapters = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    rows = rows_of_text(args.length)
    arguments = TrainingArguments(
        output_dir=args.out, max_steps=args.steps, save_steps=max(1, args.steps // 2), per_device_train_batch_size=8,
        learning_rate=args.lr, lr_scheduler_type="cosine", logging_steps=10, report_to="none",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows[64:], eval_dataset=rows[:64])
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]
    folder = Path(args.out) / "adapters"
    trainer.save_model(str(folder))  # on all ranks: they gather the adapters together, and no part of the base model
    if trainer.is_world_process_zero():
        size = sum(file.stat().st_size for file in folder.glob("adapter_model.*"))
        print(f"validation loss {loss:.3f}; PeftModel.from_pretrained(base, {str(folder)!r}) opens {size:,} bytes")
    return loss


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes in a row (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--out", default="out/lora", help="folder of what is saved (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
