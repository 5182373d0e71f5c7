"""Small files: written whole, durably, and by one process at a time; a damaged one that can be made anew is set aside."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from swarmq.runtime.logs import log

T = TypeVar("T")


@contextmanager
def locked_for_change(path: Path) -> Iterator[None]:
    """Nobody else changes the file inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file, on disk when this returns: readers see the old content or the new one, also after a power loss. It is
    readable by its owner alone."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_or_reset(path: Path, read: Callable[[bytes], T], empty: T, *, meaning: str) -> T:
    """What `read` makes of the file, or `empty` where there is none. One that cannot be read is set aside, as NAME.damaged, with a
    log line that says what this means. Raises OSError where the disk refuses."""
    try:
        return read(path.read_bytes())
    except FileNotFoundError:
        return empty
    except (ValueError, msgspec.MsgspecError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        log.warning("file_damaged", file=str(path), error=str(error), set_aside_as=aside.name, meaning=meaning)
        return empty


class CachedFile(Generic[T]):
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
