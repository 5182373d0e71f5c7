"""The time by which keys expire: the proxy's. A machine that begins episodes may be hours off without harm."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.keys import CLOCK_LEEWAY_S, Invite
from swarmq.runtime.logs import log


class ProxyClock:
    """This machine's clock, set right by what the run's proxy says once."""

    def __init__(self, invite: Invite, *, now: Callable[[], float] = time.time) -> None:
        self._invite = invite
        self._now = now
        self._ahead_s = 0.0

    def time(self) -> float:
        return self._now() + self._ahead_s

    async def synchronize(self) -> None:
        """Ask the proxy; one that does not answer within seconds changes nothing."""
        from swarmq.client.episodes.http import fetch_date  # noqa: PLC0415 - slow to load, and here it is in nobody's way

        url = f"{self._invite.base_url.removesuffix('/v1')}/health"
        date = await run_in_thread(fetch_date, url, self._invite.ca)
        ahead_s = 0.0 if date is None else date - self._now()
        if abs(ahead_s) > CLOCK_LEEWAY_S / 2:
            self._ahead_s = ahead_s
            log.warning(
                "clock_differs",
                behind_s=round(ahead_s),
                proxy=url,
                meaning="keys are made by the proxy's clock; set this machine's",
            )
