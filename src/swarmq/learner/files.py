"""Durable file operations, and what the operating system says in words a person can act on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from swarmq.errors import LearnerError


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Raise LearnerError for an OSError at `path`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free space there and start again, nothing is lost" if full else "check the folder and its rights"
        raise LearnerError(f"{error.filename or path}: {error.strerror}: {advice}") from error


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
