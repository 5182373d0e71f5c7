"""What the daemon knows about its runs: a JSON file for each, replaced atomically, beside the folders of the runs.

    runs/
        math/  code/            the runs' own folders
        .host/
            secret clients.json     root of operators' tokens, and revoked names
            socket lock             for clients on this host; held while a daemon serves
            runs/math.json          the record of a run
            runs/math.lock          held by the process of the run, with its process id
            deleted/                folders that are being removed

A run is launched when its record is on disk, which also holds its job. Nothing else is remembered, so a killed daemon forgets nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from swarmq.config import RunFolder
from swarmq.errors import ConfigError
from swarmq.remote.records import UP_LOG
from swarmq.runtime.files import fsync_folder, write_atomically


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was launched. Times are Unix seconds."""

    run: str
    job: dict[str, Any]
    request_id: str
    digest: str
    """Digest of the launch request, by which a repeated one is recognised."""
    owner: str
    launched_at: float
    num_gpus: int
    """Number of GPUs that the run needs; 0 on a host without GPUs."""
    state: Literal["queued", "running", "stopping", "stopped", "done", "failed"] = "queued"
    queued_at: float
    """Time by which queued runs are ordered."""
    gpus: tuple[int, ...] = ()
    """GPUs that the running run holds."""
    started_at: float | None = None
    log_start: int = 0
    """Size of `up.log` in bytes when the run was started last."""
    detail: str = ""
    restarts: int = 0

    @property
    def is_running(self) -> bool:
        """Whether a process of the run may exist."""
        return self.state in {"running", "stopping"}


class HostFolder:
    """Paths of a host's files."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._own = self.path / ".host"

    def run(self, run: str) -> RunFolder:
        return RunFolder(self.path / run)

    def log(self, run: str) -> Path:
        """Output of the run's `swarmq up`."""
        return self.run(run).logs / UP_LOG

    @property
    def root_secret(self) -> Path:
        return self._own / "secret"

    @property
    def revoked(self) -> Path:
        return self._own / "clients.json"

    @property
    def socket(self) -> Path:
        return self._own / "socket"

    @property
    def lock(self) -> Path:
        return self._own / "lock"

    @property
    def records(self) -> Path:
        return self._own / "runs"

    def record(self, run: str) -> Path:
        return self.records / f"{run}.json"

    def run_lock(self, run: str) -> Path:
        return self.records / f"{run}.lock"

    @property
    def deleted(self) -> Path:
        return self._own / "deleted"


class Ledger:
    """The records of all runs, in memory and on disk."""

    def __init__(self, folder: HostFolder) -> None:
        """Read all records. Raises ConfigError if one is damaged."""
        self._folder = folder
        folder.records.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._records = {record.run: record for record in map(_read, sorted(folder.records.glob("*.json")))}

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(sorted(self._records.values(), key=lambda one: one.launched_at))

    def get(self, run: str) -> RunRecord | None:
        return self._records.get(run)

    def find_request(self, request_id: str) -> RunRecord | None:
        return next((one for one in self._records.values() if one.request_id == request_id), None)

    def put(self, record: RunRecord) -> None:
        """Store the record durably. Raises OSError, and changes nothing, if the disk does not take it."""
        write_atomically(self._folder.record(record.run), msgspec.json.encode(record))
        self._records[record.run] = record

    def remove(self, run: str) -> None:
        self._folder.record(run).unlink(missing_ok=True)
        self._folder.run_lock(run).unlink(missing_ok=True)
        fsync_folder(self._folder.records)
        self._records.pop(run, None)


def _read(path: Path) -> RunRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: the record of a run cannot be read ({error}): restore it from a copy, or remove it; the run's folder stays as it is"
        ) from error
