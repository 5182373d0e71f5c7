"""Small files: written atomically and durably, by one process at a time; a damaged file that can be recreated is set aside."""

from __future__ import annotations

import errno
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
    """Hold the file's lock inside the block, so that no other process changes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes, *, is_durable: bool = True) -> None:
    """Replace the file's content: readers see the old or the new content; if durable, also after a power loss.

    The file is readable by its owner alone.
    """
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if is_durable:
        fsync_folder(path.parent)


def read_if_exists(path: Path) -> bytes:
    """Return the content of the file; b"" if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def write_whole(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data` at a place in an open file. Raises OSError, and may then have written a part."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def fsync_folder(folder: Path) -> None:
    """Make created, renamed and removed names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_or_reset(path: Path, read: Callable[[bytes], T], empty: T, *, action: str) -> T:
    """Return what `read` decodes from the file, or `empty` if the file does not exist.

    A file that `read` rejects is renamed to NAME.damaged, `empty` is returned, and the log states the `action` that follows. Raises
    OSError if the file cannot be read or renamed.
    """
    try:
        return read(path.read_bytes())
    except FileNotFoundError:
        return empty
    except (ValueError, msgspec.MsgspecError) as error:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        log.warning("file_damaged", file=str(path), reason=str(error), set_aside_as=aside.name, action=action)
        return empty


class LineFile:
    """A file of lines that is only appended to, also by other processes, and that outlives a full disk.

    A line that could be written only in part is closed before the next line, so that readers lose that line alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: bytes) -> None:
        """Append one line; `line` has no newline. Raises OSError if that fails, e.g. on a full disk."""
        with self.path.open("ab+", buffering=0) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line
            whole = line + b"\n"
            if file.write(whole) != len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


FileStamp = tuple[int, int]
"""Modification time in nanoseconds, and inode; (0, 0): there is no file."""


def read_stamp(path: Path) -> FileStamp:
    """Return the file's stamp, which changes with every `write_atomically`."""
    try:
        found = os.stat(path)  # noqa: PTH116 - cheaper than Path.stat, and called for every request
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_ino


class CachedFile(Generic[T]):
    """The decoded content of a file, read again whenever the file has changed."""

    def __init__(self, path: Path, read: Callable[[], T], empty: T) -> None:
        """`read`: reads and decodes the file. `empty`: the value while the file does not exist."""
        self._path = path
        self._read = read
        self._value = empty
        self._stamp = (0, 0)

    def value(self) -> T:
        """Return the present content. Raises what `read` raises."""
        stamp = read_stamp(self._path)
        if stamp != self._stamp and any(stamp):
            self._value = self._read()
            self._stamp = stamp
        return self._value
