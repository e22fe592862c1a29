"""Predicted against measured peak of live bytes: the same training steps simulated, and run on CPU ranks.

    python bench/predicted_vs_measured.py            # 18 configurations on 2 and on 4 ranks, a table in bench/results
    python bench/predicted_vs_measured.py --only llama --nproc 2

Measured is what the profiler records of every allocation on rank 0 (see `peak_memory.CpuMeter`), from before the model
is
built: also what kernels allocate and free within themselves, which a simulation does not see.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common  # noqa: E402
import report as bench_report  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from peak_memory import CpuMeter, settled_collectives  # noqa: E402

STEPS = 4
PHASES = ("forward", "backward", "step")


def toy() -> nn.Module:
    return common.Transformer(256, 4, 4096, 4, 128)


def toy_tokens() -> torch.Tensor:
    return torch.zeros(4, 128, dtype=torch.long)


def _hf(config: str, model: str, **fields) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**fields))


def llama() -> nn.Module:
    return _hf(
        "LlamaConfig", "LlamaForCausalLM", hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=4096, use_cache=False,
    )  # fmt: skip


def gpt2() -> nn.Module:
    return _hf("GPT2Config", "GPT2LMHeadModel", n_embd=256, n_layer=4, n_head=4, vocab_size=4096, use_cache=False)


def t5() -> nn.Module:
    return _hf(
        "T5Config", "T5ForConditionalGeneration", d_model=256, d_ff=1024, num_layers=3, num_heads=4, d_kv=64,
        vocab_size=4096, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip


def vit() -> nn.Module:
    return _hf(
        "ViTConfig", "ViTForImageClassification", hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, image_size=64, patch_size=8, num_labels=100,
    )  # fmt: skip


def resnet() -> nn.Module:
    return _hf(
        "ResNetConfig", "ResNetForImageClassification", embedding_size=32, hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2], layer_type="basic", num_labels=100,
    )  # fmt: skip


def tokens_and_labels() -> dict[str, torch.Tensor]:
    return dict(input_ids=torch.zeros(4, 128, dtype=torch.long), labels=torch.zeros(4, 128, dtype=torch.long))


def images_and_labels() -> dict[str, torch.Tensor]:
    return dict(pixel_values=torch.zeros(8, 3, 64, 64), labels=torch.zeros(8, dtype=torch.long))


BATCHES = dict(toy=toy_tokens, llama=tokens_and_labels, gpt2=tokens_and_labels, t5=tokens_and_labels,
               vit=images_and_labels, resnet=images_and_labels)  # fmt: skip
MODELS = dict(toy=toy, llama=llama, gpt2=gpt2, t5=t5, vit=vit, resnet=resnet)
BF16 = {"mixed_precision": "bf16"}
AC = {"activation_checkpointing": True}

# (model, options of estimate and of auto_wrap), each on 2 and on 4 ranks
CONFIGURATIONS: list[tuple[str, dict]] = [
    ("toy", {}),
    ("toy", dict(sharding_strategy="grad_op")),
    ("toy", dict(sharding_strategy="zero2", optimizer="adamw-fused")),
    ("toy", dict(sharding_strategy="none", optimizer="sgd-momentum")),
    ("toy", {**BF16, **AC}),
    ("llama", {}),
    ("llama", dict(AC)),
    ("llama", dict(BF16)),
    ("llama", dict(sharding_strategy="zero2", **AC)),
    ("llama", dict(sharding_strategy="zero1", accumulate=2)),
    ("gpt2", dict(sharding_strategy="grad_op", **AC)),
    ("gpt2", dict(optimizer="adamw-foreach")),
    ("t5", dict(AC)),
    ("t5", dict(sharding_strategy="grad_op")),
    ("vit", {}),
    ("vit", {**BF16, "sharding_strategy": "zero2"}),
    ("resnet", dict(optimizer="sgd-momentum")),
    ("resnet", dict(sharding_strategy="none")),
]


def measure(name: str, options: dict) -> dict[str, int]:
    """Peak of live bytes on this rank by phase, in a process group that is there."""
    import shardkit
    from shardkit.simulate.estimate import _checked
    from shardkit.simulate.training import default_loss, make_optimizer

    options = dict(options)
    optimizer, accumulate = options.pop("optimizer", "adamw"), options.pop("accumulate", 1)
    with CpuMeter() as meter, settled_collectives(2.0):
        gc.collect()
        with meter.phase("before"):
            pass
        torch.manual_seed(0)
        model = MODELS[name]().train()
        model = shardkit.auto_wrap(model, **_checked(options))
        optim, batches = make_optimizer(optimizer, model, gpu=False), [BATCHES[name]()] * STEPS
        for batch in batches:
            loss = None
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with model.no_sync() if not last else contextlib.nullcontext():
                    with meter.phase(f"forward {micro}"):
                        loss = default_loss(model, batch)
                    with meter.phase(f"backward {micro}"):
                        loss.backward()
            with meter.phase("step 0"):
                optim.step()
            optim.zero_grad()
            del loss
    spans = meter.spans()
    base = spans["before"]["start"]
    peaks = {phase: [s["peak"] - base for name, s in spans.items() if name.startswith(phase)] for phase in PHASES}
    return {phase: max(of_micro_batches) for phase, of_micro_batches in peaks.items()}


def worker(args, device) -> dict:
    """Measures the configurations of `args.indices`, one after another, in one process group."""
    return {str(index): measure(*CONFIGURATIONS[index]) for index in args.indices}


def predict(name: str, options: dict, world: int) -> dict[str, int]:
    import shardkit

    report = shardkit.estimate(MODELS[name], BATCHES[name], world_size=world, device="cpu", **options)
    return {phase: report.phases[phase].total for phase in PHASES}


def compare(measured: dict[str, dict[str, int]], world: int) -> list[dict]:
    rows = []
    for index, real in measured.items():
        name, options = CONFIGURATIONS[int(index)]
        predicted = predict(name, dict(options), world)
        a, b = max(predicted.values()), max(real.values())
        rows.append(
            dict(model=name, world=world, options=options, predicted=predicted, measured=real, error=(a - b) / b)
        )
    return rows


def show(result: dict) -> str:
    rows = [
        [r["model"], ", ".join(f"{k}={v}" for k, v in r["options"].items()) or "full", r["world"],
         f"{max(r['predicted'].values()) / 1e6:.2f}", f"{max(r['measured'].values()) / 1e6:.2f}",
         f"{100 * r['error']:+.2f}"]
        for r in result["rows"]
    ]  # fmt: skip
    worst = max(abs(r["error"]) for r in result["rows"])
    table = bench_report.table(["model", "options", "ranks", "predicted MB", "measured MB", "error %"], rows)
    return f"{table}\n\n{len(rows)} configurations, largest error {100 * worst:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 4], help="world sizes")
    parser.add_argument("--only", help="models whose name contains this")
    bench_report.add_options(parser)
    args = parser.parse_args()
    args.indices = [i for i, (name, _) in enumerate(CONFIGURATIONS) if not args.only or args.only in name]
    rows = []
    for world in args.nproc:
        rows += compare(common.launch(worker, args, [world])[0], world)
    bench_report.write("predicted_vs_measured", args, [dict(rows=rows)], show)


if __name__ == "__main__":
    main()
