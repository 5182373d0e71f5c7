"""Episodes begun or ended over HTTP, so that a repeated request gets the first one's answer.

The collector recognises duplicates that were forgotten here or sent to another proxy.
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
    """The begin and the ends of one episode that were recorded over HTTP. A begin or end holds `lock`, so that
    a repeated request waits for the first."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.begin: EpisodeBegin | None = None
        self.ends: list[RecordedEnd] = []
        """Recorded ends, at most one per client, because this proxy may not know whose episode it is."""

    def end_of(self, client_id: str) -> RecordedEnd | None:
        """Return the end that this client or an operator recorded, or None; for an operator's `client_id`, the end of any client."""
        return next((one for one in self.ends if not is_foreign(client_id, one.end.client_id)), None)


class IdempotencyStore:
    """The newest episodes' entries, by episode id; beyond a limit, the oldest are discarded."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, EpisodeEntry] = OrderedDict()

    def of(self, episode_id: str) -> EpisodeEntry:
        entry = self._entries.setdefault(episode_id, EpisodeEntry())
        self._entries.move_to_end(episode_id)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return entry
