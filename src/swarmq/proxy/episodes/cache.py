"""Bounded memory of running episodes. Forgetting costs a turn its parent, never its exactness.

  first call ──> remembered ──ended──> its id: later calls are refused
                     ├──idle──> forgotten ──> its id and budget: the next call starts a branch, `memory_lost`
                     └──no room, the least recently used first──> the same

The collector says when an episode has ended; if that event was lost, the episode becomes idle.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import msgspec

from swarmq import keys
from swarmq.config import SwarmJob
from swarmq.messages import Event, created_at, new_id
from swarmq.proxy.engines.pool import EngineLane
from swarmq.proxy.episodes.conversation_graph import Graph
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.proxy.episodes.token_budget import TokenBudget
from swarmq.proxy.http_errors import RefusedError, foreign_episode_error
from swarmq.runtime.wording import count_of

LIMIT_BYTES = 512 * 1024 * 1024
OVERHEAD_BYTES = 1024
"""Bytes of an episode's state without turns, measured by tracemalloc."""
MAX_CALLS = 256
"""Maximum number of concurrent model calls of an episode."""
MAX_GONE = 10_000
"""Maximum number of ids of ended episodes, and of forgotten episodes, that are kept."""
ENDINGS = frozenset({"episode", "eval"})
"""Events of the collector about an episode's end."""

NOT_RECEIVED = ("orphan_turns", "unseen_turns", "rewards_uncredited")

Kept = TypeVar("Kept")


class OpenEpisodeView(msgspec.Struct, frozen=True, kw_only=True):
    """An open episode as this proxy knows it."""

    episode_id: str
    policies: tuple[str, ...]
    """Policies that the episode has called at this proxy."""
    calls: int
    sampled_tokens: int
    idle_s: float


class EpisodeState:
    """State of one episode."""

    __slots__ = (
        "budget",
        "cache_salts",
        "client",
        "conversations",
        "counted_bytes",
        "graphs",
        "lanes",
        "lost",
        "open_calls",
        "used_at",
    )

    def __init__(self, *, client: str = "", lost: bool = False, budget: TokenBudget | None = None) -> None:
        self.client = client
        """Client name in the API keys of its model calls."""
        self.lost = lost
        """Whether the episode may have made model calls that this proxy does not know."""
        self.graphs: dict[str, Graph] = {}
        self.lanes: dict[str, EngineLane] = {}
        """Policy -> engine that answered last."""
        self.cache_salts: dict[str, tuple[EngineLane, str]] = {}
        """Policy -> engine, and the salt for it."""
        self.conversations = Conversations()
        self.budget = budget or TokenBudget()
        self.open_calls = 0
        self.used_at = 0.0
        self.counted_bytes = 0
        """Bytes with which the episode is counted in the cache's `size_bytes`."""

    def graph(self, policy: str) -> Graph:
        if policy not in self.graphs:
            self.graphs[policy] = Graph()
        return self.graphs[policy]

    async def cache_salt(self, policy: str, lane: EngineLane) -> str:
        """Return the name of the cached keys that the episode may use on this engine: those of episodes whose first call there found
        the same version of the weights, or its own alone if an update was going on. Asks the engine at the first call, because the
        newest probe may be older than a push."""
        known = self.cache_salts.get(policy)
        if known is None or known[0] is not lane:
            version = await lane.ask_version()
            self.cache_salts[policy] = known = lane, new_id() if version is None else f"version-{version}"
        return known[1]

    @property
    def size_bytes(self) -> int:
        return OVERHEAD_BYTES + self.conversations.size_bytes + sum(graph.size_bytes for graph in self.graphs.values())


class EpisodeCache:
    """Episode states in the order of their last use."""

    def __init__(
        self,
        *,
        idle_s: float,
        limit_bytes: int = LIMIT_BYTES,
        max_calls: int = MAX_CALLS,
        clock: Callable[[], float] = time.monotonic,
        is_home: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`is_home`: returns whether this proxy is the episode's own, and was up when the episode was created."""
        self._idle_s = idle_s
        self._limit_bytes = limit_bytes
        self._max_calls = max_calls
        self._clock = clock
        self._is_home = is_home
        self._memories: OrderedDict[str, EpisodeState] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._forgotten: OrderedDict[str, tuple[str, TokenBudget]] = OrderedDict()
        """Id of a forgotten episode -> its client and budget."""
        self.size_bytes = 0
        """Bytes of the tokens, keys and messages of all states."""
        self.counts: Counter[str] = Counter()
        """Number of states removed because their episode had `ended`, was `idle`, or others needed the `room`."""
        self.not_received: dict[str, int] = dict.fromkeys(NOT_RECEIVED, 0)
        """The collector's counts of undelivered answers in the whole run."""
        self._reported_drops = 0

    @classmethod
    def of_job(
        cls,
        job: SwarmJob,
        *,
        number: int,
        url: str = "",
        proxies: Callable[[], tuple[str, ...]] = tuple,
        now: Callable[[], float] = time.time,
    ) -> EpisodeCache:
        """Create the cache of the proxy that clients reach at `url`. `proxies`: returns the URLs of the run's proxies. `number`:
        number of the proxy, used if `url` is not among them."""
        started_at = now()

        def is_home(episode_id: str) -> bool:
            made, urls = created_at(episode_id), proxies()
            place, count = (urls.index(url), len(urls)) if url in urls else (number, job.proxy.count)
            return keys.home_proxy_index(episode_id, count) == place and (made is None or made >= started_at)

        return cls(
            idle_s=job.proxy.key_lifetime_s,
            limit_bytes=job.proxy.max_memory_bytes,
            max_calls=job.proxy.max_episode_calls,
            is_home=is_home,
        )

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, episode_id: str, client: str = "") -> EpisodeState:
        """Return the state of an episode. Raises RefusedError if the episode has ended or belongs to another client."""
        memory = self._memories.get(episode_id)
        if memory is None:
            memory = self._memories[episode_id] = self._begun(episode_id, client)
            self._count(memory)
        if memory.client != client:
            raise foreign_episode_error(episode_id)
        self._touch(episode_id, memory)
        return memory

    def open_call(self, episode_id: str, client: str = "") -> EpisodeState:
        """Count an open model call and return the episode's state, which is not evicted before `close_call` unless the episode
        ends. Raises RefusedError."""
        memory = self.of(episode_id, client)
        if memory.open_calls >= self._max_calls:
            raise RefusedError(
                f"the episode has {count_of(memory.open_calls, 'call')} open at this proxy, and may have no more",
                status=429, code="episode_calls_open",
            )  # fmt: skip
        memory.open_calls += 1
        return memory

    def close_call(self, memory: EpisodeState) -> None:
        memory.open_calls -= 1
        if memory.counted_bytes:
            self._count(memory)
            self._make_room()

    @contextmanager
    def arriving(self, claims: keys.Claims) -> Iterator[EpisodeState]:
        """Yield the episode's state for a model call whose body has not arrived yet. Raises RefusedError."""
        memory = self.open_call(claims.episode_id, claims.client)
        try:
            yield memory
        finally:
            memory.open_calls -= 1  # evicts nothing, because the call itself opens next

    def handle_event(self, event: Event) -> None:
        """Apply an event of the run: forget ended episodes, and keep the counts of undelivered turns."""
        if event.name == "state" and event.source == "collector":
            self.not_received = {name: event.fields.get(name, 0) for name in NOT_RECEIVED}
        if event.name in ENDINGS and event.source == "collector":
            self.end(event.fields["episode_id"])

    def end(self, episode_id: str) -> None:
        """Mark an episode as ended and remove its state."""
        memory = self._memories.pop(episode_id, None)
        if memory:
            self._uncount(memory)
            self.counts["ended"] += 1
        if memory or self._forgotten.pop(episode_id, None):
            _keep(self._ended, episode_id, None)

    def sweep(self) -> None:
        """Forget idle episodes."""
        due = self._clock() - self._idle_s
        self._forget("idle", lambda memory: memory.used_at <= due)
        self._make_room()

    def alerts(self) -> list[str]:
        """Return a warning if open episodes lost their state for want of room: for the first one, and whenever their number has
        doubled since the last warning."""
        if (num := self.counts["room"]) < max(1, 2 * self._reported_drops):
            return []
        self._reported_drops = num
        text = (
            f"proxy.max_memory_bytes ({self._limit_bytes}) does not hold the conversations of all open episodes: {num} "
            "were forgotten so far; the next call of each computes its whole context again"
        )
        return [text]

    # ----------------------------------------------------------------------------------------------- looking

    def fields(self) -> dict[str, Any]:
        """Return fields for the `state` event."""
        return {"episodes": len(self), "memory_bytes": self.size_bytes, "forgotten": dict(self.counts)}

    def views(self, limit: int) -> list[OpenEpisodeView]:
        """Return at most `limit` episodes, the most recently used first."""
        return [self._view(name, memory) for name, memory in islice(reversed(self._memories.items()), limit)]

    def view(self, episode_id: str) -> OpenEpisodeView | None:
        memory = self._memories.get(episode_id)
        return self._view(episode_id, memory) if memory else None

    def _view(self, episode_id: str, memory: EpisodeState) -> OpenEpisodeView:
        return OpenEpisodeView(
            episode_id=episode_id,
            policies=tuple(memory.graphs),
            calls=memory.budget.calls,
            sampled_tokens=memory.budget.sampled_tokens,
            idle_s=round(self._clock() - memory.used_at, 3),
        )

    # ---------------------------------------------------------------------------------------------- forgetting

    def _begun(self, episode_id: str, client: str) -> EpisodeState:
        if episode_id in self._ended:
            raise RefusedError(f"episode {episode_id} has ended; begin a new one", status=403, code="episode_ended")
        owner, budget = self._forgotten.pop(episode_id, (client, None))
        return EpisodeState(client=owner, lost=budget is not None or not self._is_home(episode_id), budget=budget)

    def _touch(self, episode_id: str, memory: EpisodeState) -> None:
        memory.used_at = self._clock()
        self._memories.move_to_end(episode_id)

    def _make_room(self) -> None:
        if self.size_bytes > self._limit_bytes:
            self._forget("room", lambda _: self.size_bytes > self._limit_bytes)

    def _forget(self, reason: str, is_due: Callable[[EpisodeState], bool]) -> None:
        """Remove the least recently used episodes without open calls for as long as `is_due` is true of the next one."""
        for _ in range(len(self)):
            episode_id, memory = next(iter(self._memories.items()))
            if not is_due(memory):
                return
            if memory.open_calls:
                self._touch(episode_id, memory)
                continue
            del self._memories[episode_id]
            self._uncount(memory)
            self.counts[reason] += 1
            _keep(self._forgotten, episode_id, (memory.client, memory.budget))

    def _count(self, memory: EpisodeState) -> None:
        self._uncount(memory)
        memory.counted_bytes = memory.size_bytes
        self.size_bytes += memory.counted_bytes

    def _uncount(self, memory: EpisodeState) -> None:
        self.size_bytes -= memory.counted_bytes
        memory.counted_bytes = 0


def _keep(gone: OrderedDict[str, Kept], episode_id: str, value: Kept) -> None:
    gone[episode_id] = value
    if len(gone) > MAX_GONE:
        gone.popitem(last=False)
