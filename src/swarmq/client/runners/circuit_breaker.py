"""Attempts that all fail: what they need is down, and to go on as before would use up task after task.

working ──too many failures in a row──> down: one attempt begins at a time, after longer and longer pauses
   ^──────────────────────── the first one that is finished ────────────────────────┘

Most often it is the run itself that is down, and that can be seen: a pause ends when the proxy serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from swarmq.runtime.logs import log

LEAST_IN_A_ROW = 8
LONGEST_PAUSE_S = 60.0
LOOK_S = 2.0
"""Between two looks at whether the proxy serves."""


async def _always() -> bool:
    return True


class Outage:
    """Shared by lanes that attempt tasks side by side."""

    def __init__(self, *, lanes: int, pause_s: float, serves: Callable[[], Awaitable[bool]] = _always) -> None:
        """`pause_s`: before the first attempt of an outage; doubled for each further one, up to a minute. `serves`: whether
        the proxy does, now."""
        self._enough = max(LEAST_IN_A_ROW, 2 * lanes)
        self._first_pause_s = self._pause_s = pause_s
        self._serves, self._was_away = serves, False
        self._in_a_row = 0
        self._next, self._over = asyncio.Lock(), asyncio.Event()

    @property
    def is_on(self) -> bool:
        return self._in_a_row >= self._enough

    async def may_begin(self) -> None:
        """Returns at once, or in an outage when it is this attempt's turn."""
        while self.is_on:
            async with self._next:
                if self.is_on:
                    pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._until_over_or_back()
                    return

    async def _until_over_or_back(self) -> None:
        while not self._over.is_set():
            serves = await self._serves()
            if serves and self._was_away:
                self._was_away, self._pause_s = False, self._first_pause_s
                return
            self._was_away = not serves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._over.wait()

    def heard(self, *, finished: bool) -> None:
        """How an attempt ended."""
        if finished:
            if self.is_on:
                log.info("attempts_succeed_again", failed_in_a_row=self._in_a_row)
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
