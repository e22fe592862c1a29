"""The examples for Accelerate and the Trainer, launched as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def launch(yaml, folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", EXAMPLES / yaml, *arguments]
    command += ["--out", folder]
    ran = subprocess.run(command, cwd=folder, env=environment, timeout=300, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_yamls_differ_in_one_word():
    lines = [(EXAMPLES / name).read_text("utf-8").split("\n")[1:] for name in ("fsdp_before.yaml", "fsdp_after.yaml")]
    different = [(a, b) for a, b in zip(*lines, strict=True) if a != b]
    assert different == [("  fsdp_version: 2", "  fsdp_version: shardkit")]


def test_the_raw_loop_trains_saves_and_resumes(tmp_path):
    from transformers import LlamaForCausalLM

    small = ["--dim", "32", "--batch", "2", "--length", "32"]
    script = [EXAMPLES / "accelerate_train.py", *small]
    said = launch("fsdp_after.yaml", tmp_path, *script, "--steps", "3")
    whole = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tmp_path / "model").parameters())
    here = int(re.search(r"FSDP: ([\d,]+) parameters on each of 2 ranks", said).group(1).replace(",", ""))
    assert 0.45 * whole < here < 0.6 * whole
    before = LlamaForCausalLM.from_pretrained(tmp_path / "model").lm_head.weight.detach().clone()
    # The first step after resuming has the last learning rate of the run before, which is 0.
    said = launch("fsdp_before.yaml", tmp_path, "-m", "shardkit.run", *script, "--steps", "5", "--resume")
    assert "FSDP" in said and "validation loss" in said
    after = LlamaForCausalLM.from_pretrained(tmp_path / "model").lm_head.weight
    assert 0 < (after - before).abs().max().item() < 0.1 and torch.isfinite(after).all()


def test_the_trainer_example_trains_and_saves_a_model(tmp_path):
    said = launch("fsdp_after.yaml", tmp_path, EXAMPLES / "trainer_finetune.py", "--steps", "4", "--text", "json")
    before, after = re.search(r"validation loss (\S+) nats per byte before, (\S+) after 4 steps", said).groups()
    assert float(after) < float(before)
    assert (tmp_path / "checkpoint-4" / "pytorch_model_fsdp_0").is_dir(), "it was not shardkit's sharded checkpoint"
    assert (tmp_path / "model.safetensors").is_file()


def test_the_lora_example_saves_adapters_alone(tmp_path):
    launch("fsdp_after.yaml", tmp_path, EXAMPLES / "trainer_lora.py", "--steps", "2")
    saved = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert saved == ["adapter_model.safetensors"]
