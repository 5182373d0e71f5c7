"""The ledger of a study: an append-only file of JSON lines, each durable before anybody acts on it, and each with the hash of the
line before it.

The lines of one decision are written and synced together. What a full disk or a crash leaves of them is removed before the next ones are
written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from swarmq.errors import StudyError
from swarmq.runtime.files import fsync_folder, read_if_exists, write_atomically
from swarmq.studies.records import AnyFact, Entry


class StudyFolder:
    """Paths of a study's files, in `studies/NAME` beside its study file, or in `path`."""

    def __init__(self, study_file: Path, name: str, *, path: Path | None = None) -> None:
        self.root = study_file.absolute().parent
        """Folder of the study file, in which trials run."""
        self.path = path or self.root / "studies" / name

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def lock(self) -> Path:
        """File that the process which writes the ledger holds locked."""
        return self.path / "lock"

    @property
    def broker(self) -> Path:
        """Folder of the study's own RabbitMQ."""
        return self.path / "broker"

    @property
    def endpoint(self) -> Path:
        """File with the broker's URL, for workers and commands on this host; readable by its owner alone."""
        return self.path / "endpoint"

    @property
    def hosts(self) -> Path:
        """Registry of the hosts that were invited to run trials."""
        return self.path / "hosts.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def trial(self, lineage: str) -> Path:
        return self.path / "trials" / lineage[:16]


def redact(text: str, root: Path) -> str:
    """Return a text for the ledger, which may be published, without the paths of this machine. `root`: folder of the study file.

    Paths below it begin with STUDY, others with STUDY/.., ~, TMP, PYTHON (the environment) or SOURCE (the folder that holds swarmq)."""
    names = {parent: "STUDY" + "/.." * up for up, parent in enumerate([root, *root.parents])}
    # tempfile.gettempdir and Path.home raise errors on a full disk and without a home
    home, temporary = os.environ.get("HOME") or "~", os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
    names |= {Path(temporary): "TMP", Path(home): "~", Path(sys.prefix): "PYTHON"}
    names |= {Path(__file__).parents[2]: "SOURCE", root: "STUDY"}
    names = {path.resolve(): name for path, name in names.items()} | names
    names = {path: name for path, name in names.items() if path != path.parent}
    for path in sorted(names, key=lambda path: len(str(path)), reverse=True):
        text = re.sub(rf"(?<![\w.~-]){re.escape(str(path))}(?![\w-]|\.\w)", names[path], text)
    return text


def read_ledger(path: Path) -> list[Entry]:
    """Return all entries; none if there is no file. A decision whose last line is missing or torn is left out. Raises StudyError if a line was changed or lost."""
    return _parse(path, read_if_exists(path))[0]


def _parse(path: Path, content: bytes) -> tuple[list[Entry], int]:
    """Return the entries, and the number of bytes that hold them."""
    entries: list[Entry] = []
    previous, size, whole, whole_size = "", 0, 0, 0
    for line in content.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except msgspec.MsgspecError as error:
            raise StudyError(
                f"{path}: line {len(entries) + 1} cannot be read ({error}); restore the file from a copy"
            ) from error
        if (entry.number, entry.previous) != (len(entries) + 1, previous):
            raise StudyError(
                f"{path}: line {len(entries) + 1} does not follow the line before: a line was changed or removed"
            )
        entries.append(entry)
        previous, size = _hash(line), size + len(line)
        if not entry.is_continued:
            whole, whole_size = len(entries), size
    return entries[:whole], whole_size


def hash_ledger(path: Path) -> str:
    """Return the hash of the last whole line, which depends on all lines before it. Raises StudyError for a damaged file."""
    content = read_if_exists(path)
    return _hash_last(content[: _parse(path, content)[1]])


def _hash_last(content: bytes) -> str:
    return _hash(content.splitlines(keepends=True)[-1]) if content else ""


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


class LedgerFile:
    """The ledger, open for writing by the process that holds its lock. `entries`: all entries so far."""

    def __init__(self, path: Path) -> None:
        """Open the file; the next append removes what was torn. Raises StudyError for a damaged one, OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        content = read_if_exists(path)
        self.entries, self._size = _parse(path, content)
        self._previous = _hash_last(content[: self._size])
        self._clock = path.with_name("elapsed_s")
        """File with the seconds of leaders so far, which one that is killed between two entries leaves behind."""
        kept = [entry.elapsed_s for entry in self.entries[-1:]]
        if kept:  # else the clock is that of another study in this folder
            kept.append(float(read_if_exists(self._clock) or 0))
        self._began, self._base_s = time.monotonic(), max(kept, default=0.0)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fsync_folder(path.parent)

    @property
    def elapsed_s(self) -> float:
        """Seconds for which leaders have run, this one included."""
        return self._base_s + time.monotonic() - self._began

    def keep_time(self) -> None:
        """Keep the time until now also if this process is killed before its next entry. A full disk keeps it at the next call."""
        with contextlib.suppress(OSError):
            write_atomically(self._clock, f"{self.elapsed_s:.3f}".encode())

    def append(self, facts: Sequence[AnyFact]) -> list[Entry]:
        """Append facts durably, all or none, and return their entries. Raises OSError, and leaves the file as it was, if the disk does
        not take them."""
        entries: list[Entry] = []
        lines, previous = [], self._previous
        for number, fact in enumerate(facts, len(self.entries) + 1):
            entry = Entry(
                number=number,
                at=round(time.time(), 3),
                elapsed_s=round(self.elapsed_s, 3),
                previous=previous,
                fact=fact,
                is_continued=len(entries) + 1 < len(facts),
            )
            line = msgspec.json.encode(entry) + b"\n"
            previous = _hash(line)
            entries.append(entry)
            lines.append(line)
        whole = b"".join(lines)
        os.ftruncate(self._file, self._size)
        try:
            written = os.pwrite(self._file, whole, self._size)
            if written != len(whole):
                raise OSError(28, os.strerror(28), str(self._path))
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(whole)
        self._previous = previous
        self.entries += entries
        return entries

    def close(self) -> None:
        os.close(self._file)
