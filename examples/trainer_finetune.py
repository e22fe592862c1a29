"""Train a small language model with transformers' Trainer, and fine-tune it; sharded as a YAML for Accelerate says.

The text is the standard library's own sources, tokens are bytes, the model a Llama of under two million parameters.
The script knows nothing of shardkit: of the two YAMLs beside it, one asks for FSDP2, the other for shardkit.

    accelerate launch --config_file examples/fsdp_after.yaml examples/trainer_finetune.py     # 2 CPU ranks, or GPUs
    accelerate launch --config_file examples/fsdp_before.yaml examples/trainer_finetune.py    # 2 GPUs only
    accelerate launch --config_file examples/fsdp_after.yaml examples/trainer_finetune.py \\
        --model runs/trainer --text email --out runs/finetuned              # go on from what was saved, on other text
    accelerate launch ... examples/trainer_finetune.py --resume             # go on from the last checkpoint in --out

On GPUs it computes in bfloat16. Checkpoints are sharded; the folder `--out` itself gets whole weights at the end, which
`from_pretrained` loads anywhere. Needs transformers and accelerate beside shardkit.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB = 256  # bytes


class Windows(Dataset):
    """Pieces of `length` bytes, one after the other; labels are the bytes themselves, which the model shifts."""

    def __init__(self, text: bytes, length: int):
        pieces = len(text) // length
        self.rows = torch.frombuffer(bytearray(text[: pieces * length]), dtype=torch.uint8).view(pieces, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


def sources(package: str, length: int) -> tuple[Windows, Windows]:
    """Training and validation text: every tenth file of the standard library, or of one of its packages, is for the
    latter."""
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / package).glob("*.py"))
    texts = [file.read_bytes() for file in files if not file.name.startswith("test_")]
    train = b"".join(text for number, text in enumerate(texts) if number % 10)
    return Windows(train, length), Windows(b"".join(texts[::10])[: 64 * length], length)


def new_model(length: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
    tokens = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    sizes |= {"max_position_embeddings": 2 * length, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens))


def arguments() -> argparse.Namespace:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=formatter)
    option = parser.add_argument
    option("--model", help="folder of a saved model to start from, in place of new weights")
    option("--text", default="", help="package of the standard library whose sources to train on, or all modules")
    option("--steps", type=int, default=100, help="optimizer steps")
    option("--batch", type=int, default=4, help="sequences for a rank and micro-batch, of which a step has two")
    option("--length", type=int, default=128, help="bytes in a sequence")
    option("--resume", action="store_true", help="go on from the last checkpoint in --out")
    option("--out", default="runs/trainer", help="folder of checkpoints and of the model")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    every = max(1, args.steps // 4)
    settings = TrainingArguments(
        args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        learning_rate=2e-3 if args.model is None else 5e-4,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 20,
        bf16=torch.cuda.is_available(),
        logging_steps=every,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
    )
    set_seed(0)
    train, validation = sources(args.text, args.length)
    model = new_model(args.length) if args.model is None else AutoModelForCausalLM.from_pretrained(args.model)
    trainer = Trainer(model=model, args=settings, train_dataset=train, eval_dataset=validation)
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume or None)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    prompt = torch.tensor([list(b"def ")], device=trainer.model.device)
    sample = trainer.model.eval().generate(prompt, max_new_tokens=80, do_sample=True, temperature=0.7)  # on all ranks
    if trainer.is_world_process_zero():
        loaded = AutoModelForCausalLM.from_pretrained(args.out)
        print(bytes(sample[0].tolist()).decode("utf-8", errors="replace"))
        print(f"{args.out} has a {type(loaded).__name__} of {loaded.num_parameters() / 1e6:.2f} M parameters")
        print(f"validation loss {before:.3f} nats per byte before, {after:.3f} after {trainer.state.global_step} steps")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
