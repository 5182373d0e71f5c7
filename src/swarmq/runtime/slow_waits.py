"""Warnings about long waits, at doubling intervals, so that nothing waits in silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swarmq.runtime.logs import log

FIRST_WARNING_S = 10.0
"""Default seconds until the first warning."""


@contextlib.contextmanager
def warn_if_slow(
    event: str,
    *,
    first_s: float = FIRST_WARNING_S,
    now: Callable[[], Mapping[str, Any] | None] = dict,
    **fields: Any,
) -> Iterator[None]:
    """Log the warning `event`, with the seconds waited, while the block still runs after 1, 3, 7, ... times `first_s`.

    `now`: returns further fields for each warning, or None to skip it. `fields`: fields of every warning.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    timers: list[asyncio.TimerHandle] = []

    def warn(interval_s: float) -> None:
        if (more := now()) is not None:
            log.warning(event, waited_s=round(loop.time() - began), **more, **fields)
        schedule(2 * interval_s)

    def schedule(interval_s: float) -> None:
        timers[:] = [loop.call_later(interval_s, warn, interval_s)]

    schedule(first_s)
    try:
        yield
    finally:
        timers[0].cancel()


def if_first_waiter(waiter: object, waiting: Sequence[object]) -> Callable[[], Mapping[str, Any] | None]:
    """Return a function for the argument `now` of `warn_if_slow`, so that of several waiters only the first warns, with their number."""
    return lambda: {"waiting": len(waiting)} if waiting and waiting[0] is waiter else None
