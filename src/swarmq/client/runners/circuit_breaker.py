"""Circuit breaker for attempts: when all of them fail, something that they need is down, and further attempts would waste
tasks.

  working ──too many failures in a row──> down: one attempt begins at a time, after longer and longer pauses
     ^──────────────────────── the first one that is finished ────────────────────────┘

How many are too many depends on how often attempts usually fail: with an environment that fails nine times in ten, twenty
failures in a row are no outage, and ten attempts at one task are no reason to wait before the next. Most often the run itself is
down, which can be detected: a pause ends as soon as the proxy serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable

from swarmq.runtime.logs import log

MIN_FAILURES = 8
UNUSUAL = 10
"""Number of failures in a row that counts as an outage, as a multiple of the usual number between two successes. If nine
attempts in ten fail independently, one success in ten thousand has as many failures before it."""
RECENT = 0.1
"""Weight of the newest success in the moving average of failures before a success; the first successes weigh more."""
PATIENCE = 4
"""Number of failures of one task that may be chance, as a multiple of the usual number of failures before a success. If nine
attempts in ten fail independently, one task in fifty has more."""
MAX_PAUSE_S = 60.0
MAX_DOUBLINGS = 6
"""Maximum number of times that the pause before a repeated attempt is doubled. Without it, an attempt number sent by another
client could make the pause endless."""
PROBE_INTERVAL_S = 2.0
"""Seconds between two checks whether the proxy serves."""


async def _always_serves() -> bool:
    return True


class CircuitBreaker:
    """Circuit breaker that is shared by lanes that attempt tasks concurrently."""

    def __init__(self, *, lanes: int, pause_s: float, serves: Callable[[], Awaitable[bool]] = _always_serves) -> None:
        """`pause_s`: seconds to pause before the first attempt of an outage, doubled for each further attempt, up to a minute. `serves`:
        returns whether the proxy serves at present."""
        self._least = max(MIN_FAILURES, 2 * lanes)
        self._usual = 0.0
        """Moving average of the number of failures before a success, without outages."""
        self._num_usual = 0
        self._first_pause_s = self._pause_s = pause_s
        self._serves, self._was_away = serves, False
        self._in_a_row = 0
        self._next, self._over = asyncio.Lock(), asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._in_a_row >= self._enough

    @property
    def _enough(self) -> int:
        return max(self._least, math.ceil(UNUSUAL * self._usual))

    @property
    def patience(self) -> int:
        """Number of failures of one task that may be chance, given how often attempts usually fail."""
        return int(PATIENCE * self._usual)

    def retry_pause_s(self, attempt: int) -> float:
        """Return the seconds to pause before a repeated attempt at a task, so that a short outage does not use up all of its attempts:
        none within `patience`, then doubled for each further attempt."""
        unusual = attempt - self.patience
        return self._first_pause_s * 2.0 ** min(unusual - 1, MAX_DOUBLINGS) if unusual > 0 else 0.0

    async def wait_for_turn(self) -> None:
        """Return when this attempt may begin: at once, or during an outage when it is its turn."""
        while self.is_open:
            async with self._next:
                if self.is_open:
                    pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._wait_for_recovery()
                    return

    async def _wait_for_recovery(self) -> None:
        while not self._over.is_set():
            serves = await self._serves()
            if serves and self._was_away:
                self._was_away, self._pause_s = False, self._first_pause_s
                return
            self._was_away = not serves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_INTERVAL_S):
                    await self._over.wait()

    def record(self, *, finished: bool) -> None:
        """Record how an attempt ended."""
        if finished:
            if self.is_open:
                log.info("attempts_succeed_again", failed_in_a_row=self._in_a_row)
            else:
                self._num_usual += 1
                self._usual += max(RECENT, 1 / self._num_usual) * (self._in_a_row - self._usual)
            self._in_a_row, self._pause_s = 0, self._first_pause_s
            self._over.set()
            return
        self._in_a_row += 1
        if self._in_a_row == self._enough:
            self._over.clear()
            log.warning(
                "attempts_keep_failing",
                failed_in_a_row=self._in_a_row,
                action="one begins at a time, after longer and longer pauses, until one succeeds",
            )
