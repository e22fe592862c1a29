"""What checkpoints do to a file system. Every change goes through one of the functions of this module, in order, so
that a test can end the process before any of them.

A checkpoint is a folder. While it is written it is called `.<name>.writing-<token>`, next to where it will be; one
rename makes it visible. Where the name exists already, the two folders change places in one system call. Names:

    step_200/                    a complete checkpoint
    .step_300.writing-1f2e...    being written, or left behind by a process that died
    .step_100.removed-9c0d...    on its way out: renamed first, so that no half-deleted folder looks complete
    .step_100.replaced-77aa...   the older of two that share a name, where the system cannot swap them in one call
    latest                       a file with the name of the newest complete checkpoint
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import uuid
from pathlib import Path

WRITING, REMOVED, REPLACED, LATEST = ".writing-", ".removed-", ".replaced-", "latest"
METADATA, INDEX = ".metadata", "shardkit.json"


def make_folder(path: Path) -> None:
    """Makes `path`, which must not exist, and its parents."""
    path.mkdir(parents=True)


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file through to the disk."""
    with open(path, "wb") as file:
        file.write(data)
        flush(file)


def flush(file) -> None:
    """Forces what was written to an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def start_flushing(file, start: int, stop: int) -> None:
    """Lets the system begin to write bytes [start, stop) of an open file to the disk, where it can: the disk then works
    while the next bytes are prepared, and `flush` finds most of them there."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        file.flush()
        begin = 2  # SYNC_FILE_RANGE_WRITE: do not wait
        call(file.fileno(), ctypes.c_int64(start), ctypes.c_int64(stop - start), begin)


def flush_folder(path: Path) -> None:
    """Forces a folder's entries to the disk, where the system allows it: without this a rename may be lost."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """One atomic rename; `target` does not exist, or is a file."""
    os.replace(source, target)


def exchange(first: Path, second: Path) -> bool:
    """Swaps two existing paths in one atomic system call. False where the system has none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), swap) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(first))


def remove_folder(path: Path) -> None:
    """Removes a folder that nobody may take for a checkpoint (any more)."""
    shutil.rmtree(path, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ made of those


def new_token() -> str:
    return uuid.uuid4().hex[:12]


def temporary_of(path: Path, token: str) -> Path:
    return path.parent / f".{path.name}{WRITING}{token}"


def publish(temporary: Path, path: Path) -> None:
    """Makes a complete folder visible as `path`, replacing a checkpoint that is there. First rank only.

    Raises FileExistsError where `path` is something else than a checkpoint.
    """
    flush_folder(temporary)
    if not path.exists():
        rename(temporary, path)
    else:
        if not is_complete(path) and any(path.iterdir()):
            raise FileExistsError(
                f"{path} exists and is not a checkpoint. It was left as it is; save under another name, or remove it."
            )
        if not exchange(temporary, path):
            # Between these two the checkpoint has no name; `resolve` finds it under its old one.
            replaced = path.parent / f".{path.name}{REPLACED}{new_token()}"
            rename(path, replaced)
            rename(temporary, path)
            temporary = replaced
        flush_folder(path.parent)
        remove_folder(temporary)
    flush_folder(path.parent)


def point_latest(path: Path) -> None:
    """Makes `latest`, beside the checkpoint, name it."""
    for last in (False, True):
        temporary = path.parent / f".{LATEST}{WRITING}{new_token()}"
        write_file(temporary, path.name.encode())
        try:
            rename(temporary, path.parent / LATEST)
            break
        except FileNotFoundError:  # another model's save in this folder took it for a leftover
            if last:
                raise
    flush_folder(path.parent)


def remove_old(path: Path, keep: int) -> list[Path]:
    """Removes complete checkpoints of the same series beside `path` until the newest `keep` are left, never `path`.
    Returns what went."""
    others = [p for p in complete_ones(path.parent) if p != path and _series(p.name) == _series(path.name)]
    gone = others[: max(0, len(others) - (keep - 1))]
    for old in gone:
        removed = old.parent / f".{old.name}{REMOVED}{new_token()}"
        rename(old, removed)
        remove_folder(removed)
    return gone


def remove_leftovers(path: Path, series: bool) -> None:
    """Removes what a process that died while it saved `path` left behind; with `series`, any of the same series."""
    if not path.parent.is_dir():
        return
    for kind in (WRITING, REMOVED, REPLACED):
        for left in path.parent.glob(f".*{kind}*"):
            name = left.name[1 : left.name.rindex(kind)]
            if left.is_file() and name == LATEST:
                left.unlink(missing_ok=True)
            elif name == path.name or (series and _series(name) == _series(path.name)):
                if kind != REPLACED or (left.parent / name).exists():
                    remove_folder(left)


def _series(name: str) -> str:
    """What names of one series have in common: all but the numbers. Other models may save in the same folder."""
    return re.sub(r"\d+", "#", name)


def is_complete(path: Path) -> bool:
    """True for a folder that a checkpoint was published as. One that is being written has another kind of name."""
    return (path / METADATA).is_file()


def complete_ones(folder: Path) -> list[Path]:
    """The complete checkpoints of shardkit in `folder`, oldest first, by the time that is written in them."""
    found = []
    for index in folder.glob(f"*/{INDEX}"):
        if not index.parent.name.startswith(".") and is_complete(index.parent):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append((float(json.loads(index.read_text())["saved"]), index.parent))
    return [path for _, path in sorted(found)]


def resolve(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest one in a folder of checkpoints.

    Looks at complete checkpoints only, and at nothing that may be being written. Raises FileNotFoundError.
    """
    if is_complete(path):
        return path
    for replaced in sorted(path.parent.glob(f".{path.name}{REPLACED}*")):
        if not path.exists() and is_complete(replaced):  # ended between the two renames of `publish`
            return replaced
    if path.is_dir():
        with contextlib.suppress(OSError):
            named = path / (path / LATEST).read_text().strip()
            if is_complete(named):
                return named
        complete = complete_ones(path)
        if complete:
            return complete[-1]
        raise FileNotFoundError(
            f"{path} holds no {METADATA}, no {LATEST!r} that names a checkpoint, and no complete checkpoint. It may "
            "have been left by another tool, or be a folder whose checkpoints were all interrupted."
        )
    raise FileNotFoundError(f"{path} does not exist. Pass a checkpoint, or the folder that holds the checkpoints.")
