"""Scripts written for FSDP1 or fairscale run with their import lines changed, and end as the originals do.

`examples/migrating/*.py` hold the originals' import lines as comments. FSDP1's scripts, and fairscale's OSS, run on
CPUs as they were, and are compared with that. fairscale's FullyShardedDataParallel does not (it indexes CUDA streams),
so its scripts are compared with training the unwrapped model in one process.
"""

import copy
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.harness import ranks
from tests.oracle import compare

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "migrating"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
CPU = torch.device("cpu")
# Of the losses of one to two dozen steps; the trajectories of the float32 scripts part by rounding only.
RTOL = {"fsdp1_transformer.py": 2e-2, "fairscale_transformer.py": 5e-3}
DEFAULT_RTOL = 1e-4


def original(name):
    """The script with its original import lines."""
    out, ours = [], False
    for line in (FOLDER / name).read_text("utf-8").split("\n"):
        begins = line.startswith("from shardkit.integrations.")
        if not (ours or begins):
            out.append(line.removeprefix("# was: "))
        ours = line.endswith("(") if begins else ours and line != ")"
    assert not any("shardkit" in line for line in out), "the import lines are not the only difference"
    return "\n".join(out)


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_import_lines_differ(name):
    assert len(original(name)) != len((FOLDER / name).read_text("utf-8"))


def run(path, rank, world, folder):
    losses = runpy.run_path(str(path), run_name="script")["train"](rank, world, str(folder), CPU)
    return {"losses": torch.tensor(losses)}


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("fsdp1") or name == "fairscale_oss.py"])
def test_losses_are_those_of_the_original(rank, world, name, tmp_path):
    if name.startswith("fairscale"):
        pytest.importorskip("fairscale")
    folders = [tmp_path / f"{which}" for which in ("ours", "theirs")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    script = tmp_path / f"original{rank}.py"
    script.write_text(original(name), "utf-8")
    got, want = run(FOLDER / name, rank, world, folders[0]), run(script, rank, world, folders[1])
    compare(name, got, want, RTOL.get(name, DEFAULT_RTOL))
    if name == "fsdp1_lora.py" and rank == 0:
        adapters = [torch.load(folder / "adapters.pt") for folder in folders]
        compare("adapters", *adapters, DEFAULT_RTOL)


# ------------------------------------------------------------------------------- against the unwrapped model


def alone(model, batch, loss_of, optim, world, steps, accumulated=1, clip=None):
    """Each rank's losses of training `model` in this process on what all ranks see."""
    losses = [[] for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            for part in range(accumulated):
                loss = loss_of(model, batch(rank, accumulated * step + part, CPU))
                (loss / world).backward()
            losses[rank].append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        optim.zero_grad()
    return losses


def of_ids(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def square(model, x):
    return (model(x) ** 2).mean()


@ranks(2, timeout=180.0)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("fairscale")])
def test_losses_are_those_of_a_single_process(rank, world, name, tmp_path):
    script = runpy.run_path(str(FOLDER / name), run_name="script")
    got = torch.tensor(script["train"](rank, world, str(tmp_path), CPU))
    torch.manual_seed(0)
    batch, adam = script["batch"], torch.optim.Adam
    if name == "fairscale_transformer.py":
        model = script["Transformer"](CPU)  # outside of enable_wrap nothing is wrapped
        optim = adam(model.parameters(), lr=3e-3)
        want = alone(model, lambda r, s, d: batch(r, s % 2, d), of_ids, optim, world, 8, clip=1.0)
    elif name == "fairscale_lora.py":
        model = script["build"]()
        frozen = copy.deepcopy(model.state_dict())
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        want = alone(model, batch, square, optim, world, 6, accumulated=2)
        saved = torch.load(tmp_path / "adapters.pt") if rank == 0 else {}
        compare("adapters", saved, {k: v for k, v in model.state_dict().items() if k in saved}, 1e-4)
        assert not any(".base." in k for k in saved) and all(k in frozen for k in saved)
    else:
        model = script["build"]()
        optim = adam(model.parameters(), lr=1e-2)
        oss = name == "fairscale_oss.py"
        want = alone(model, batch, square, optim, world, 8, accumulated=2 if oss else 1, clip=1.0 if oss else None)
    compare(name, {"losses": got}, {"losses": torch.tensor(want[rank])}, RTOL.get(name, DEFAULT_RTOL))
