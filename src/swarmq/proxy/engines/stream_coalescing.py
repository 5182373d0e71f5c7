"""Coalescing of streams that the engine must parse, so that parsing is cheap and agents notice no delay.

vLLM keeps no state between two portions of a stream: for each it parses everything before again, on the thread that also
renders the prompts of other calls. So after each portion a stream pauses for `PATIENCE` times as long as its parsing took, at
most `MAX_PAUSE_S`; tokens sampled meanwhile form one portion. The first and the last tokens of a call never wait.

  engine --token, token, token--> coalesce() --one portion after the pause--> derender --> agent
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator

from swarmq.engine.client.protocol import Delta, merge

PATIENCE = 9.0
"""Length of a pause, as a multiple of the parsing before it, so that parsing takes about a tenth of a stream's time."""
MAX_PAUSE_S = 1.0
"""Longest pause in seconds, reached only by answers of many thousand tokens."""


class CoalescingPace:
    """Pace of one stream. A portion that waits behind other streams takes longer to parse, and is followed by a longer pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rests_until = clock()

    @property
    def rest_s(self) -> float:
        return max(self._rests_until - self._clock(), 0.0)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Measure how long parsing takes inside the block; the times of several choices add up."""
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            rest_s = max(self._rests_until - ended, 0.0) + PATIENCE * (ended - began)
            self._rests_until = ended + min(rest_s, MAX_PAUSE_S)


async def coalesce(
    portions: AsyncGenerator[list[Delta], None], pace: CoalescingPace
) -> AsyncGenerator[list[Delta], None]:
    """Yield a stream's deltas, merged per choice while `pace` pauses. Closing it closes `portions`."""
    waiting: dict[int, list[Delta]] = {}
    reading = asyncio.create_task(_next(portions))
    try:
        while True:
            await asyncio.wait([reading], timeout=pace.rest_s if waiting else None)
            if reading.done():
                if (portion := reading.result()) is None:
                    break
                for delta in portion:
                    waiting.setdefault(delta.index, []).append(delta)
                reading = asyncio.create_task(_next(portions))
            if due := [i for i in sorted(waiting) if not pace.rest_s or waiting[i][-1].finish_reason]:
                yield [merge(waiting.pop(index)) for index in due]
        if waiting:
            yield [merge(waiting[index]) for index in sorted(waiting)]
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await portions.aclose()


async def _next(portions: AsyncGenerator[list[Delta], None]) -> list[Delta] | None:
    return await anext(portions, None)
