"""Recording of a live run in its folder: its present state, its recent past, and what remains after all processes have died.

    broker events ──> Follower ─┬─ lasting events ────────> events.jsonl
    broker depths ──────────────┤
    RabbitMQ's management API ──┼─> QueueAges ─┐
    engines' /metrics ──────────┴──────────────┴─ each 2 s ──> board.json      each 10 s ──> samples.jsonl

One process records a run: `swarmq up`, `swarmq demo`, or `swarmq record` where the processes are started one by one. A second
recorder waits for the first to end. Recording is best effort: a full disk or an absent broker pauses it with one warning, and
the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from swarmq.broker import Broker
from swarmq.broker.admin.users import ManagementApi, QueueFigures
from swarmq.broker.node.files import read_identities
from swarmq.config import SwarmJob
from swarmq.engine.client.load import EngineLoad, read_load
from swarmq.errors import BrokerError, SwarmqError
from swarmq.observe.alerts import Alerts
from swarmq.observe.board import Board, board_to_json
from swarmq.observe.live_runs import find_management_api
from swarmq.observe.monitor import RECORDED, Follower, Outage, follow
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime.files import LineFile, write_atomically

log = structlog.get_logger()

SAMPLES_BYTES = 64 * 1024 * 1024
"""Maximum bytes of samples.jsonl; from a larger file, every second line is removed."""
AGE_POINTS = 4096
"""Maximum number of observations of each queue that are kept, from which the age of its oldest message is computed."""
MANAGEMENT_ENV = "SWARMQ_MANAGEMENT_URL"


class Intervals(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals and time limits of a recorder."""

    board_s: float = 2.0
    sample_s: float = 10.0
    check_s: float = 4.0
    """Seconds between two readings of the management API and the engines."""
    silent_s: float = 120.0
    """Seconds without an event of the collector or a learner after which an alert is sent."""
    away_s: float = 15.0
    """Seconds without queue depths after which the broker counts as away."""
    retry_s: float = 5.0
    """Seconds until a recording that failed, or that another process makes, is tried again."""


INTERVALS = Intervals()


class QueueAges:
    """Age of the oldest message of each queue, from the number of messages that were ever published to it.

    Queues are first in, first out: with `published` messages so far and `ready` of them left, the oldest one left has the number
    `published - ready + 1`, and it was published when the count first exceeded `published - ready`.
    """

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        """Queue -> (time, messages published until then), while the oldest of them may still be in the queue."""

    def observe(self, queue: str, *, published: int, ready: int, at: float) -> float | None:
        """Return the age of the oldest message in seconds: 0 for an empty queue, None if it is older than the observations."""
        seen = self._seen.setdefault(queue, deque(maxlen=AGE_POINTS))
        if seen and published < seen[-1][1]:
            seen.clear()  # the broker was started again and counts anew
        if not seen or published > seen[-1][1]:
            seen.append((at, published))
        if not ready:
            while len(seen) > 1:
                seen.popleft()
            return 0.0
        gone = published - ready
        while len(seen) > 1 and seen[1][1] <= gone:
            seen.popleft()
        if gone < seen[0][1]:
            return None
        return at - seen[1][0]


class Sources:
    """Figures that are not in events: rates and ages of queues, and the load of engines. Best effort."""

    def __init__(self, job: SwarmJob) -> None:
        self._job = job
        self._registry = EngineRegistry(job)
        self._ages = QueueAges()
        self.queues: dict[str, dict[str, Any]] = {}
        """Queue -> `oldest_s`, `in_per_s` and `out_per_s`; empty without the management API."""
        self.engines: dict[str, dict[str, Any]] = {}
        """URL -> `policy`, `state` (up or down), `running`, `waiting`, `kv` and `at`."""

    async def read(self) -> None:
        """Read all figures anew."""
        await asyncio.gather(self._look_at_queues(), self._look_at_engines())

    async def _look_at_queues(self) -> None:
        try:
            figures = await asyncio.to_thread(self._read_queues)
        except (SwarmqError, OSError, msgspec.MsgspecError) as error:
            log.debug("queue_figures_not_read", reason=str(error))
            self.queues = {}
        else:
            self.queues = {name: self._describe_queue(name, queue) for name, queue in figures.items()}

    def _read_queues(self) -> Mapping[str, QueueFigures]:
        return _management_api(self._job).queue_figures(f"swarmq.{self._job.run}.")

    def _describe_queue(self, name: str, queue: QueueFigures) -> dict[str, Any]:
        oldest_s = self._ages.observe(name, published=queue.published, ready=queue.ready, at=time.time())
        return {"oldest_s": oldest_s, "in_per_s": queue.in_per_s, "out_per_s": queue.out_per_s}

    async def _look_at_engines(self) -> None:
        try:
            urls, secret = self._registry.urls(), self._registry.secret()
        except (SwarmqError, OSError) as error:
            log.debug("engines_not_read", reason=str(error))
            return
        policies = {url: policy for policy, of_policy in urls.items() for url in of_policy}
        loads = await asyncio.gather(*(asyncio.to_thread(_read_load_or_none, url, secret) for url in policies))
        now = time.time()
        self.engines = {
            url: {"policy": policy, "state": "up" if load else "down", "at": now}
            | (msgspec.to_builtins(load) if load else {"running": None, "waiting": None, "kv": None})
            for (url, policy), load in zip(policies.items(), loads, strict=True)
        }


def _read_load_or_none(url: str, secret: str) -> EngineLoad | None:
    try:
        return read_load(url, secret)
    except SwarmqError as error:
        log.debug("engine_load_not_read", reason=str(error))
        return None


def _management_api(job: SwarmJob) -> ManagementApi:
    """Return the management API of the run's private node, or else of $SWARMQ_MANAGEMENT_URL, or at the broker's usual port."""
    is_private = bool(read_identities(job.run_folder.broker))
    return find_management_api(job, job.run_folder, None if is_private else os.environ.get(MANAGEMENT_ENV))


@contextlib.asynccontextmanager
async def record_run(
    job: SwarmJob, broker: Broker, *, follower: Follower | None = None, intervals: Intervals = INTERVALS
) -> AsyncIterator[None]:
    """Record the run, and send its alerts, while the context is open.

    `follower`: given by a caller that records the events itself. Never raises: whatever cannot be recorded is left out.
    """
    recorder = _Recorder(job, broker, follower, intervals)
    ending = "the recording ends: the run is being stopped"
    async with asyncio.TaskGroup() as tasks:
        recording = tasks.create_task(recorder.record())
        try:
            yield
        except Exception as error:
            ending = f"the recording ends with an error: {error}"
            raise
        finally:
            recording.cancel()
            if recorder.is_recording:
                await recorder.alerts.finish(ending)


class _Recorder:
    """Recorder of one run's events and alerts, in this process."""

    def __init__(self, job: SwarmJob, broker: Broker, follower: Follower | None, intervals: Intervals) -> None:
        self._job, self._broker, self._follower, self._intervals = job, broker, follower, intervals
        self.alerts = Alerts(job)
        self.is_recording = False
        """Whether this process is, or was, the recorder of the run."""

    async def record(self) -> None:
        """Wait until no other process records the run, then record until cancelled."""
        path = self._job.run_folder.recorder_lock
        outage, is_waiting = Outage(str(path.parent)), False
        while True:
            try:
                with outage.tolerate(), _hold_recorder_lock(path) as is_ours:
                    if is_ours:
                        self.is_recording = True
                        await self._record_as_only_one()
                    elif not is_waiting:
                        is_waiting = True
                        log.info("recorded_elsewhere", holder=path.read_text(errors="replace"))
            except Exception:  # a bug in the recorder must not end the run
                log.exception("recording_failed")
            await asyncio.sleep(self._intervals.retry_s)

    async def _record_as_only_one(self) -> None:
        """Record until cancelled. Raises BrokerError if the broker refuses its events for good."""
        job, every = self._job, self._intervals
        try:
            async with contextlib.AsyncExitStack() as stack:
                follower = self._follower
                if follower is None:
                    following = follow(job, self._broker, record=job.run_folder.events, names=RECORDED)
                    follower = await stack.enter_async_context(following)
                sources, board = Sources(job), follower.board
                follower.listeners.append(self.alerts.handle_event)
                stack.callback(follower.listeners.remove, self.alerts.handle_event)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_repeat(every.check_s, sources.read))
                    tasks.create_task(_keep_board(job, board, sources, every))
                    tasks.create_task(_keep_samples(job, board, sources, every.sample_s))
                    tasks.create_task(self.alerts.deliver())
                    tasks.create_task(_watch_silence(job, board, self.alerts, every))
        except BaseExceptionGroup as group:
            ours, others = group.split((BrokerError, OSError))
            if others or not ours:
                raise
            raise BrokerError(f"the run's events are not received: {ours.exceptions[0]}") from group


@contextlib.contextmanager
def _hold_recorder_lock(path: Path) -> Iterator[bool]:
    """Hold the lock of the run's recorder; yields False if another process holds it."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield True


async def _watch_silence(job: SwarmJob, board: Board, alerts: Alerts, every: Intervals) -> None:
    """Alert when the collector or a learner that has steps to make has said nothing for `silent_s`."""
    silent_s = every.silent_s
    while True:
        await asyncio.sleep(silent_s / 4)
        now = time.time()
        if (state := _broker_state(board, now, every.away_s)) == "away":
            alerts.add("stall", "recorder", "the broker cannot be reached")
            continue
        if state == "blocked":
            alerts.add("warning", "recorder", "RabbitMQ accepts no messages: it is low on memory or disk")
        for source, process in board.processes.items():
            policy = source.removeprefix("learner.")
            has_work = source == "collector" or (policy in job.trained and not alerts.has_ended(policy))
            if has_work and now - process.at > silent_s:
                alerts.add("stall", "recorder", f"{source} has been silent for {now - process.at:.0f} s")


async def _repeat(every_s: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await work()
        await asyncio.sleep(every_s)


async def _keep_board(job: SwarmJob, board: Board, sources: Sources, every: Intervals) -> None:
    """Replace board.json every `board_s`, and a last time when the recording ends."""
    path, outage = job.run_folder.board, Outage(str(job.run_folder.board))
    recorder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}

    def write(*, is_recording: bool) -> None:
        described = describe_board(board, sources, now=time.time(), away_s=every.away_s)
        with outage.tolerate():
            content = msgspec.json.encode({**described, "recorder": {**recorder, "is_recording": is_recording}})
            write_atomically(path, content, is_durable=False)

    try:
        while True:
            write(is_recording=True)
            await asyncio.sleep(every.board_s)
    finally:
        write(is_recording=False)


async def _keep_samples(job: SwarmJob, board: Board, sources: Sources, every_s: float) -> None:
    """Append a line to samples.jsonl every `every_s`."""
    lines, outage = LineFile(job.run_folder.samples), Outage(str(job.run_folder.samples))
    while True:
        await asyncio.sleep(every_s)
        with outage.tolerate():
            lines.append(msgspec.json.encode(describe_sample(board, sources, now=time.time())))
            await asyncio.to_thread(thin_lines, lines.path, SAMPLES_BYTES)


def describe_board(board: Board, sources: Sources, *, now: float, away_s: float) -> dict[str, Any]:
    """Return the content of board.json without the field `recorder`: that of `swarmq status --json`, and what only a recorder
    knows."""
    state = board_to_json(board, now=now)
    queues = {*board.depths, *sources.queues}
    return {
        **state,
        "parts": {
            source: {"at": process.at, **state["parts"][source]} for source, process in sorted(board.processes.items())
        },
        "broker": {"state": _broker_state(board, now, away_s), "at": board.depths_at},
        "queue_details": {
            name: {
                "ready": board.depths.get(name),
                "consumers": board.consumers.get(name),
                "oldest_s": None,
                "in_per_s": None,
                "out_per_s": None,
            }
            | sources.queues.get(name, {})
            for name in sorted(queues)
        },
        "engines": sources.engines,
    }


def _broker_state(board: Board, now: float, away_s: float) -> str:
    if not board.depths_at:
        return "unknown"
    if now - board.depths_at > away_s:
        return "away"
    return "blocked" if board.blocked else "ok"


COUNTS = (
    "begun",
    "finished",
    "trained",
    "eval_finished",
    "open",
    "waiting",
    "in_learners",
    "groups_open",
    "orphan_turns",
)


def describe_sample(board: Board, sources: Sources, *, now: float) -> dict[str, Any]:
    """Return one line of samples.jsonl, of about 1 kB."""
    prefix, collector = f"swarmq.{board.run}.", board.reported("collector")
    ages = {name: queue["oldest_s"] for name, queue in sources.queues.items() if queue["oldest_s"] is not None}
    return {
        "at": round(now, 2),
        "queues": {name.removeprefix(prefix): depth for name, depth in board.depths.items()},
        "oldest_s": {name.removeprefix(prefix): round(age, 1) for name, age in ages.items() if age},
        "counts": {name: collector[name] for name in COUNTS if name in collector}
        | {"dropped": sum(collector.get("dropped", {}).values())},
        "tokens_per_s": round(board.tokens_per_s(), 1),
        "engines": {
            url: {name: engine[name] for name in ("running", "waiting", "kv")}
            for url, engine in sources.engines.items()
        },
        "open_calls": {
            source: process.fields.get("open_calls")
            for source, process in board.processes.items()
            if source.startswith("proxy.")
        },
        "versions": {name: int(steps[-1].get("version", 0)) for name, steps in board.steps.items() if steps},
    }


def thin_lines(path: Path, max_bytes: int) -> None:
    """Remove every second line of a file that is larger than `max_bytes`. Only the file's writer may call this. Raises
    OSError."""
    if path.stat().st_size <= max_bytes:
        return
    part = path.with_suffix(".thin")
    with path.open("rb") as lines, part.open("wb") as kept:
        kept.writelines(line for number, line in enumerate(lines) if number % 2)
    part.replace(path)
