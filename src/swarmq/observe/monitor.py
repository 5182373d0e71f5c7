"""Following of a run: its events into a board and a file, and its queue depths.

events.jsonl ───> recall ──┐   earlier lasting events, for a board that is opened late
broker events ──> listen ──┴> board.fold ──> board_terminal.draw (every half second)
                        └────> events.jsonl   (with `record`; learners write their steps)
broker depths ──> poll ────> board.depths, board.blocked
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import structlog
from rich.console import Console
from rich.live import Live

from swarmq.broker import Broker, topology
from swarmq.config import SwarmJob
from swarmq.errors import BrokerError
from swarmq.messages import Event, EventName
from swarmq.observe.board import Board
from swarmq.observe.board_terminal import draw
from swarmq.observe.curves import read_events
from swarmq.runtime import terminal
from swarmq.runtime.files import LineFile

log = structlog.get_logger()

POLL_S = 2.0
FRAMES_PER_S = 2
LASTING = frozenset[EventName]({"step", "evaluated", "control", "warning"})
"""Events that are recorded even if nobody watches. The other events describe momentary states or single episodes."""
RECORDED = LASTING - {"step"}
"""Lasting events that listeners record. Learners record their steps themselves, also while the broker is away."""
ALL_BUT_STEPS = frozenset[EventName](get_args(EventName)) - {"step"}
RECALLED_BYTES = 8 * 1024 * 1024
"""Maximum bytes read from the end of the event file when a board is opened, enough for more steps than a curve shows."""
STATE_PERIOD_S = 3.0
"""Seconds within which every process reports its state at least once."""


class Follower:
    """A board that is kept up to date, and a way to wait for a state of it."""

    def __init__(self, run: str) -> None:
        self.board = Board(run=run)
        self.listeners: list[Callable[[Event], None]] = []
        """Called with each event that arrives while the run is followed."""
        self._changed = asyncio.Event()

    def fold(self, event: Event) -> None:
        self.board.fold(event)
        self._changed.set()

    def handle_event(self, event: Event) -> None:
        """Handle an event that has just arrived."""
        self.fold(event)
        for listen in self.listeners:
            listen(event)

    async def until(self, condition: Callable[[Board], bool]) -> None:
        """Wait until `condition` holds for the board."""
        while not condition(self.board):
            self._changed.clear()
            await self._changed.wait()


@contextlib.asynccontextmanager
async def follow(
    job: SwarmJob, broker: Broker, *, record: Path | None = None, names: Container[EventName] = ALL_BUT_STEPS
) -> AsyncIterator[Follower]:
    """Keep a board up to date while the context is open. `record`: file for the events with these `names`."""
    follower = Follower(job.run)
    async with asyncio.TaskGroup() as tasks:
        listening = asyncio.Event()
        followers = [
            tasks.create_task(_listen(job, broker, follower, _EventSink(record, names), listening)),
            tasks.create_task(_poll(job, broker, follower)),
        ]
        await listening.wait()
        try:
            yield follower
        finally:
            for task in followers:
                task.cancel()


class Outage:
    """One warning when a part of the recording stops working, and one line when it works again."""

    def __init__(self, what: str) -> None:
        """`what`: name of the recorded file, or of the source of figures, for the messages."""
        self._what = what
        self._is_on = False

    @contextlib.contextmanager
    def tolerate(self) -> Iterator[None]:
        """Go on after an error of the disk or the broker inside the block."""
        try:
            yield
        except (OSError, BrokerError) as error:
            if not self._is_on:
                log.warning("recording_paused", what=self._what, reason=str(error))
            self._is_on = True
        else:
            if self._is_on:
                log.info("recording_resumed", what=self._what)
            self._is_on = False


class _EventSink:
    """Appends events to a file, if their name is among those to record; without a path, discards all events."""

    def __init__(self, path: Path | None, names: Container[EventName]) -> None:
        self._lines = LineFile(path) if path else None
        self._names = names
        self._outage = Outage(str(path))

    def take(self, event: Event) -> None:
        if self._lines and event.name in self._names:
            with self._outage.tolerate():
                self._lines.append(msgspec.json.encode(event))


async def follow_pace(job: SwarmJob, broker: Broker) -> AsyncGenerator[str]:
    """Yield the pace of the run (`running`, `paused`, ...) each time that it changes; at first it counts as `running`."""
    known = "running"
    try:
        async with broker.events(job.run) as events:
            async for event in events:
                pace = (
                    event.fields.get("pace", known) if event.source == "collector" and event.name == "state" else known
                )
                if pace != known:
                    known = pace
                    yield known
    except BrokerError as error:
        log.warning("pace_not_followed", reason=str(error))


async def watch(
    job: SwarmJob, broker: Broker, *, console: Console | None = None, notes: deque[str] | None = None
) -> None:
    """Draw the run until cancelled. `notes`: log lines of this process, shown as warnings."""
    console = console or terminal.console()
    async with follow(job, broker) as follower:
        with Live(console=console, refresh_per_second=FRAMES_PER_S) as live:
            while True:
                _take_in(notes, follower)
                live.update(draw(follower.board, now=time.time(), width=console.width))
                await asyncio.sleep(1 / FRAMES_PER_S)


async def draw_once(
    job: SwarmJob, broker: Broker, *, console: Console | None = None, notes: deque[str] | None = None
) -> None:
    """Draw the run once, after every process has had time to report its state."""
    console = console or terminal.console()
    board = await read_board(job, broker, notes=notes)
    console.print(draw(board, now=time.time(), width=console.width))


async def read_board(job: SwarmJob, broker: Broker, *, notes: deque[str] | None = None) -> Board:
    """Return the board after every process has had time to report its state."""
    async with follow(job, broker) as follower:
        await asyncio.sleep(STATE_PERIOD_S)
        _take_in(notes, follower)
        return follower.board


def _take_in(notes: deque[str] | None, follower: Follower) -> None:
    """Move warnings from `notes` to the board."""
    while notes:
        if (text := notes.popleft()).startswith("warning: "):
            fields = {"text": text.removeprefix("warning: ")}
            run = follower.board.run
            follower.fold(Event(run=run, source="watch", name="warning", at=time.time(), fields=fields))


def list_queues(job: SwarmJob) -> list[str]:
    """Return all queues of a run, in the order in which episodes pass them."""
    return [
        *(queue(job.run, kind) for kind in job.task_kinds for queue in (topology.tasks, topology.retries)),
        *(topology.tickets(job.run, kind) for kind in job.task_kinds),
        topology.inbox(job.run),
        *topology.list_turns(job.run, job.collector.turn_queues),
        *(topology.ready(job.run, name) for name, policy in job.policies.items() if policy.trained),
    ]


async def _listen(
    job: SwarmJob, broker: Broker, follower: Follower, sink: _EventSink, listening: asyncio.Event
) -> None:
    async with broker.events(job.run) as events:
        recalled = await asyncio.to_thread(_recall, job)
        for event in recalled:
            follower.fold(event)
        known = {(event.source, event.name, event.at) for event in recalled}  # also received while the file was read
        listening.set()
        async for event in events:
            if (event.source, event.name, event.at) not in known:
                follower.handle_event(event)
            sink.take(event)


def _recall(job: SwarmJob) -> list[Event]:
    """Return the newest lasting events from the run's event file, or none if it cannot be read."""
    try:
        events = read_events(job.run_folder.events, last_bytes=RECALLED_BYTES)
        return [event for event in events if event.name in LASTING]
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("events_not_recalled", path=str(job.run_folder.events), reason=str(error))
        return []


async def _poll(job: SwarmJob, broker: Broker, follower: Follower) -> None:
    queues = list_queues(job)
    while True:
        try:
            depths = await broker.depths(queues)
            follower.board.blocked = await broker.is_blocked()
        except BrokerError as error:
            text = {"text": str(error)}
            follower.fold(Event(run=job.run, source="broker", name="warning", at=time.time(), fields=text))
        else:
            follower.board.depths = {queue: depth.ready for queue, depth in depths.items()}
            follower.board.consumers = {queue: depth.consumers for queue, depth in depths.items()}
            follower.board.depths_at = time.time()
        await asyncio.sleep(POLL_S)
