"""Programs on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from swarmq.runtime.processes import find_free_port


def launch(count: int, *program: str, hosts: int = 1) -> None:
    """A program of tests/support and its arguments, on `count` ranks; raises when one of them fails. Each of the `hosts` has a
    launcher of its own."""
    if hosts == 1:
        launches = [["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []]
    else:
        port = find_free_port()
        launches = [torchrun(host, port, hosts=hosts, ranks=count // hosts) for host in range(hosts)]
    started = [subprocess.Popen([sys.executable, *each, *program], env=environment()) for each in launches]
    try:
        assert [each.wait(timeout=600) for each in started] == [0] * hosts
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
