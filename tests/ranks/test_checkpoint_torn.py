"""Checkpoints are whole or not there: kills at every file operation, damaged and missing files, old ones removed."""

import json
import os
import shutil
import sys

import pytest
import torch
import torch.distributed as dist

import shardkit
from shardkit.checkpoint import files, records
from tests.harness import RankFailure, ranks, run_ranks
from tests.ranks.checkpoint_models import assert_same, step, whole, wrap

KILLED = 77
_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


class Killer:
    """Ends this process before the n-th thing it does to the file system under `folder`, as a power cut would."""

    def __init__(self, folder, n):
        self.folder, self.left, self.armed = str(folder), n, False

    def count(self):
        if self.armed:
            if self.left == 0:
                os._exit(KILLED)
            self.left -= 1

    def audit(self, event, arguments):
        if event in _EVENTS and arguments and str(arguments[0]).startswith(self.folder):
            flags = arguments[2] if event == "open" else os.O_WRONLY
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self.count()

    def install(self):
        sys.addaudithook(self.audit)  # for the rest of this process, a child made for it
        for module, name in zip([files, files, records, records], ["exchange", "flush", "write_tensor", "write_bytes"]):
            setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, function):
        def run(*args, **kwargs):
            self.count()
            return function(*args, **kwargs)

        return run


def _killed_save(folder, path, n, model, optim, **options):
    """Forks, and kills the child before its n-th file operation. True where it was killed, False where it finished."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            killer = Killer(folder, n)
            killer.install()
            killer.armed = True
            shardkit.save_checkpoint(path, model, optim, **options)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


@pytest.mark.parametrize("case", ["another name", "the same name", "the same name without an atomic exchange"])
@ranks(1)
def test_a_kill_at_any_file_operation_leaves_a_complete_checkpoint(rank, world, case, tmp_path):
    # One rank communicates nothing, so that a forked child can be killed while its parent goes on.
    if "without" in case:
        files.exchange, exchange = lambda first, second: False, files.exchange
    model = wrap(0)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim, 1)
    old = whole(model, optim)
    shardkit.save_checkpoint(tmp_path / "step_1", model, optim)
    new_model = wrap(1)
    new_optim = torch.optim.Adam(new_model.parameters())
    step(new_model, new_optim, 2)
    new = whole(new_model, new_optim)
    name = "step_2" if case == "another name" else "step_1"
    came, n, killed = set(), 0, True
    while killed:
        killed = _killed_save(tmp_path, tmp_path / name, n, new_model, new_optim, keep=1)
        shardkit.load_checkpoint(tmp_path if case == "another name" else tmp_path / name, model, optim)
        got = whole(model, optim)
        is_new = torch.equal(got["model.emb.weight"], new["model.emb.weight"])
        assert_same(got, new if is_new else old)
        came.add(is_new)
        if is_new:  # start over from the old one
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            before = wrap(0)
            before_optim = torch.optim.Adam(before.parameters())
            step(before, before_optim, 1)
            shardkit.save_checkpoint(tmp_path / "step_1", before, before_optim)
        n += 1
    assert came == {False, True} and n > 20, (came, n)
    if "without" in case:
        files.exchange = exchange
    shardkit.save_checkpoint(tmp_path / name, new_model, new_optim, keep=1)
    assert sorted(os.listdir(tmp_path)) == sorted([name, "latest"])  # the next save cleans up what kills left


def _save_and_die(rank, world, folder, victim, n):
    model = wrap(1)
    killer = Killer(folder, n)
    killer.install()
    killer.armed = rank == victim
    shardkit.save_checkpoint(folder / "step_2", model)


def _load_old(rank, world, folder):
    model = wrap(5)
    shardkit.load_checkpoint(folder, model)
    assert_same(whole(model), whole(wrap(0)))
    assert not (folder / "step_2").exists()


def _save_first(rank, world, folder):
    shardkit.save_checkpoint(folder / "step_1", wrap(0))


@pytest.mark.parametrize(("victim", "n"), [(1, 3), (1, 0), (0, 2), (0, 12)])
def test_a_rank_that_dies_ends_the_save_for_all_and_leaves_the_previous_one(victim, n, tmp_path):
    run_ranks(_save_first, 2, tmp_path)
    with pytest.raises(RankFailure, match=f"exit code {KILLED}"):
        run_ranks(_save_and_die, 2, tmp_path, victim, n, fresh=True)
    run_ranks(_load_old, 2, tmp_path)


# -------------------------------------------------------------------------------------------------- damaged files


def _cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _flip(path):
    data, at = bytearray(path.read_bytes()), 0
    if path.suffix == ".distcp":  # an element: the headers between them are for other readers
        rows = json.loads(path.with_suffix(".json").read_text())["records"].values()
        at = next(offset for offset, nbytes, _ in rows if nbytes)
    data[at or len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "__1_0.json", ".metadata", "shardkit.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flip"])
@ranks(2)
def test_a_damaged_file_is_named_on_every_rank(rank, world, file, damage, tmp_path):
    model = wrap(0)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim, 1)
    shardkit.save_checkpoint(tmp_path / "a", model, optim)
    if rank == 0:
        path = tmp_path / "a" / file
        {"missing": os.unlink, "cut": _cut, "flip": _flip}[damage](path)
    dist.barrier()
    if (file, damage) == ("shardkit.json", "missing"):
        shardkit.load_checkpoint(tmp_path / "a", model, optim)  # then it is a plain dcp checkpoint, without checksums
    elif (file, damage) == (".metadata", "missing"):
        with pytest.raises(shardkit.CheckpointError, match=r"holds no \.metadata"):
            shardkit.load_checkpoint(tmp_path / "a", model, optim)
    else:
        with pytest.raises(shardkit.CheckpointError, match=file):
            shardkit.load_checkpoint(tmp_path / "a", wrap(1), optim=None)


@ranks(2)
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all_and_leaves_nothing(rank, world, tmp_path):
    model = wrap(0)
    shardkit.save_checkpoint(tmp_path / "a", model)
    write = records.write_tensor
    if rank == 1:
        def full(*args):
            raise OSError(28, "No space left on device", str(tmp_path / "__1_0.distcp"))

        records.write_tensor = full
    try:
        with pytest.raises(shardkit.CheckpointError, match=r"No space left on device.*\(rank 1 of 2\)"):
            shardkit.save_checkpoint(tmp_path / "b", model)
    finally:
        records.write_tensor = write
    dist.barrier()  # the first rank has removed what was written
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
    dist.barrier()
    shardkit.save_checkpoint(tmp_path / "b", model)  # and the next one works


@ranks(2)
def test_verify_reads_everything_back(rank, world, tmp_path):
    model = wrap(0)
    shardkit.save_checkpoint(tmp_path / "a", model, verify=True)
    flush = files.flush
    if rank == 1:
        def damaging(file):
            flush(file)
            if file.name.endswith(".distcp"):
                os.pwrite(os.open(file.name, os.O_WRONLY), b"!" * 2048, 0)

        files.flush = damaging
    try:
        with pytest.raises(shardkit.CheckpointError, match="__1_0.distcp is damaged"):
            shardkit.save_checkpoint(tmp_path / "b", model, verify=True)
    finally:
        files.flush = flush


# ---------------------------------------------------------------------------------------------- latest, keep-last-n


@ranks(2)
def test_latest_and_keep(rank, world, tmp_path):
    for n in range(5):
        shardkit.save_checkpoint(tmp_path / f"step_{n}", wrap(n), keep=3, step=n)
        assert (tmp_path / "latest").read_text() == f"step_{n}"
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step_2", "step_3", "step_4"]
    dist.barrier()
    shardkit.save_checkpoint(tmp_path / "critic_9", wrap(8), keep=1)  # another series, whose numbers are its own
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step_2", "step_3", "step_4"]
    if rank == 0:
        shutil.rmtree(tmp_path / "critic_9")
    dist.barrier()
    model = wrap(9)
    assert shardkit.load_checkpoint(tmp_path, model)["step"] == 4
    if rank == 0:
        shutil.rmtree(tmp_path / "step_4")
    dist.barrier()
    assert shardkit.load_checkpoint(tmp_path, model)["step"] == 3  # the newest complete one
    with pytest.raises(shardkit.ConfigError, match="keep=0"):
        shardkit.save_checkpoint(tmp_path / "x", model, keep=0)


@ranks(2)
def test_a_folder_of_something_else_is_left_alone(rank, world, tmp_path):
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    dist.barrier()
    with pytest.raises(shardkit.CheckpointError, match="is not a checkpoint"):
        shardkit.save_checkpoint(tmp_path / "mine", wrap(0))
    assert os.listdir(tmp_path) == ["mine"]
    with pytest.raises(shardkit.CheckpointError, match="does not exist"):
        shardkit.load_checkpoint(tmp_path / "nowhere", wrap(0))
