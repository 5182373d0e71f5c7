"""Supervision of a run's processes: each process that dies is restarted, with a growing delay.

A process that keeps dying ends the run with the last lines of its log. So does a process that exits with EX_CONFIG, because a restart
cannot fix its settings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from swarmq.broker.node.process import PrivateNode
from swarmq.engine.server.launch import EngineProcess
from swarmq.errors import SwarmqError
from swarmq.runtime.logs import log
from swarmq.runtime.processes import DeathCounter, die_with_parent, read_final_message, read_tail, stop_group

MAX_DEATHS = 5
"""Number of deaths within `death_window_s` after which a process is not restarted."""
CHECK_EVERY_S = 2.0
MAX_FAILED_CHECKS = 15
"""Number of consecutive failed checks after which a broker that refuses connections is restarted."""
FULL_BYTES = 10_000_000
"""Free disk space in bytes below which a broker is stopped. Without a stop, components of it that cannot write would end for good,
while its process lives on."""
START_BYTES = 100_000_000
"""Minimum free disk space in bytes for the start of a broker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartTimes:
    """Time settings for restarts of processes that died."""

    death_window_s: float = 120.0
    """Seconds within which deaths are counted together."""
    backoff_s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    """Seconds before the first, second, ... restart after a death; one for each of `MAX_DEATHS`."""


RESTART_TIMES = RestartTimes()


class DaemonFailedError(SwarmqError):
    """A process of the run could not be kept running."""


@dataclasses.dataclass
class Daemon:
    """A process of the run that is kept running, with the history of its deaths."""

    name: str
    """`ROLE`, `ROLE.POLICY` or `ROLE.NUMBER`."""
    argv: list[str]
    log_path: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables added to this process's own."""
    process: asyncio.subprocess.Process | None = None
    times: RestartTimes = RESTART_TIMES
    begins_at: int = 0
    """Size of the log in bytes before the current start."""
    restarted: Callable[[], None] = lambda: None
    """Callback after a restart, when the process id has changed."""

    def __post_init__(self) -> None:
        self.deaths = DeathCounter(self.times.death_window_s)

    @property
    def is_learner(self) -> bool:
        return self.name.partition(".")[0] == "learner"

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as sink:
            self.begins_at = os.fstat(sink.fileno()).st_size
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                env=os.environ | self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=die_with_parent,
            )

    async def keep_running(self, warn: Callable[[str], None]) -> None:
        """Restart the process whenever it dies, and return when it ends with status 0. Raises DaemonFailedError if it keeps
        dying or exits with EX_CONFIG."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            if status == 0:
                return
            why = read_final_message(self.log_path, self.begins_at)
            if status == os.EX_CONFIG:
                raise DaemonFailedError(f"{self.name}: {why or read_tail(self.log_path)}")
            deaths = self.deaths.record_death()
            if deaths >= MAX_DEATHS:
                raise DaemonFailedError(
                    f"{self.name} died {MAX_DEATHS} times within {self.times.death_window_s:.0f} s (status {status}); "
                    f"the end of {self.log_path}:\n{read_tail(self.log_path)}"
                )
            delay_s = self.times.backoff_s[deaths - 1]
            detail = f" ({why})" if why else ""
            warn(f"{self.name} died with status {status}{detail}; restarting in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await self.start()
            self.restarted()

    async def stop(self, grace_s: float) -> int | None:
        """Stop the process, and return its exit status; None if it was never started."""
        if self.process is None:
            return None
        await stop_group(self.process, grace_s=grace_s)
        return self.process.returncode


async def keep_engine(
    name: str, engine: EngineProcess, warn: Callable[[str], None], *, times: RestartTimes = RESTART_TIMES
) -> None:
    """Restart an engine on the same port whenever it dies. A failed start is retried: the engine's learner may hold the memory
    for a while."""

    async def ended() -> str:
        status = await engine.wait()
        return engine.kill_reason or f"died with status {status}"

    await _keep_restarting(
        f"engine {name}",
        ended,
        engine.restart,
        lambda: f"the end of its log:\n{read_tail(engine.log_path)}",
        warn,
        times,
    )


def free_disk_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds a broker's folder."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # the folder is gone: the next start reports it
        return START_BYTES


async def keep_broker(
    node: PrivateNode,
    warn: Callable[[str], None],
    *,
    check_every_s: float = CHECK_EVERY_S,
    free_bytes: Callable[[Path], int] = free_disk_bytes,
    times: RestartTimes = RESTART_TIMES,
    name: str = "the broker",
) -> None:
    """Restart a node of the private RabbitMQ when it dies, has a full disk, or refuses connections although its process lives. URL and
    queues stay the same; all other processes wait and reconnect."""

    async def ended() -> str:
        turned_away = 0
        while turned_away < MAX_FAILED_CHECKS:
            try:
                async with asyncio.timeout(check_every_s):
                    return f"died with status {await node.wait()}"
            except TimeoutError:
                if free_bytes(node.folder) < FULL_BYTES:
                    return "has a full disk"
                turned_away = turned_away + 1 if await node.refuses_connections() else 0
        return f"has accepted no connections for {MAX_FAILED_CHECKS * check_every_s:g} s, although its process is alive"

    async def restart() -> None:
        await node.stop()
        await _wait_for_disk_space(node.folder, warn, check_every_s=check_every_s, free_bytes=free_bytes)
        await node.start()

    await _keep_restarting(name, ended, restart, lambda: f"its logs are in {node.folder / 'log'}", warn, times)


async def _wait_for_disk_space(
    folder: Path, warn: Callable[[str], None], *, check_every_s: float, free_bytes: Callable[[Path], int]
) -> None:
    """Wait until the disk has room for a broker to start."""
    is_reported = False
    while (free := free_bytes(folder)) < START_BYTES:
        if not is_reported:
            warn(
                f"the broker waits for disk space: {folder} has {free / 1e6:.0f} MB free and needs {START_BYTES / 1e6:.0f} MB"
            )
        is_reported = True
        await asyncio.sleep(check_every_s)


async def _keep_restarting(
    name: str,
    ended: Callable[[], Awaitable[str]],
    restart: Callable[[], Awaitable[None]],
    ending: Callable[[], str],
    warn: Callable[[str], None],
    times: RestartTimes,
) -> None:
    """Restart a process whenever `ended` returns the reason of its end.

    Raises DaemonFailedError with `ending()` if the process keeps dying, and the error of `restart` if it fails five times in a
    row.
    """
    deaths = DeathCounter(times.death_window_s)
    failed = 0
    """Number of consecutive failed starts."""
    while True:
        why = await ended()
        if deaths.record_death() >= MAX_DEATHS:
            raise DaemonFailedError(f"{name} died {MAX_DEATHS} times; {ending()}")
        warn(f"{name} {why}; restarting")
        try:
            await restart()
        except (SwarmqError, OSError) as error:
            failed += 1
            if failed == MAX_DEATHS:
                raise
            delay_s, why = times.backoff_s[failed], str(error).partition("; the end of")[0]
            warn(f"{name} does not start ({why}); next attempt in {delay_s:g} s")
            await asyncio.sleep(delay_s)
        else:
            failed = 0
            log.info("started_again", process=name)
