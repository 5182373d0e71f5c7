"""Bounded queueing of model calls: a limited number runs, a limited number waits, and further calls are refused with
`Retry-After`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque

from swarmq.proxy.http_errors import RefusedError
from swarmq.runtime.wording import count_of

SMOOTHING = 0.1
MAX_RETRY_AFTER_S = 60


class CallLimiter:
    """Limits the number of open and of waiting model calls; waiting calls get slots in the order of their arrival."""

    def __init__(self, *, max_open: int, max_waiting: int) -> None:
        self._max_open = max_open
        self._max_waiting = max_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.open = 0
        self._mean_s = 1.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> CallSlot:
        """Wait for a slot and return it; the caller gives it back. Raises RefusedError (429) if too many calls wait already."""
        if self.open < self._max_open:
            self.open += 1
            return CallSlot(self)
        if len(self._waiting) >= self._max_waiting:
            raise RefusedError(
                f"{count_of(self.open, 'call is', 'calls are')} open at this proxy, {self.waiting} waiting; come back later",
                status=429, code="proxy_overloaded", retry_after_s=self._retry_after_s(),
            )  # fmt: skip
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the slot was granted before the cancellation: pass it on
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
            raise
        return CallSlot(self)

    def leave(self, held_s: float | None = None) -> None:
        if held_s is not None:
            self._mean_s += SMOOTHING * (held_s - self._mean_s)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # passes the slot on, so `open` stays the same
                return
        self.open -= 1

    def _retry_after_s(self) -> int:
        """Return the seconds until the present waiters will have entered, at the recent rate."""
        return min(max(math.ceil(self.waiting * self._mean_s / self._max_open), 1), MAX_RETRY_AFTER_S)


class CallSlot:
    """The slot of an open call; giving it back twice does nothing."""

    def __init__(self, gate: CallLimiter) -> None:
        self._gate: CallLimiter | None = gate
        self._since = time.monotonic()

    def give_back(self) -> None:
        if self._gate is not None:
            self._gate.leave(time.monotonic() - self._since)
            self._gate = None
