"""Attempts that all fail: what they need is down, and to go on as before would use up task after task.

working ──too many failures in a row──> down: one attempt begins at a time, after longer and longer pauses
   ^──────────────────────── the first one that is finished ────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib

from swarmq.logs import log

LEAST_IN_A_ROW = 8
LONGEST_PAUSE_S = 60.0


class Outage:
    """Shared by lanes that attempt tasks side by side."""

    def __init__(self, *, lanes: int, pause_s: float) -> None:
        """`pause_s`: before the first attempt of an outage; doubled for each further one, up to a minute."""
        self._enough = max(LEAST_IN_A_ROW, 2 * lanes)
        self._first_pause_s = self._pause_s = pause_s
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
                            await self._over.wait()
                    return

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
                consequence="one begins at a time, after longer and longer pauses, until one succeeds",
            )
