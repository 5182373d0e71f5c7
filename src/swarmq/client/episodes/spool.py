"""The spool: begins of open episodes, and ends until the broker has confirmed them, on this machine's disk.

    <spool>/<run>-<digest>/<owner>/<episode_id>.begin      while the episode is open
    <spool>/<run>-<digest>/<owner>/<episode_id>.end        until the broker has confirmed the end
    <spool>/<run>-<digest>/<owner>/lock                    locked while the owner, a client process, is alive

An end is written, fsynced and renamed into place before it is published, and removed after the confirmation. A process that
finds the folder of a dead owner takes the lock, delivers the ends, aborts the open episodes in the owner's name, and removes the
folder. The kernel gives the lock to one process only, and frees it however the process dies. If an end is delivered twice, the
collector recognises it by its key.
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
    """Return the spool folder of this client and run. A later run of the same name has another secret, and so another folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    root = os.environ.get(VARIABLE) or Path(state) / "swarmq" / "spool"
    return Path(root) / f"{invite.run}-{hashlib.sha256(invite.secret).hexdigest()[:8]}"


class Spool:
    """This process's own folder below the spool folder. The methods block, because a disk may be slow: call them from a thread."""

    def __init__(self, root: Path, owner: str) -> None:
        self.root = root
        self.folder = root / owner
        self._lock = self._create()

    def begin(self, begin: EpisodeBegin) -> None:
        """Write a begin, so that another process can abort the episode if this one dies. Raises ClientError if the disk
        refuses.

        Not synced: if the machine dies, the collector gives the episode up after its idle timeout.
        """
        try:
            self._path(begin.episode_id, BEGIN).write_bytes(encode(begin))
        except OSError as error:
            raise ClientError(f"the begin of an episode cannot be written to {self.folder}: {error}") from error

    def put(self, end: EpisodeEnd) -> None:
        """Write an end durably. Raises ClientError if the disk refuses."""
        final = self._path(end.episode_id, END)
        try:
            write_atomically(final, encode(end))
        except OSError as error:
            raise ClientError(f"the end of an episode cannot be written to {self.folder}: {error}") from error

    def remove(self, episode_id: str) -> None:
        """Remove the files of an episode whose end is confirmed."""
        for suffix in (BEGIN, END):
            self._path(episode_id, suffix).unlink(missing_ok=True)

    def close(self) -> int:
        """Release the folder, and return the number of ends left in it for the next process."""
        left = len(list(self.folder.glob("*.end")))
        if not left:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
        return left

    def others(self) -> list[Path]:
        """Return the folders of all other owners, dead or alive."""
        return [path for path in sorted(self.root.iterdir()) if path != self.folder and not path.name.startswith(".")]

    def _create(self) -> IO[bytes]:
        """Create the folder and lock it before it gets its name, so that no process takes it for a dead owner's."""
        new = self.root / f".{self.folder.name}-{secrets.token_hex(4)}"
        try:
            new.mkdir(parents=True, mode=0o700)
            lock = (new / "lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.folder)
        except OSError as error:
            raise ClientError(
                f"{self.root} cannot be used as spool ({error}): set ${VARIABLE} to another folder"
            ) from error
        return lock

    def _path(self, episode_id: str, suffix: str) -> Path:
        return self.folder / f"{episode_id}{suffix}"


class Orphan:
    """Folder of an owner that died."""

    @classmethod
    @contextlib.contextmanager
    def claim(cls, folder: Path) -> Iterator[Orphan | None]:
        """Lock the folder for the block; yield None if its owner or another claimant is alive."""
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
        """Yield the spooled ends, and an abort for each episode that was still open; call `remove` once an end is delivered.

        A damaged end is renamed to `.bad`; a damaged begin, which was being written when the process died, is deleted.
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
                yield make_unfinished_end(
                    begin, "aborted", f"the client {begin.client_id} died while the episode was open"
                )
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
    except OSError:  # another process has just removed it
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock
