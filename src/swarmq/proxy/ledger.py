"""Episodes that were begun or ended over HTTP, so that a repeated request gets the first one's answer.

What is forgotten, or was said to another proxy, the collector recognises: an equal begin or end is a duplicate there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from swarmq.messages import EpisodeBegin, EpisodeEnd

LIMIT = 50_000


class Entry:
    """Of one episode. Whoever begins or ends it holds `lock`, so that a repeat waits for the first."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.begin: EpisodeBegin | None = None
        self.end: EpisodeEnd | None = None
        self.outcome_id = ""


class Ledger:
    """Entries by episode; the oldest go first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def of(self, episode_id: str) -> Entry:
        entry = self._entries.setdefault(episode_id, Entry())
        self._entries.move_to_end(episode_id)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return entry
