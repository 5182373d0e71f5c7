"""`swarmq up` as a process that outlives the daemon, and by which a restarted daemon finds the run again.

    daemon ── locks math.lock ── forks ──> the process inherits the lock, writes its id into it, becomes `swarmq up`
      └─ killed at any moment ─> next daemon: is math.lock held? then the id in it is that of the living process

The lock belongs to the open file, which the new process has from its first instruction on, so there is no moment in which the process
exists and cannot be found. As long as the lock is held, its process id has not been given to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from swarmq.engine.server.launch import build_gpu_environment
from swarmq.errors import SwarmqError
from swarmq.host_daemon.ledger import HostFolder
from swarmq.runtime.processes import is_locked

UP = (sys.executable, "-m", "swarmq", "up", "--until-done")
"""Words before the path of a job file. The run ends after its last step, so that its GPUs get free."""
ID_WAIT_S = 10.0
"""Maximum seconds that a process which has inherited the lock may take to write its id."""


class RunProcess(Protocol):
    """The process of a run that is up or starts."""

    async def wait(self) -> None:
        """Wait until the process has ended."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""


class Launcher(Protocol):
    """Start and search of runs' processes."""

    def start(self, run: str, gpus: Sequence[int]) -> RunProcess:
        """Start the run on these GPUs of the host. Raises OSError or SwarmqError if no process could be started."""

    def find(self, run: str) -> RunProcess | None:
        """Return the process of a run that an earlier daemon has started, if it is alive."""


class UpProcess:
    """A `swarmq up`, a child of this daemon or not."""

    def __init__(self, pid: int, child: subprocess.Popen[bytes] | None = None) -> None:
        """`child`: given if the process is a child. Raises ProcessLookupError if there is no such process."""
        self.pid = pid
        self._child = child
        self._descriptor = os.pidfd_open(pid)

    async def wait(self) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)
        if self._child:
            self._child.wait()  # returns at once, and leaves no zombie
        os.close(self._descriptor)

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


class UpLauncher:
    """Starts `swarmq up`, each in a session of its own."""

    def __init__(self, folder: HostFolder, *, command: Sequence[str] = UP) -> None:
        """`command`: words before the path of the job file."""
        self._folder = folder
        self._command = command

    def start(self, run: str, gpus: Sequence[int]) -> UpProcess:
        with self._folder.run_lock(run).open("a+b", buffering=0) as lock, self._folder.log(run).open("ab") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SwarmqError(f"run {run!r} has a process already") from error
            lock.truncate(0)
            child = subprocess.Popen(
                [*self._command, str(self._folder.run(run).job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | build_gpu_environment(gpus or None),
                start_new_session=True,
                pass_fds=[lock.fileno()],
                preexec_fn=partial(_write_own_id, lock.fileno()),
            )
        return UpProcess(child.pid, child)

    def find(self, run: str) -> UpProcess | None:
        path, until = self._folder.run_lock(run), time.monotonic() + ID_WAIT_S
        while is_locked(path):
            if pid := _read_id(path):
                with contextlib.suppress(ProcessLookupError):
                    process = UpProcess(pid)
                    if is_locked(path):
                        return process
            elif time.monotonic() > until:
                raise SwarmqError(
                    f"{path}: locked by a process that has not written its id: find it with `fuser {path}`"
                )
            time.sleep(0.01)
        return None


def _write_own_id(descriptor: int) -> None:
    os.write(descriptor, f"{os.getpid()}\n".encode())


def _read_id(path: Path) -> int | None:
    text = path.read_text()
    return int(text) if text.endswith("\n") else None
