"""A run's process outlives the daemon that started it, and the next daemon finds it: at whatever moment the first one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from swarmq.errors import SwarmqError
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.processes import UpLauncher

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
DAEMON = """
import sys
from pathlib import Path
from swarmq.host_daemon.ledger import HostFolder
from swarmq.host_daemon.processes import UpLauncher

folder = HostFolder(Path(sys.argv[1]))
process = UpLauncher(folder, command=sys.argv[2:]).start("math", ())
print(process.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> HostFolder:
    host = HostFolder(tmp_path)
    host.records.mkdir(parents=True)
    host.run("math").logs.mkdir(parents=True)
    return host


async def test_a_run_of_a_killed_daemon_is_found_until_it_ends(folder):
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DAEMON, str(folder.path), *SLEEP), stdin=PIPE, stdout=PIPE
    )
    pid = int(await daemon.stdout.readline())
    daemon.kill()
    await daemon.wait()
    launcher = UpLauncher(folder)
    found = launcher.find("math")
    assert found
    assert found.pid == pid
    with pytest.raises(SwarmqError, match="has a process already"):
        launcher.start("math", ())
    found.send(signal.SIGKILL)
    async with asyncio.timeout(30):
        await found.wait()
    assert launcher.find("math") is None


async def test_a_run_that_ended_by_itself_is_waited_for_and_not_found(folder):
    process = UpLauncher(folder, command=(sys.executable, "-c", "")).start("math", ())
    async with asyncio.timeout(30):
        await process.wait()
    with pytest.raises(ProcessLookupError):  # no zombie is left
        os.kill(process.pid, 0)
    assert UpLauncher(folder).find("math") is None


async def test_a_run_has_a_session_of_its_own_its_log_and_its_gpus(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    says = "import os; print(os.getsid(0) == os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'])"
    process = UpLauncher(folder, command=(sys.executable, "-c", says)).start("math", (0, 2))
    async with asyncio.timeout(30):
        await process.wait()
    assert folder.log("math").read_text() == "True 4,6\n"


def test_a_run_that_never_was_is_not_found(folder):
    assert UpLauncher(folder).find("math") is None
