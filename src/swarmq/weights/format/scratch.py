"""Folders in shared memory for weight files, each with the id of its process in its name. Standard library only.

Files in shared memory outlive a killed process, so the next process removes them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder with mode 0700 is created in it
FOLDER_PREFIX = "swarmq-weights-"
SPARE_BYTES = 64 << 20
"""Bytes that a weight file must leave free on its file system."""


def make_scratch_folder(parent: Path) -> Path:
    """Create a folder that only this user can read, with this process's id in its name."""
    return Path(tempfile.mkdtemp(dir=parent, prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))


def has_room(parent: Path, size_bytes: int) -> bool:
    """Return whether the file system of `parent` has room for a weight file of this size."""
    return shutil.disk_usage(parent).free > size_bytes + SPARE_BYTES


def remove_leftovers(parent: Path) -> None:
    """Delete the folders of processes that no longer run."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
