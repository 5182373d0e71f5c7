"""What the proxy remembers of running episodes. Forgetting costs a turn its parent, never an error."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import msgspec

from swarmq.proxy.budget import Budget
from swarmq.proxy.conversations import Conversations
from swarmq.proxy.graph import Graph
from swarmq.proxy.pool import Lane

LIMIT_BYTES = 512 * 1024 * 1024
"""Tokens and keys of all remembered episodes together."""
MAX_FORGOTTEN = 10_000
"""Episodes of which we remember that we have forgotten them."""


class EpisodeView(msgspec.Struct, frozen=True, kw_only=True):
    """What this proxy knows of an episode."""

    episode_id: str
    policies: tuple[str, ...]
    """That it has called here."""
    calls: int
    sampled_tokens: int
    idle_s: float


class Memory:
    """Of one episode."""

    def __init__(self, *, lost: bool = False) -> None:
        self.lost = lost
        """There may have been calls that we know nothing of."""
        self.graphs: dict[str, Graph] = {}
        self.lanes: dict[str, Lane] = {}
        """Policy -> the engine that answered last."""
        self.conversations = Conversations()
        self.budget = Budget()
        self.used_at = 0.0

    def graph(self, policy: str) -> Graph:
        return self.graphs.setdefault(policy, Graph())

    @property
    def size_bytes(self) -> int:
        return 1024 + self.conversations.size_bytes + sum(graph.size_bytes for graph in self.graphs.values())


class Episodes:
    """Memories by episode; the least recently used go first."""

    def __init__(
        self,
        *,
        idle_s: float,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        is_home: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`is_home` says of an episode's id whether its first call was to come here, and not before we were there."""
        self._idle_s = idle_s
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._is_home = is_home
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._memories: OrderedDict[str, Memory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, episode_id: str) -> Memory:
        memory = self._memories.get(episode_id)
        if memory is None:
            lost = episode_id in self._forgotten or not self._is_home(episode_id)
            memory = self._memories[episode_id] = Memory(lost=lost)
        memory.used_at = self._clock()
        self._memories.move_to_end(episode_id)
        return memory

    def views(self, limit: int) -> list[EpisodeView]:
        """The most recently used first."""
        return [self._view(name, memory) for name, memory in islice(reversed(self._memories.items()), limit)]

    def view(self, episode_id: str) -> EpisodeView | None:
        memory = self._memories.get(episode_id)
        return self._view(episode_id, memory) if memory else None

    def _view(self, episode_id: str, memory: Memory) -> EpisodeView:
        return EpisodeView(
            episode_id=episode_id,
            policies=tuple(memory.graphs),
            calls=memory.budget.calls,
            sampled_tokens=memory.budget.sampled_tokens,
            idle_s=round(self._clock() - memory.used_at, 3),
        )

    def sweep(self) -> None:
        """Forget idle episodes, and the oldest ones while all together are too large."""
        total = sum(memory.size_bytes for memory in self._memories.values())
        while self._memories:
            episode_id, memory = next(iter(self._memories.items()))
            if memory.used_at + self._idle_s > self._clock() and total <= self._limit_bytes:
                return
            total -= memory.size_bytes
            del self._memories[episode_id]
            self._forgotten[episode_id] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                self._forgotten.popitem(last=False)
