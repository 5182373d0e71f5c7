"""Episodes that were begun or ended over HTTP, so that a repeated request gets the first one's answer.

What is forgotten, or was said to another proxy, the collector recognises: an equal begin or end is a duplicate there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from swarmq.broker.client_rules import is_foreign
from swarmq.messages import EpisodeBegin, EpisodeEnd

LIMIT = 50_000


class RecordedEnd(NamedTuple):
    end: EpisodeEnd
    outcome_id: str


class EpisodeEntry:
    """Of one episode. Whoever begins or ends it holds `lock`, so that a repeat waits for the first."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.begin: EpisodeBegin | None = None
        self.ends: list[RecordedEnd] = []
        """At most one of each client: whose episode it is, this proxy may not know."""

    def end_of(self, client_id: str) -> RecordedEnd | None:
        """The end by this client or, as far as it is known here, in its place."""
        return next((one for one in self.ends if not is_foreign(client_id, one.end.client_id)), None)


class IdempotencyStore:
    """Entries by episode; the oldest go first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, EpisodeEntry] = OrderedDict()

    def of(self, episode_id: str) -> EpisodeEntry:
        entry = self._entries.setdefault(episode_id, EpisodeEntry())
        self._entries.move_to_end(episode_id)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return entry
