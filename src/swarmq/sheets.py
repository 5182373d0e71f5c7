"""Small files in the run folder that several processes change: one at a time, and written whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Nobody else changes the file inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one; it is readable by its owner alone."""
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_bytes(content)
    part.replace(path)


class Sheet(Generic[T]):
    """What a file says, read again when it has changed."""

    def __init__(self, path: Path, read: Callable[[], T], empty: T) -> None:
        """`empty` is the value before there is such a file."""
        self._path = path
        self._read = read
        self._value = empty
        self._stamp = (0, 0)

    def value(self) -> T:
        """Raises what `read` raises, until the file is mended."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - one call, on the way of every request
        except OSError:
            return self._value
        if (stamp := (found.st_mtime_ns, found.st_ino)) != self._stamp:
            self._value = self._read()
            self._stamp = stamp
        return self._value
