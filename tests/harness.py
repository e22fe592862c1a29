"""Tests that run on several ranks.

    @ranks(2, 4)                                   # twice: on 2 ranks and on 4, in a gloo process group of that size
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sums_agree(rank, world, dtype, tmp_path): ...    # on every rank; tmp_path is the same folder on all

    first, second = run_ranks(body, 2, "an argument")    # body(0, 2, "an argument"), body(1, 2, "an argument")

Ranks are forked from a server process that has torch imported already, and are kept from test to test together with
their process group, one pool for each (world size, backend): a fresh spawn of 4 ranks takes about half a minute, a new
pool half a second, a call of a kept one milliseconds. A pool is killed after a failure or a time limit, and when its
ranks do not leave a test in step; the next test gets a new one. Before each body, torch, random and numpy are seeded
(the same on every rank) and the environment variables restored (with `RANK`, `LOCAL_RANK`, `WORLD_SIZE`); other global
state that a body changes it puts back itself, or asks for `fresh=True`.

A body is a function at the top of an importable module whose first parameters are `rank, world`. It travels by name,
its arguments and value by pickle. pytest rewrites asserts in its own process only: a bare `assert` shows all locals.
"""

import atexit
import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import reprlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest.mock
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# What a rank says because another one went away. Whoever raises this did not fail first.
SECONDARY = ("Connection closed by peer", "Broken pipe", "Connection reset", "Socket closed", "Connection refused")
# Of the server and its ranks, from before they import torch: OpenMP reads its number of threads when it is loaded.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
MAX_POOLS = 2  # 2 and 4 ranks side by side
MAX_CALLS = 400  # of one pool, two a test: the groups that tests make keep threads and sockets
START_LIMIT = 120.0  # seconds until the ranks are there, on a machine that imports torch from a cold disk
CHECK_LIMIT = 10.0  # seconds for the barrier after a test
GRACE = 1.5  # seconds that the other ranks get to finish once one has failed


class RankFailure(AssertionError):
    """At least one rank failed, died or exceeded the time limit; the message holds what every rank said."""


def ranks(*worlds, timeout=60.0, backend="gloo", fresh=False):
    """Run the decorated test on every rank of a process group, once for each world size in `worlds`.

    The test's remaining arguments (fixtures and parameters) come from pytest and are pickled. `timeout` is in seconds,
    for one world size. `fresh` starts new processes for this test and discards them afterwards.
    """

    def decorate(body):
        parameters = list(inspect.signature(body).parameters.values())
        if [parameter.name for parameter in parameters[:2]] != ["rank", "world"]:
            raise TypeError(f"{body.__qualname__} must take `rank, world` first: @ranks runs it on every rank")

        @functools.wraps(body)
        def test(world, **arguments):
            run_ranks(body, world, timeout=timeout, backend=backend, fresh=fresh, **arguments)

        test.rank_body = body  # a rank that looks the body up by its name finds `test`
        test.__signature__ = inspect.Signature(parameters[1:])  # for pytest: `rank` is no fixture, `world` a parameter
        return pytest.mark.parametrize("world", worlds, ids=lambda world: f"{world}ranks")(test)

    return decorate


_pools = {}  # (world, backend) -> _Pool; the one used last is last


def run_ranks(body, world, *args, timeout=60.0, backend="gloo", fresh=False, **kwargs):
    """Run `body(rank, world, *args, **kwargs)` on ranks 0 to `world` - 1 and return their values, in rank order.

    Raises `RankFailure` where a rank raised, died, or took more than `timeout` seconds; skips where a rank skipped.
    """
    __tracebackhide__ = True
    name = f"{body.__module__}.{body.__qualname__}"
    if "<locals>" in name or "<lambda>" in name:
        raise TypeError(f"{name} cannot be found by name in another process: move it to the top of its module")
    pool = None if fresh else _pools.pop((world, backend), None)
    while pool is None and len(_pools) >= MAX_POOLS:
        _pools.pop(next(iter(_pools))).close()
    pool = pool or _Pool(world)
    try:
        if not pool.calls:
            pool.call("the start of the ranks", START_LIMIT, _start, backend, pool.store.port)
        values = pool.call(name, timeout, body, *args, **kwargs)
        barrier = f"the barrier after {name}, which passed: did every rank run the same collectives, and wait for them?"
        if all(pool.call(barrier, CHECK_LIMIT, _meet)) and not fresh and pool.calls < MAX_CALLS:
            _pools[world, backend] = pool
        return values
    finally:
        if _pools.get((world, backend)) is not pool:
            pool.close()


@atexit.register
def close_pools():
    """Kill all kept ranks."""
    while _pools:
        _pools.popitem()[1].close()


@contextlib.contextmanager
def fake_world(world_size, rank=0):
    """This process as one rank of `world_size` in a process group whose collectives do nothing (torch's fake)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass
class _Report:
    """What one rank answered: `ok` with its pickled value, `skip` with a reason, `error` or `death` with a text."""

    kind: str
    value: object
    seconds: float = 0.0

    @property
    def secondary(self):
        return self.kind == "error" and any(sign in self.value for sign in SECONDARY)


class _Pool:
    """`world` processes in one process group, each answering one call after another over a pipe."""

    def __init__(self, world):
        self.world, self.calls, self.printed, self.processes, self.pipes = world, 0, [0] * world, [], []
        self.folder = Path(tempfile.mkdtemp(prefix="shardkit-ranks-"))  # each rank's output and faulthandler's stacks
        # The store lives in this process, so that it outlasts any rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        with unittest.mock.patch.dict(os.environ, ENVIRONMENT):
            forkserver.ensure_running()
        for rank in range(world):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, world, theirs, str(self.folder)), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(pipe)
            theirs.close()  # our copy would hide the rank's death

    def call(self, what, limit, body, *args, **kwargs):
        """Every rank's value of `body`, or a skip, or a failure that says in `what`."""
        __tracebackhide__ = True
        self.calls += 1
        call = pickle.dumps((body.__module__, body.__qualname__, args, kwargs))
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # _collect reports the death
                pipe.send_bytes(call)
        reports = self._collect(limit)
        for rank in range(self.world):  # pytest shows it with the test
            text = (self.folder / f"{rank}.output").read_bytes()[self.printed[rank] :]
            self.printed[rank] += len(text)
            print(f"[rank {rank}] {text.decode(errors='replace')}" if text else "", end="")
        if len(reports) == self.world and all(report.kind == "ok" for report in reports.values()):
            return [pickle.loads(reports[rank].value) for rank in range(self.world)]
        causes = [report for report in reports.values() if report.kind != "ok" and not report.secondary]
        if causes and all(report.kind == "skip" for report in causes):
            pytest.skip(causes[0].value)
        raise RankFailure(self._message(what, reports, limit))

    def close(self):
        for process, pipe in zip(self.processes, self.pipes):
            process.kill()
            process.join()
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _collect(self, limit):
        """Wait for the ranks' reports, keyed by rank in order of arrival. A rank that stays silent has none."""
        start, reports, culled = time.monotonic(), {}, False
        deadline = start + limit
        while len(reports) < self.world:
            waiting = {self.pipes[rank]: rank for rank in range(self.world) if rank not in reports}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            failed = [rank for rank, report in reports.items() if report.kind != "ok"]
            if not ready and (culled or not failed):
                break
            if not ready:
                # The others may wait for the failed ranks for ever. When those die, their sockets close, and the
                # others raise where they are, which gives a traceback of each.
                for rank in failed:
                    self.processes[rank].kill()
                culled, deadline = True, time.monotonic() + 2 * GRACE
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    report = _Report(*pickle.loads(pipe.recv_bytes()))
                except (EOFError, OSError):
                    self.processes[rank].join(5)
                    stacks = (self.folder / f"{rank}.stacks").read_text()
                    report = _Report("death", f"the process died, exit code {self.processes[rank].exitcode}\n{stacks}")
                report.seconds = time.monotonic() - start
                reports[rank] = report
                if report.kind != "ok" and not failed:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return reports

    def _message(self, what, reports, limit):
        failed = sum(report.kind != "ok" for report in reports.values())
        lines = [f"{failed} of {self.world} ranks failed in {what}" if failed else f"time limit exceeded in {what}"]
        for rank, report in sorted(reports.items(), key=lambda item: (item[1].kind == "ok", item[1].secondary)):
            how, text = ("returned", "") if report.kind == "ok" else ("failed", f":\n{report.value}")
            why = ", as a consequence of another rank's end" if report.secondary else ""
            lines.append(f"--- rank {rank} {how} after {report.seconds:.2f} s{why}{text}")
        for rank in sorted(set(range(self.world)) - set(reports)):
            why = "did not answer" if failed else f"exceeded the limit of {limit:g} s"
            lines.append(f"--- rank {rank} {why}; its stacks:\n{self._stacks(rank)}")
        return "\n".join(lines)

    def _stacks(self, rank):
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)  # the signal's handler writes in its own time, though at once
        return (self.folder / f"{rank}.stacks").read_text()


def _worker(rank, world, pipe, folder):
    output, stacks = open(f"{folder}/{rank}.output", "ab"), open(f"{folder}/{rank}.stacks", "w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    environment = {**os.environ, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world}"}
    with contextlib.suppress(EOFError):  # the parent is gone
        while True:
            call = pipe.recv_bytes()
            os.environ.clear()
            os.environ.update(environment)
            pipe.send_bytes(_answer(rank, world, call))
    os._exit(0)  # no farewell to peers that are gone as well


def _start(rank, world, backend, port):
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world, store=dist.TCPStore("127.0.0.1", port))


def _meet(rank, world):
    """Whether this rank still is in a group of `world`. Where one rank is a collective ahead, the barrier hangs."""
    there = dist.is_initialized() and dist.get_world_size() == world
    if there:
        dist.barrier()
    return there


def _call(rank, world, module, name, args, kwargs):
    body = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return getattr(body, "rank_body", body)(rank, world, *args, **kwargs)


def _answer(rank, world, call):
    try:
        answer = ("ok", pickle.dumps(_call(rank, world, *pickle.loads(call))))
    except BaseException as error:  # KeyboardInterrupt and SystemExit are what some bodies test
        answer = ("error", traceback.format_exc() + _locals(error))
        if isinstance(error, pytest.skip.Exception):
            answer = ("skip", str(error))
    print(end="", flush=True)
    return pickle.dumps(answer)


def _locals(error):
    if not isinstance(error, AssertionError) or error.args:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    short = reprlib.Repr()
    short.maxother = short.maxstring = 200
    return "".join(f"    {name} = {short.repr(value)}\n" for name, value in frame.f_locals.items())
