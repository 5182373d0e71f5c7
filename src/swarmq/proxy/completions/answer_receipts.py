"""Delivery reports: which recorded answers reached their agents. A turn is confirmed before its answer is sent, so a turn alone
is no proof.

  turn confirmed ──> last byte written ──> left for the agent's host ──> sent ──────┐
       └──refused, cut, or the agent disconnected ──> withdrawn ─────────┴──> DeliveryReport ──> in

No call waits for its report. One report covers many answers, and is published again until the broker has confirmed it. Answers
that a killed proxy did not report count as not received.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import structlog

from swarmq.broker import topology
from swarmq.errors import BrokerError
from swarmq.messages import DeliveryReport, new_id
from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.completions.recorder import TurnPublisher

HasLeft = Callable[[], bool | None]
"""Returns whether an answer has left for the agent's host; None: not known yet."""
HAS_LEFT = "swarmq.has_left"
"""Key, in a request's scope, of its `HasLeft`."""

PAUSE_S = 0.05
"""Seconds over which answers are collected into one report."""
MAX_PAUSE_S = 5.0
"""Maximum seconds between two checks whether an answer has left, while its agent does not read it."""
RETRY_S = 1.0
DRAIN_S = 5.0
"""Seconds that a stopping proxy waits for the broker to confirm the last reports."""
MAX_CALLS = 20_000
"""Maximum number of answers in one report, which bounds its size."""

log = structlog.get_logger()


def take_has_left(scope: MutableMapping[str, Any]) -> HasLeft:
    """Take the function out of a request's scope, which it would otherwise keep in a cycle: the request's body would stay in memory until
    the next garbage collection."""
    has_left: HasLeft = scope.pop(HAS_LEFT, lambda: True)
    return has_left


class WrittenAnswer(msgspec.Struct):
    """An answer that was written to its connection and may not have left yet."""

    episode_id: str
    calls: tuple[str, ...]
    has_left: HasLeft
    pause_s: float
    due: float


class AnswerReceipts:
    """Collects and publishes the delivery reports of one proxy. `report` must run as a task."""

    def __init__(self, run: str, broker: TurnPublisher, *, pause_s: float = PAUSE_S) -> None:
        self._run = run
        self._broker = broker
        self._pause_s = pause_s
        self._written: list[WrittenAnswer] = []
        self._known: list[tuple[str, tuple[str, ...], bool]] = []
        """Answers to report, each as (episode id, call ids, whether the answer was sent)."""
        self._wake = asyncio.Event()

    @contextmanager
    def answering(self, begun: ActiveCall, has_left: HasLeft) -> Iterator[None]:
        """Answer a call within this context, which then queues its delivery report. An exception in the context, or
        `begun.failed`, withdraws the answer. An agent that disconnects from a stream after the end of every choice has
        received the whole answer."""
        is_whole = False
        try:
            yield
            is_whole = not begun.failed
        except BaseException:
            is_whole = 0 < begun.rendered.sampling.get("n", 1) == begun.ended
            has_left = lambda: True  # noqa: E731
            raise
        finally:
            if begun.recorded and begun.request.claims.mode == "train":
                self._add(begun, has_left if is_whole else lambda: False)

    async def report(self) -> None:
        """Publish reports until cancelled, then the remaining ones for at most DRAIN_S seconds."""
        try:
            while True:
                await self._wake.wait()
                await asyncio.sleep(self._pause_s)
                self._queue_reports()
                if not self._written:
                    self._wake.clear()
                while self._known:
                    await self._publish()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    self._queue_reports(every=True)
                    while self._known:
                        await self._publish()

    def _add(self, begun: ActiveCall, has_left: HasLeft) -> None:
        calls, due = tuple(begun.recorded), asyncio.get_running_loop().time()
        self._written.append(WrittenAnswer(begun.request.claims.episode_id, calls, has_left, self._pause_s, due))
        self._wake.set()

    def _queue_reports(self, *, every: bool = False) -> None:
        """Queue reports for the written answers that have left, and for those that can no longer leave. `every`: also check
        answers that are not due."""
        now = asyncio.get_running_loop().time()
        written, self._written = self._written, []
        for answer in written:
            has_left = answer.has_left() if every or answer.due <= now else None
            if has_left is not None:
                self._known.append((answer.episode_id, answer.calls, has_left))
                continue
            if answer.due <= now:
                answer.due = now + answer.pause_s
                answer.pause_s = min(2 * answer.pause_s, MAX_PAUSE_S)
            self._written.append(answer)

    async def _publish(self) -> None:
        """Publish one report of the queued answers, and return when the broker has confirmed it."""
        reported, self._known = self._known[:MAX_CALLS], self._known[MAX_CALLS:]
        sent, withdrawn = defaultdict[str, tuple[str, ...]](tuple), defaultdict[str, tuple[str, ...]](tuple)
        for episode_id, calls, is_sent in reported:
            (sent if is_sent else withdrawn)[episode_id] += calls
        served = DeliveryReport(run=self._run, served_id=new_id(), sent=dict(sent), withdrawn=dict(withdrawn))
        while True:
            try:
                await self._broker.publish(topology.inbox(self._run), served)
                return
            except BrokerError as error:  # if the queue was deleted, the collector declares it again
                log.warning("answers_not_reported", reason=str(error), answers=len(reported), retry_s=RETRY_S)
            except BaseException:
                self._known = reported + self._known
                raise
            await asyncio.sleep(RETRY_S)
