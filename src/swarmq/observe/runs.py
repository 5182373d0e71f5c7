"""The list of runs in a folder, with state, progress and age. Only reads files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from swarmq import live_settings
from swarmq.collector import ledger
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.observe.curves import read_events
from swarmq.runtime.processes import is_locked

READ_BYTES = 8 * 1024 * 1024
"""Maximum bytes read from the end of an event file to find the newest step."""
UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class PolicyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one trained policy."""

    step: int = 0
    reward: float | None = None
    """Reward of the newest step."""
    at: float | None = None
    """Unix time of the newest step."""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    folder: str
    state: str
    """`up` or `stopped`, followed by `paused`, `draining` or `ended`; or a message about what cannot be read."""
    policies: dict[str, PolicyProgress] = {}
    at: float
    """Unix time of the newest step, or of the newest start if there is no step yet."""


class ProgressCache:
    """The progress of runs whose event files have not changed since they were read."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], dict[str, PolicyProgress]]] = {}

    def read(self, folder: RunFolder, job: SwarmJob) -> dict[str, PolicyProgress]:
        try:
            status = folder.events.stat()
        except OSError:
            return _progress(folder, job)
        state = (status.st_size, status.st_mtime_ns)
        known = self._known.get(folder.events)
        if known is None or known[0] != state:
            known = self._known[folder.events] = (state, _progress(folder, job))
        return known[1]


def list_runs(folder: Path, *, cache: ProgressCache | None = None) -> list[RunRow]:
    """Return the started runs in `folder`, newest step first. Pass a `cache` to call this repeatedly. Raises ConfigError if
    the folder cannot be read."""
    cache = cache or ProgressCache()
    try:
        found = [RunFolder(path.parent) for path in folder.glob("*/resolved.toml")]
        if not folder.is_dir():
            raise ConfigError(
                f"{folder}: there is no such folder; runs are in runs/ by default, or where `folder` says"
            )
        rows = [read_row(one, cache) for one in found]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted(rows, key=lambda row: row.at, reverse=True)


def list_starting(folder: Path) -> list[str]:
    """Return the names of the runs in `folder` that start for the first time, which have no settings to read yet."""
    found = [RunFolder(lock.parent) for lock in sorted(folder.glob(f"*/{RunFolder(folder).lock.name}"))]
    return [one.path.name for one in found if not one.resolved.exists() and is_locked(one.lock)]


def format_age(seconds: float) -> str:
    """Format a duration in the largest unit of which it has at least two."""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= 2 * size), UNITS[-1])
    return f"{max(seconds, 0) / size:.0f} {unit}"


def read_row(folder: RunFolder, cache: ProgressCache) -> RunRow:
    """Return the entry of a run that was started. Raises OSError if its folder cannot be read."""
    started = folder.resolved.stat().st_mtime
    try:
        job = SwarmJob.load(folder.resolved)
        policies = {policy: PolicyProgress() for policy in job.trained} | cache.read(folder, job)
    except ConfigError as error:
        return RunRow(run=folder.path.name, folder=str(folder.path), state=str(error), at=started)
    return RunRow(
        run=job.run,
        folder=str(folder.path),
        state=", ".join(_state(folder, job, policies)),
        policies=policies,
        at=max((one.at for one in policies.values() if one.at is not None), default=started),
    )


def _state(folder: RunFolder, job: SwarmJob, policies: dict[str, PolicyProgress]) -> Iterator[str]:
    locks = [folder.lock, *(folder.checkpoints(policy).parent / "lock" for policy in job.trained)]
    yield "up" if any(map(is_locked, locks)) else "stopped"
    control = ledger.read_control(folder.inbox)
    if control and control.pace != "running":
        yield control.pace
    now = live_settings.apply_changes(job, control.changes if control else ())
    if all(live_settings.has_ended(now, policy, policies[policy].step) for policy in job.trained):
        yield "ended"


def _progress(folder: RunFolder, job: SwarmJob) -> dict[str, PolicyProgress]:
    """Return policy -> progress, for policies with at least one step. Raises ConfigError if the events cannot be read."""
    found: dict[str, PolicyProgress] = {}
    try:
        for event in read_events(folder.events, last_bytes=READ_BYTES):
            policy = event.source.removeprefix("learner.")
            if event.name == "step" and policy in job.trained:
                reward = event.fields.get("reward")
                found[policy] = PolicyProgress(step=int(event.fields["version"]), reward=reward, at=event.at)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{folder.events}: cannot be read ({error.strerror})") from error
    return found
