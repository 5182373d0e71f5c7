"""Episodes on this machine's disk: that they have begun, and their ends until the broker has confirmed them.

    <spool>/<run>-<digest>/<owner>/<episode_id>.begin      while it is open
    <spool>/<run>-<digest>/<owner>/<episode_id>.end        the owner holds a lock on <owner>/lock while it lives

An end is written, fsynced and renamed into place before it is published, and removed after the confirm. Whoever
finds the folder of an owner that has died takes its lock, delivers what is left and removes it; the kernel gives a
lock to one process only and frees it whatever the process dies of. What is delivered twice all the same has the
same key and is absorbed by the collector. What had begun and has no end is ended for the dead one: aborted, in its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from swarmq.errors import ClientError, MessageError
from swarmq.keys import Invite
from swarmq.messages import EpisodeBegin, EpisodeEnd, Message, decode, encode
from swarmq.outcome import make_unfinished_end
from swarmq.runtime.files import write_atomically

VARIABLE = "SWARMQ_SPOOL"
BEGIN, END = ".begin", ".end"


def spool_root(invite: Invite) -> Path:
    """The spool of one client of one run; a later run of the same name has other secrets and never meets it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    root = os.environ.get(VARIABLE) or Path(state) / "swarmq" / "spool"
    return Path(root) / f"{invite.run}-{hashlib.sha256(invite.secret).hexdigest()[:8]}"


class Spool:
    """This process's folder in the spool. Files are blocking: call from a thread where a disk may be slow."""

    def __init__(self, root: Path, owner: str) -> None:
        self.root = root
        self.folder = root / owner
        self._lock = self._create()

    def begin(self, begin: EpisodeBegin) -> None:
        """Found by the next process when this one dies. Not synced: when the machine dies, the episode's silence tells.
        Raises ClientError when the disk refuses."""
        try:
            self._path(begin.episode_id, BEGIN).write_bytes(encode(begin))
        except OSError as error:
            raise ClientError(f"an episode cannot be noted in {self.folder}: {error}") from error

    def put(self, end: EpisodeEnd) -> None:
        """Durable when it returns. Raises ClientError when the disk refuses."""
        final = self._path(end.episode_id, END)
        try:
            write_atomically(final, encode(end))
        except OSError as error:
            raise ClientError(f"the end of an episode cannot be kept in {self.folder}: {error}") from error

    def remove(self, episode_id: str) -> None:
        """Nothing is left to be said of it."""
        for suffix in (BEGIN, END):
            self._path(episode_id, suffix).unlink(missing_ok=True)

    def close(self) -> int:
        """Give the folder up; returns how many ends it still holds for the next process."""
        left = len(list(self.folder.glob("*.end")))
        if not left:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
        return left

    def others(self) -> list[Path]:
        """The folders of all other owners, dead or alive."""
        return [path for path in sorted(self.root.iterdir()) if path != self.folder and not path.name.startswith(".")]

    def _create(self) -> IO[bytes]:
        """Locked before it gets its name, so that nobody takes it for the folder of a dead owner."""
        new = self.root / f".{self.folder.name}-{secrets.token_hex(4)}"
        try:
            new.mkdir(parents=True, mode=0o700)
            lock = (new / "lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.folder)
        except OSError as error:
            raise ClientError(f"{self.root} cannot be used as spool: {error}; set ${VARIABLE}") from error
        return lock

    def _path(self, episode_id: str, suffix: str) -> Path:
        return self.folder / f"{episode_id}{suffix}"


class Orphan:
    """What a dead process has left."""

    @classmethod
    @contextlib.contextmanager
    def claim(cls, folder: Path) -> Iterator[Orphan | None]:
        """Ours alone inside the block; None while its owner or another claimant lives."""
        lock = _try_lock(folder)
        if lock is None:
            yield None
            return
        with contextlib.closing(cls(folder, lock)) as orphan:
            yield orphan

    def __init__(self, folder: Path, lock: IO[bytes]) -> None:
        self.folder = folder
        self._lock = lock

    def ends(self) -> Iterator[EpisodeEnd]:
        """Those that were put, and an end for each episode that was still open. `done` when one is delivered.

        A damaged end is set aside as `.bad`; a damaged begin was being written when its process died.
        """
        for path in sorted(self.folder.glob(f"*{END}")):
            end = _read(path)
            if isinstance(end, EpisodeEnd):
                yield end
            else:
                path.rename(path.with_suffix(".bad"))
        for path in sorted(self.folder.glob(f"*{BEGIN}")):
            begin = _read(path)
            if isinstance(begin, EpisodeBegin) and not path.with_suffix(".bad").exists():
                yield make_unfinished_end(begin, "aborted", f"its client {begin.client_id} died while it was open")
            else:
                path.unlink(missing_ok=True)

    def remove(self, end: EpisodeEnd) -> None:
        for suffix in (END, BEGIN):
            (self.folder / f"{end.episode_id}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        if not [path for suffix in (END, BEGIN, ".bad") for path in self.folder.glob(f"*{suffix}")]:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _read(path: Path) -> Message | None:
    try:
        return decode(path.read_bytes())
    except (MessageError, FileNotFoundError):
        return None


def _try_lock(folder: Path) -> IO[bytes] | None:
    try:
        lock = (folder / "lock").open("rb+")
    except OSError:  # its last owner removed it just now
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock
