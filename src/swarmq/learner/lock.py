"""One learner per policy folder: an advisory lock that ends with its holder, however that dies."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from swarmq.errors import LearnerError


@contextlib.contextmanager
def exclusive(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`. Raises LearnerError that names the holder when it is not free within `wait_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(descriptor, wait_s):
            raise LearnerError(
                f"{path.parent} is in use by {_holder(path)}: stop it first, or give this run another name or folder"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait_s: float) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass
    if not wait_s:
        return False
    waiter = threading.Thread(target=fcntl.flock, args=(descriptor, fcntl.LOCK_EX), daemon=True)
    waiter.start()
    waiter.join(wait_s)
    return not waiter.is_alive()


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
