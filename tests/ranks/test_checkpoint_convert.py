"""`shardkit convert` and `shardkit inspect`."""

import json
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardkit
from shardkit.checkpoint.convert import convert
from shardkit.checkpoint.inspection import inspect
from shardkit.cli import main
from tests.harness import ranks, run_ranks
from tests.ranks.checkpoint_models import Block, assert_same, build, step, whole, wrap
from tests.ranks.test_checkpoint_safetensors import llama, logits


def _save(rank, world, folder, kind):
    model = shardkit.auto_wrap(llama(0)) if kind == "llama" else wrap(0)
    optim = torch.optim.Adam(model.parameters())
    if kind != "llama":
        step(model, optim, 1)
    shardkit.save_checkpoint(folder, model, optim, step=7, epoch=1)
    return shardkit.full_state_dict(model)


def _load(rank, world, folder, kind):
    model = shardkit.auto_wrap(llama(1)) if kind == "llama" else wrap(1)
    shardkit.load_checkpoint(folder, model)
    return shardkit.full_state_dict(model)


@pytest.mark.parametrize("kind", ["net", "llama"])
def test_a_checkpoint_becomes_safetensors_and_comes_back(kind, tmp_path):
    from safetensors.torch import load_file

    want = run_ranks(_save, 4, tmp_path / "a", kind)[0]
    assert convert(tmp_path / "a", tmp_path / "b", file_bytes=900) == "safetensors"
    parts = sorted((tmp_path / "b").glob("*.safetensors"))
    assert len(parts) > 1
    tied = {"net": "head.weight", "llama": "lm_head.weight"}[kind]
    assert_same({k: v for p in parts for k, v in load_file(p).items()}, {k: v for k, v in want.items() if k != tied})
    assert convert(tmp_path / "b", tmp_path / "c") == "dcp"
    assert_same(run_ranks(_load, 2, tmp_path / "c", kind)[0], want)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c", "latest"]
    assert (tmp_path / "latest").read_text() == "a"


def test_from_pretrained_opens_a_converted_checkpoint(tmp_path):
    from transformers import AutoModelForCausalLM

    run_ranks(_save, 2, tmp_path / "a", "llama")
    convert(tmp_path / "a", tmp_path / "b")
    llama(0).config.save_pretrained(tmp_path / "b")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert torch.equal(logits(opened.eval()), logits(llama(0)))


def _fsdp2_save(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(llama(0), mesh=init_device_mesh("cpu", (world,)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "nested")
    dcp.save(model.state_dict(), checkpoint_id=folder / "flat")


def test_an_fsdp2_checkpoint_becomes_safetensors(tmp_path):
    from safetensors.torch import load_file

    run_ranks(_fsdp2_save, 2, tmp_path)
    for kind in ("nested", "flat"):  # names of a Llama begin with "model." themselves
        convert(tmp_path / kind, tmp_path / f"{kind}-out")
        got = load_file(tmp_path / f"{kind}-out" / "model.safetensors")
        assert_same(got, {k: v for k, v in llama(0).state_dict().items() if k in got})
        assert "model.embed_tokens.weight" in got


def _fairscale_save(rank, world, folder):
    from fairscale.nn import FullyShardedDataParallel as FSDP

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    cpu = {"compute_device": torch.device("cpu")}
    inner = nn.Sequential(Block(5), Block(5), nn.BatchNorm1d(5))
    whole_state = {k: v.clone() for k, v in inner.state_dict().items()}
    for i in range(2):
        inner[i] = FSDP(inner[i], flatten_parameters=i == 0, **cpu)
    model = FSDP(inner, **cpu)  # its state_dict() works on a GPU only; what ranks save locally, anywhere
    state = {"model": model.local_state_dict(), "shard_metadata": model.local_metadata_dict()}
    torch.save(state, folder / f"checkpoint-shard{rank}.pt")
    return whole_state


def test_fairscale_shards_become_a_checkpoint(tmp_path):
    (tmp_path / "in").mkdir()
    want = run_ranks(_fairscale_save, 2, tmp_path / "in", fresh=True)[0]
    assert convert(tmp_path / "in", tmp_path / "out") == "dcp"
    convert(tmp_path / "out", tmp_path / "st")
    from safetensors.torch import load_file

    assert_same(load_file(tmp_path / "st" / "model.safetensors"), want)


def test_a_file_of_torch_save_becomes_a_checkpoint_with_tied_weights_once(tmp_path):
    torch.save({"state_dict": build(0).state_dict()}, tmp_path / "weights.pt")
    convert(tmp_path / "weights.pt", tmp_path / "out", dtype=torch.float64)
    got = run_ranks(_load, 2, tmp_path / "out", "net")[0]
    assert_same(got, build(0).state_dict())
    names = {t.name: t for t in inspect(tmp_path / "out").tensors}
    assert names["model.emb.weight"].dtype == "float64" and "model.head.weight" in names
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size < 2 * 11 * 5 * 8 + sum(
        t.nbytes + 1500 for t in names.values() if "head" not in t.name
    )


def test_converting_takes_no_more_memory_than_the_largest_tensor(tmp_path):
    torch.save({f"w{i}": torch.full((512, 1024), float(i)) for i in range(32)}, tmp_path / "weights.pt")  # 64 MiB
    code = (
        "import sys, resource, torch, pathlib\n"
        "from shardkit.checkpoint.convert import convert\n"
        "import torch.distributed.checkpoint.filesystem\n"
        "def hwm(): return next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('RssAnon'))\n"
        "import shardkit.checkpoint.convert as c\n"
        "peak = [0]; before = hwm()\n"
        "for cls in (c._Saved, c.TorchFile):\n"
        "    def watched(self, name, read=cls.read):\n"
        "        out = read(self, name); peak[0] = max(peak[0], hwm()); return out\n"
        "    cls.read = watched\n"
        "a, b, d = map(pathlib.Path, sys.argv[1:])\n"
        "convert(a, b); convert(b, d)\n"
        "print((peak[0] - before) / 1024)"
    )
    arguments = [str(tmp_path / name) for name in ("weights.pt", "dcp", "st")]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 12, ran.stdout  # MiB; the tensors have 2 each, and 64 together


# --------------------------------------------------------------------------------------------------------- the CLI


def test_inspect_lists_what_is_there(tmp_path, capsys):
    run_ranks(_save, 2, tmp_path / "run" / "a", "net")
    assert main(["inspect", str(tmp_path / "run")]) == 0  # the newest of the folder
    text = capsys.readouterr().out
    assert "checkpoint of shardkit" in text and "step: 7" in text and "ranks: 2" in text and "epoch" in text
    line = next(x for x in text.splitlines() if x.startswith("model.blocks.0.up.weight "))
    assert line.split()[1:] == ["float32", "11x5", "220", "0,", "1"]
    assert main(["inspect", "--json", str(tmp_path / "run")]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["facts"]["torch"] == torch.__version__
    assert {"model.scale", "optim.state.cube.exp_avg"} <= {t["name"] for t in contents["tensors"]}


def test_the_command_line_converts_and_says_what_is_wrong(tmp_path, capsys):
    run_ranks(_save, 2, tmp_path / "a", "net")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "bfloat16"]) == 0
    assert "wrote safetensors" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "b")]) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "not empty" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "c")]) == 1
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--dtype", "string"]) == 2
    (tmp_path / "a" / "__1_0.distcp").unlink()
    assert main(["inspect", str(tmp_path / "a")]) == 1
    assert "__1_0.distcp is missing" in capsys.readouterr().err
    assert not (tmp_path / "c").exists() and not list(tmp_path.glob(".*"))


@ranks(2)
def test_a_converted_model_trains_on(rank, world, tmp_path):
    if rank == 0:
        torch.save(build(0).state_dict(), tmp_path / "w.pt")
        convert(tmp_path / "w.pt", tmp_path / "out")
    dist.barrier()
    model, other = wrap(1), wrap(0)
    shardkit.load_checkpoint(tmp_path / "out", model)
    for m in (model, other):
        step(m, torch.optim.SGD(m.parameters(), lr=0.1), 1)
    assert_same(whole(model), whole(other))
