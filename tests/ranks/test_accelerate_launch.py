"""Every way of asking for shardkit, with programs that know nothing of it, started as their users start them."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn as nn

# One epoch over fixed data; prints what the first rank saw as one line of JSON. Then it waits: gloo's threads
# let go of Python's tensors a little after the last collective, and a process that ends meanwhile aborts, as one of DDP
# does: "terminate called without an active exception".
TRAIN = '''
import json
import time

IMPORT
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data():
    tokens = torch.randint(0, 11, (24, 6), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def main():
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Net()
    whole = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=2))
    losses = []
    for tokens, targets in loader:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()[None]).mean()))
    accelerator.print(json.dumps({
        "losses": losses,
        "share": sum(p.numel() for p in model.parameters()) / whole,
        "type": str(accelerator.distributed_type),
        "ranks": accelerator.num_processes,
        "name": type(model).__name__,
    }))
    time.sleep(0.2)


if __name__ == "__main__":
    main()
'''  # fmt: skip
STOCK, OURS = "from accelerate import Accelerator", "from shardkit.accelerate import Accelerator"

YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
fsdp_config:
"""
SETTINGS = {
    "shardkit": {"fsdp_version": "shardkit", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                 "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    "1": {"fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000,
          "fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE",
          "fsdp_use_orig_params": True, "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True,
          "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_offload_params": False, "fsdp_forward_prefetch": False},
    "2": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
          "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_reshard_after_forward": False,
          "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": True},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A project: train.py, the same as a module of a package, and a YAML file for each version."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "train.py").write_text(TRAIN.replace("IMPORT", STOCK))
    (tmp_path / "package" / "training.py").write_text(TRAIN.replace("IMPORT", STOCK))
    (tmp_path / "ours.py").write_text(TRAIN.replace("IMPORT", OURS))
    for name, settings in SETTINGS.items():
        lines = [f"  {key}: {value}" for key, value in settings.items()]
        (tmp_path / f"fsdp_{name}.yaml").write_text(YAML + "\n".join(lines) + "\n")
    return tmp_path


def environment(**changes):
    out = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_", "ACCELERATE_", "SHARDKIT_", "MASTER_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        out.pop(name, None)
    return {**out, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", **changes}


def run(folder, *command, fails=False, **changes):
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=folder, env=environment(**changes), capture_output=True, text=True)
    assert fails == (done.returncode != 0), done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def answer(out):
    return json.loads(next(line for line in out.splitlines() if line.startswith('{"losses"')))


def accelerate_launch(folder, version, *program, **changes):
    port = ["--main_process_port", "0", "--rdzv_backend", "c10d"]
    command = ["-m", "accelerate.commands.launch", "--config_file", f"fsdp_{version}.yaml", *port, *program]
    return answer(run(folder, *command, **changes))


def torchrun(folder, *program, **changes):
    return run(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program, **changes)


def losses():
    """Those of DDP on 2 ranks, which are those of one process with both ranks' batches: the numbers to have."""
    space = {"__name__": "train"}
    exec(TRAIN.replace("IMPORT", ""), space)
    torch.manual_seed(0)
    model, out = space["Net"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, targets in torch.utils.data.DataLoader(space["data"](), batch_size=4):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def check(said):
    """A sharded run on 2 ranks, with the numbers of DDP; `use_cpu: true` alone gives stock two separate trainings."""
    assert said["type"] == "DistributedType.FSDP" and said["ranks"] == 2 and said["name"] == "Net"
    assert 0.45 < said["share"] < 0.6
    assert said["losses"] == pytest.approx(losses(), abs=1e-4)


def test_one_word_in_the_yaml_shards_an_unmodified_script(folder):
    check(accelerate_launch(folder, "shardkit", "train.py"))


def test_an_untouched_yaml_of_version_1_and_a_script_run_by_shardkit(folder):
    check(accelerate_launch(folder, "1", "-m", "shardkit.run", "train.py"))


def test_an_untouched_yaml_of_version_2_and_a_module_run_by_shardkit(folder):
    """With the variable, which the launcher's own process has as well."""
    program = ["-m", "shardkit.run", "-m", "package.training"]
    check(accelerate_launch(folder, "2", *program, SHARDKIT_ACCELERATE="1"))


def test_one_import_in_the_script_needs_no_yaml(folder):
    check(answer(torchrun(folder, "ours.py")))


TRAINER = '''
import json
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
))
whole = sum(p.numel() for p in model.parameters())
tokens = torch.randint(3, 96, (16, 12), generator=torch.Generator().manual_seed(1)).tolist()
arguments = TrainingArguments(
    output_dir="out", max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
    save_strategy="no", fsdp="full_shard auto_wrap",
    fsdp_config={"version": "shardkit", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "no_sync": True},
)
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
trainer.train()
if trainer.accelerator.is_main_process:
    plugin = trainer.accelerator.state.fsdp_plugin
    print("\\n" + json.dumps({
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "share": sum(p.numel() for p in trainer.model.parameters()) / whole,
        "type": str(trainer.accelerator.distributed_type),
        "plugin": type(plugin).__name__, "no_sync": plugin.no_sync,
        "prefetch": plugin.wrap_options.get("backward_prefetch"),
    }))
time.sleep(0.2)
'''  # fmt: skip


def test_a_trainer_script_with_the_word_in_its_fsdp_config(folder):
    (folder / "trainer.py").write_text(TRAINER)
    said = answer(torchrun(folder, "trainer.py", SHARDKIT_ACCELERATE="1"))
    assert said["type"] == "DistributedType.FSDP" and said["plugin"] == "ShardkitPlugin" and said["no_sync"]
    assert 0.45 < said["share"] < 0.6 and said["prefetch"] is not False
    assert len(said["losses"]) == 3 and all(0 < loss < 6 for loss in said["losses"])


# -------------------------------------------------------------------------------------------- without it, one process

ASK = "from accelerate import Accelerator; Accelerator()"


@pytest.mark.parametrize("asked", ["1", "always", "no"])
def test_the_variable_asks_for_the_word_or_for_everything(folder, asked):
    code = "from accelerate import FullyShardedDataParallelPlugin as P; print(type(P(fsdp_version=2)).__name__)"
    said = run(folder, "-c", code, SHARDKIT_ACCELERATE=asked).strip()
    assert said == ("ShardkitPlugin" if asked == "always" else "FullyShardedDataParallelPlugin")


@pytest.mark.parametrize("off", ["SHARDKIT_ACCELERATE", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_the_word_fails_loudly_where_shardkit_is_not_loaded(folder, off):
    said = run(folder, "-c", ASK, fails=True, ACCELERATE_USE_FSDP="true", FSDP_VERSION="shardkit", **{off: "0"})
    assert said.strip().splitlines()[-1].startswith("ValueError: ") and "'shardkit'" in said.strip().splitlines()[-1]


def test_run_passes_arguments_and_the_scripts_folder_on_as_python_does(folder, tmp_path):
    (folder / "package" / "helper.py").write_text("WORD = 'found'\n")
    (folder / "package" / "script.py").write_text(
        "import sys\nimport helper\nimport shardkit.accelerate\n"
        "print(helper.WORD, sys.argv, __name__, shardkit.accelerate.status()['always'])\n"
    )
    said = run(folder, "-m", "shardkit.run", "package/script.py", "--epochs", "3", "-m")
    assert said.strip() == "found ['package/script.py', '--epochs', '3', '-m'] __main__ True"
    (folder / "package" / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__, __package__)\n")
    assert run(folder, "-m", "shardkit.run", "-m", "package", "-x").strip() == "['-x'] __main__ package"


@pytest.mark.parametrize("arguments, said", [([], "usage"), (["nothing.py"], "nothing.py does not exist")])
def test_run_says_what_it_wants(arguments, said):
    import shardkit.accelerate
    from shardkit.run import main

    with pytest.raises(SystemExit, match=said):
        main(arguments)
    assert not shardkit.accelerate.status()["installed"]


def test_accelerates_own_programs_are_left_alone(folder):
    """`accelerate launch` imports Accelerate in a process that trains nothing."""
    (folder / "accelerate-launch.py").write_text(
        "import sys\nimport accelerate\nprint([name for name in sys.modules if name.startswith('shardkit.')])\n"
    )
    assert run(folder, "accelerate-launch.py", SHARDKIT_ACCELERATE="1").strip() == "[]"
