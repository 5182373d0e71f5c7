"""The proxy's time, by which keys expire: the clock of a client's machine may be hours off."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.keys import CLOCK_LEEWAY_S, Invite
from swarmq.runtime.logs import log


class ProxyClock:
    """This machine's clock, corrected once by the time of the run's proxy."""

    def __init__(self, invite: Invite, *, now: Callable[[], float] = time.time) -> None:
        self._invite = invite
        self._now = now
        self._ahead_s = 0.0

    def time(self) -> float:
        return self._now() + self._ahead_s

    async def synchronize(self) -> None:
        """Read the proxy's time; without an answer within seconds, nothing changes."""
        from swarmq.client.episodes.http import fetch_date  # noqa: PLC0415 - slow to load, and nothing waits for it here

        url = f"{self._invite.base_url.removesuffix('/v1')}/health"
        date = await run_in_thread(fetch_date, url, self._invite.ca)
        ahead_s = 0.0 if date is None else date - self._now()
        if abs(ahead_s) > CLOCK_LEEWAY_S / 2:
            self._ahead_s = ahead_s
            log.warning(
                "clock_differs",
                behind_s=round(ahead_s),
                proxy=url,
                reason="this machine's clock differs from the proxy's, which dates the keys; set this machine's clock",
            )
