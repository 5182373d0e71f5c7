"""The runs that a dashboard shows. Their folders are searched again at intervals, and the indices of runs in use are kept up
to date.

Ids are names of folders, made unique; an id from an address is only ever looked up here, so none can leave the folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import structlog

from swarmq.config import RunFolder
from swarmq.errors import SwarmqError
from swarmq.observe.run import Run
from swarmq.observe.runs import ProgressCache, RunRow, list_runs

FRESH_S = 5.0
"""Seconds for which the list of runs counts as up to date."""
POLL_S = 1.0
"""Seconds between two checks of the files of a run that a browser shows."""
MAX_OPEN = 8
"""Maximum number of runs whose tokenizers and indices are held; beyond that, the least recently used ones are closed."""
WATCHED_S = 30.0
"""Seconds after the last request for a run during which its index is kept up to date."""

log = structlog.get_logger()


class UnknownRunError(SwarmqError):
    """No run of the dashboard has this id."""


class OpenRun:
    """A run that a browser shows: its files, its index, and what changed in them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.changes = 0
        """Number of checks so far that found a change."""
        self.what: dict[str, int] = {}
        """Part of the pages (`steps`, `episodes`, ...) -> value of `changes` at its last change."""
        self.changed = asyncio.Event()
        self.used_at = time.monotonic()
        self._sizes: dict[str, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._is_indexed = False
        self._keeper: asyncio.Task[None] | None = None

    def use(self) -> None:
        """Record a request for the run, and keep its index up to date for a while."""
        self.used_at = time.monotonic()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        self._stop.set()
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    async def watch(self) -> AsyncIterator[list[str]]:
        """Yield, after each change of the run's files, which parts of the pages (`steps`, `episodes`, ...) have changed since the
        last yield; [] after a while without a change."""
        seen = self.changes
        while True:
            self.use()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), WATCHED_S / 2)
            what = [name for name, number in self.what.items() if number > seen]
            seen = self.changes
            yield what

    async def _keep(self) -> None:
        while time.monotonic() - self.used_at < WATCHED_S:
            what = self._find_changes()
            if what or not self._is_indexed:
                try:
                    await asyncio.to_thread(self._update)
                    if not self._is_indexed:
                        what = sorted({*what, "episodes", "state"})  # counts are known from now on
                    self._is_indexed = True
                except (SwarmqError, OSError) as error:
                    log.warning("index_not_updated", run=str(self.run.folder.path), reason=str(error))
            if what:
                self.changes += 1
                self.what |= dict.fromkeys(what, self.changes)
                self.changed.set()
                self.changed = asyncio.Event()
            await asyncio.sleep(POLL_S)

    def _update(self) -> None:
        self.run.index.update(is_cancelled=self._stop.is_set)

    def _find_changes(self) -> list[str]:
        """Return the parts of the pages (`steps`, `episodes`, ...) whose files changed in size or time since the last call."""
        folder, what = self.run.folder, set[str]()
        for path, names in (
            (folder.events, ("steps", "warnings", "state", "episodes")),
            (folder.board, ("state",)),
            (folder.samples, ("state",)),
            (folder.inbox, ("episodes",)),
            (folder.inbox.with_name(f"{folder.inbox.name}-wal"), ("episodes",)),
            (folder.transcripts, ("episodes",)),
        ):
            with contextlib.suppress(OSError):
                stat = path.stat()
                now = (stat.st_size, stat.st_mtime_ns)
                if self._sizes.get(path.name, now if self._sizes else None) != now:
                    what.update(names)
                self._sizes[path.name] = now
        return sorted(what)


class Shelf:
    """All runs in the dashboard's folders."""

    def __init__(self, folders: Sequence[Path], *, cache: Path | None = None) -> None:
        """`folders`: folders of runs, or folders that hold such folders. `cache`: where indices are kept."""
        self._folders = folders
        self._cache = cache
        self._rows: dict[str, RunRow] = {}
        self._entries: list[dict[str, Any]] = []
        self._progress = ProgressCache()
        self._read_at = float("-inf")
        self._open: dict[str, OpenRun] = {}
        self._lock = threading.Lock()

    def rows(self) -> dict[str, RunRow]:
        """Return id -> run, newest first. Folders that cannot be read are left out."""
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_S:
                found: dict[str, RunRow] = {}
                for row in self._find():
                    path = str(Path(row.folder).resolve())
                    name = re.sub(r"[^\w.-]", "-", Path(row.folder).name) or "run"
                    id = name if name not in found else f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"  # noqa: A001
                    found[id] = row
                self._rows = dict(sorted(found.items(), key=lambda one: one[1].at, reverse=True))
                self._entries = [describe_row(id, row) for id, row in self._rows.items()]  # noqa: A001
                self._read_at = time.monotonic()
            return self._rows

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of the list of runs, newest first."""
        self.rows()
        return self._entries

    def _find(self) -> list[RunRow]:
        rows: dict[str, RunRow] = {}
        for folder in self._folders:
            is_run = RunFolder(folder).resolved.exists()
            with contextlib.suppress(SwarmqError):
                for row in list_runs(folder.parent if is_run else folder, cache=self._progress):
                    path = Path(row.folder).resolve()
                    if not is_run or path == folder.resolve():
                        rows.setdefault(str(path), row)
        return [rows[path] for path in sorted(rows)]

    async def open(self, id: str) -> OpenRun:  # noqa: A002 - what addresses call it
        """Return the run, opened. Raises UnknownRunError, or ConfigError if its settings cannot be read."""
        found = self._open.get(id)
        if found is None:
            run = await asyncio.to_thread(self._load, id)
            found = self._open.setdefault(id, OpenRun(run))  # another request may have been first
        found.use()
        if len(self._open) > MAX_OPEN:
            oldest = min(self._open, key=lambda one: self._open[one].used_at)
            await self._open.pop(oldest).close()
        return found

    def _load(self, id: str) -> Run:  # noqa: A002
        row = self.rows().get(id)
        if row is None:
            raise UnknownRunError(f"there is no run {id!r} among those of this dashboard")
        run = Run(Path(row.folder), cache=self._cache)
        run.index  # noqa: B018 - opened here, in a thread
        return run

    async def close(self) -> None:
        for one in self._open.values():
            await one.close()


def describe_row(id: str, row: RunRow) -> dict[str, Any]:  # noqa: A002
    """Return an entry of the list of runs."""
    folder = RunFolder(Path(row.folder))
    is_readable = row.state.split(",")[0] in {"up", "stopped"}
    limits: dict[str, int | None] = {}
    if is_readable:
        with contextlib.suppress(SwarmqError, OSError):
            job = Run(folder.path).live_job()
            limits = {name: job.policies[name].train.max_steps for name in job.trained}
    return {
        "id": id,
        "run": row.run,
        "folder": row.folder,
        "state": row.state if is_readable else "unreadable",
        "error": "" if is_readable else row.state,
        "at": row.at,
        "policies": {
            name: {"step": one.step, "max_steps": limits.get(name), "reward": one.reward, "at": one.at}
            for name, one in row.policies.items()
        },
    }
