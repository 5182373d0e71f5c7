"""Nothing waits in silence: a wait that takes long says who waits for what, each time twice as late as before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from swarmq.runtime.logs import log

FIRST_S = 10.0


@contextlib.contextmanager
def warn_if_slow(
    event: str, *, first_s: float | None = None, now: Callable[[], Mapping[str, Any] | None] = dict, **fields: Any
) -> Iterator[None]:
    """Log `event` with the seconds waited when the block is still not left after 1, 3, 7, ... times `first_s`, FIRST_S
    by default. `now` gives further fields when it is said; where it gives None, nothing is said this time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    timers: list[asyncio.TimerHandle] = []

    def say(interval_s: float) -> None:
        if (more := now()) is not None:
            log.warning(event, waited_s=round(loop.time() - began), **more, **fields)
        wait(2 * interval_s)

    def wait(interval_s: float) -> None:
        timers[:] = [loop.call_later(interval_s, say, interval_s)]

    wait(FIRST_S if first_s is None else first_s)
    try:
        yield
    finally:
        timers[0].cancel()


def if_first_waiter(waiter: object, waiting: Sequence[object]) -> Callable[[], Mapping[str, Any] | None]:
    """For `now`: of all who wait for the same thing, the first one speaks, and says how many they are."""
    return lambda: {"waiting": len(waiting)} if waiting and waiting[0] is waiter else None
