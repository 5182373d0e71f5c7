"""Programs on several ranks."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from benchmarks.faults.nursery import Child, Nursery

from swarmq.runtime.processes import find_free_port

WAIT_S = 600.0


def launch(count: int, *program: str, hosts: int = 1) -> None:
    """A program of tests/support and its arguments, on `count` ranks; raises when one of them fails. Each of the `hosts` has a
    launcher of its own."""
    if hosts > 1 or torch.cuda.is_available():  # which what has been forked from others could not use
        _start_launchers(count, program, hosts)
    else:
        asyncio.run(_fork_ranks(count, program))


async def _fork_ranks(count: int, program: tuple[str, ...]) -> None:
    """Ranks with torchrun's environment variables, which need not import torch."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    numbered = (
        [world | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(count)] if count > 1 else [{}]
    )
    with tempfile.NamedTemporaryFile() as log:
        ranks = [fork(program, Path(log.name), **numbers) for numbers in numbered]
        try:
            async with asyncio.timeout(WAIT_S):
                for status in asyncio.as_completed([rank.wait() for rank in ranks]):
                    assert await status == 0, log.read().decode()
        finally:
            for rank in ranks:
                kill(rank)
                await rank.wait()


def fork(program: tuple[str, ...], log: Path, **variables: str) -> Child:
    """Start a program of tests/support, with its arguments, as a copy of a process that has imported torch and the learner.

    Copies of one process hash text alike, so the order of a set would be the same in all ranks, and after a death, as it is
    nowhere else. So the next program is a copy of the other of two processes.
    """
    module = f"{Path(program[0]).parent.name}.{Path(program[0]).stem}"
    return next(_nurseries()).start([module, *program[1:]], environment() | variables, log)


def kill(child: Child) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)


@cache
def _nurseries() -> Iterator[Nursery]:
    """Two, in turn, for all tests of this process."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    return itertools.cycle([opened.enter_context(Nursery.open()) for _ in range(2)])


def _start_launchers(count: int, program: tuple[str, ...], hosts: int) -> None:
    if hosts == 1:
        launches = [["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []]
    else:
        port = find_free_port()
        launches = [torchrun(host, port, hosts=hosts, ranks=count // hosts) for host in range(hosts)]
    started = [subprocess.Popen([sys.executable, *each, *program], env=environment()) for each in launches]
    try:
        assert [each.wait(timeout=WAIT_S) for each in started] == [0] * hosts
    finally:
        for each in started:
            each.kill()


def torchrun(
    host: int, port: int, *, hosts: int = 2, ranks: int = 1, address: str = "127.0.0.1", restarts: int = 0
) -> list[str]:
    """Arguments of Python that start the ranks of one of several hosts."""
    return [
        *("-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={ranks}", f"--node-rank={host}"),
        *(f"--master-addr={address}", f"--master-port={port}", f"--max-restarts={restarts}"),
    ]


def environment() -> dict[str, str]:
    tests, repository = Path(__file__).parents[1:3]
    path = f"{tests}:{repository}:{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
