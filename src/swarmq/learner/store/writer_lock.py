"""One learner per policy folder: an advisory lock that is released when its holder dies, and a fence against former holders.

A suspended holder keeps its lock, and the error that other learners get names its process id. Another process may get the lock
nevertheless, if a network file system let it lapse while the holder's machine slept, or if somebody removed the file. The file
then names the new holder, and the fence stops the old holder before it writes anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from swarmq.errors import LearnerError
from swarmq.learner.store.durable_files import map_os_errors
from swarmq.runtime.files import read_if_exists

POLL_S = 0.05


class Fence:
    """Guard that detects whether another learner has taken the lock since the guard was created. `path`: path of the lock file; None
    on ranks other than 0, which hold no lock."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._ours = path, path and read_if_exists(path)

    def check(self) -> None:
        """Raise LearnerError if another process has taken the lock."""
        if self._path and read_if_exists(self._path) != self._ours:
            raise LearnerError(
                f"{self._path.parent} was taken over by {_holder(self._path)} while this process was suspended; this process ends "
                "without changing anything"
            )


@contextlib.contextmanager
def hold_lock(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`. Raises LearnerError, with the holder's name, if the lock is not free within `wait_s`, and
    LearnerError if the file cannot be opened."""
    with map_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(descriptor, wait_s):
            raise LearnerError(
                f"{path.parent} is in use by {_holder(path)}: stop it first, or give this run another name or folder"
            )
        os.ftruncate(descriptor, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time_ns()}
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if (left_s := until - time.monotonic()) <= 0:
            return False
        time.sleep(min(POLL_S, left_s))


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
