"""Durable file operations, and mapping of operating-system errors to learner errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from swarmq.errors import LearnerError
from swarmq.runtime.files import fsync_folder


class DiskFullError(LearnerError):
    """The disk has no room; the operation can be tried again."""


@contextlib.contextmanager
def map_os_errors(path: Path) -> Iterator[None]:
    """Raise LearnerError for an OSError at `path`, DiskFullError if the disk is full."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename2 or error.filename or path}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DiskFullError(f"{what}: free space there, nothing is lost") from error
        raise LearnerError(f"{what}: check the folder and its permissions") from error


def fsync_tree(folder: Path) -> None:
    """Make every file and name below `folder` durable."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            fsync_folder(path)
        else:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
