"""The engines of one policy, and the choice of an engine for each call. Probes measure health; failing calls reveal it
sooner.

An episode stays with the engine that has its prefix cached, unless far more calls are open there than elsewhere. New episodes
go to the engine with the fewest open calls; among equals, every proxy makes the same choice for an episode. A draining engine
gets no new calls. An engine that failed, or has weights too old for training, is tried last.

Calls wait while no engine answers (a dead engine is being restarted), and while all engines that answer have weights too old
for training: a restarted engine has the initial model until the learner has pushed to it, and so have all engines when a run
resumes. Answers that such an engine sampled would be dropped as stale.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence

import msgspec
import structlog

from swarmq.engine.client.protocol import Engine
from swarmq.errors import EngineError
from swarmq.proxy.engines.tool_parser_probe import finds_tool_calls
from swarmq.runtime.wording import count_of

MAX_TOGETHER = 16
"""Maximum number of tokens in a portion."""
MAX_TEXTS = 4096
"""Maximum number of texts for which it is cached whether they are single tokens."""
PACE_WEIGHT = 0.2
"""Weight of the newest stream in the moving average of an engine's pace."""
CROWD_MARGIN = 16
"""An episode leaves an engine that has more open calls than twice those of the least busy engine plus this number."""

log = structlog.get_logger()


class PoolTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of a pool of engines."""

    wait_s: float = 540.0
    """Seconds that calls wait for an engine with weights for training; after that they take any engine. The collector gives up an
    episode without a model call a little later (`groups.idle_timeout_s`)."""
    avoid_s: float = 5.0
    """Seconds for which an engine that failed is tried last."""
    report_s: float = 2.0
    """Seconds that an outage lasts before it is reported."""
    report_at_start_s: float = 60.0
    """Seconds that the outage at the start of a resumed run lasts before it is reported."""
    portion_s: float = 0.1
    """Seconds for which a stream collects sampled tokens into one portion, to the nearest token. It delays neither the first nor the last token, and
    it saves work: a portion costs engine and proxy about the same, however many tokens it has."""
    portions_per_s: float = 6000.0
    """Number of portions per second, of all streams of a proxy together, that its core can carry with room to spare. With more open
    calls, streams collect tokens for longer."""
    crowded_portion_s: float = 0.25
    """Maximum of these seconds, also to the nearest token."""


TIMINGS = PoolTimings()


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine as a proxy sees it."""

    url: str
    healthy: bool
    draining: bool
    version: int | None
    """Version of its weights; None if the engine does not report it."""
    open_calls: int
    """Number of this proxy's open calls."""


class EngineLane:
    """One engine with its measured state."""

    def __init__(self, engine: Engine, *, timings: PoolTimings = TIMINGS) -> None:
        self.engine = engine
        self._timings = timings
        self.open_calls = 0
        self.healthy = True
        self.draining = False
        self.version: int | None = None
        self.failed_at = float("-inf")
        self.token_s: float | None = None
        """Seconds per token of recent streams."""
        self.idle = asyncio.Event()
        """Set while no call is open."""
        self.idle.set()
        self._is_token: dict[str, bool] = {}
        self._finds_calls: bool | None = None
        self._rehearsing = asyncio.Lock()

    @contextlib.contextmanager
    def occupy(self) -> Iterator[None]:
        self.open_calls += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open_calls -= 1
            if not self.open_calls:
                self.idle.set()

    def measure_stream(self, num_tokens: int, seconds: float) -> None:
        """Measure a stream: `num_tokens` tokens after the first took `seconds`."""
        if num_tokens > 0:
            newest = seconds / num_tokens
            self.token_s = newest if self.token_s is None else self.token_s + PACE_WEIGHT * (newest - self.token_s)

    def together(self, num_calls: int) -> int:
        """Return the maximum number of tokens in each portion of a stream after its first token. `num_calls`: number of the proxy's open
        calls."""
        timings = self._timings
        portion_s = max(timings.portion_s, min(num_calls / timings.portions_per_s, timings.crowded_portion_s))
        return 1 if not self.token_s else max(1, min(MAX_TOGETHER, round(portion_s / self.token_s)))

    async def finds_calls(self) -> bool:
        """Return whether the engine's parsers find tool calls in streams that arrive in large portions. Tested once, at the
        first model call."""
        async with self._rehearsing:
            if self._finds_calls is None:
                self._finds_calls = await finds_tool_calls(self.engine)
            return self._finds_calls

    async def is_token(self, text: str) -> bool:
        """Return whether the engine's tokenizer has a single token for the text."""
        if text not in self._is_token:
            if len(self._is_token) >= MAX_TEXTS:
                self._is_token.clear()
            self._is_token[text] = len(await self.engine.tokenize(text)) == 1
        return self._is_token[text]

    def fail(self) -> None:
        self.failed_at = time.monotonic()
        self._is_token.clear()
        self._finds_calls = None  # a restarted engine may have other parsers

    async def probe(self) -> None:
        was_healthy, self.healthy = self.healthy, await self.engine.is_healthy()
        if was_healthy and not self.healthy:
            log.warning(
                "engine_away",
                engine=self.engine.url,
                action="calls go to other engines until it answers: is it up, and does a firewall drop packets to its port?",
            )
        if self.healthy:
            await self.ask_version()

    async def ask_version(self) -> int | None:
        """Ask the engine for the version of its weights, and return it; None if it has none now, for example during an update."""
        try:
            self.version = await self.engine.weight_version()
        except EngineError:
            return None
        return self.version

    @property
    def view(self) -> EngineView:
        return EngineView(
            url=self.engine.url,
            healthy=self.healthy,
            draining=self.draining,
            version=self.version,
            open_calls=self.open_calls,
        )


class EnginePool:
    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_behind: int = 1_000_000,
        resumed_at: int = 0,
        timings: PoolTimings = TIMINGS,
    ) -> None:
        """`max_behind`: number of weight versions by which a preferred engine may be behind the newest version. `resumed_at`:
        version at which the run resumes; 0 for a new run."""
        self._timings = timings
        self.lanes = [self.lane(engine) for engine in engines]
        self._max_behind = max_behind
        self._oldest = resumed_at
        """Oldest weight version whose turns can be trained."""
        self._out_since = time.monotonic()
        """Begin of the present outage, or of the newest one."""
        self._back_at = float("-inf")
        """End of the newest outage."""
        self._ready = asyncio.Event()
        if not resumed_at:
            self._ready.set()
        self._waiting = 0
        self._reported = False
        self._report_s = timings.report_at_start_s
        self._probing = asyncio.Lock()
        self._probed_at = float("-inf")

    def lane(self, engine: Engine) -> EngineLane:
        """Return a new lane for an engine; the caller adds it to the pool."""
        return EngineLane(engine, timings=self._timings)

    def order(self, favourite: EngineLane | None, episode_id: str = "") -> list[EngineLane]:
        """Return the lanes in the order in which to try them, without draining ones. `favourite`: the lane that answered the
        episode last."""
        lanes = [lane for lane in self.lanes if not lane.draining]
        now = time.monotonic()
        newest = max((lane.version or 0 for lane in lanes), default=0)
        crowd = 2 * min((lane.open_calls for lane in lanes), default=0) + CROWD_MARGIN

        def rank(lane: EngineLane) -> tuple[bool, bool, bool, int, bytes]:
            return (
                not lane.healthy or now - lane.failed_at < self._timings.avoid_s,
                lane.version is not None and newest - lane.version > self._max_behind,
                lane is not favourite or lane.open_calls > crowd,
                lane.open_calls,
                hashlib.blake2b(f"{episode_id} {lane.engine.url}".encode(), digest_size=8).digest(),
            )

        return sorted(lanes, key=rank)

    @property
    def num_healthy(self) -> int:
        return sum(lane.healthy and not lane.draining for lane in self.lanes)

    async def ready(self) -> bool:
        """Wait during an outage, for up to `wait_s` in all, and return whether an engine with weights for training answers."""
        if not self._ready.is_set():
            self._waiting += 1
            try:
                async with asyncio.timeout(self._out_since + self._timings.wait_s - time.monotonic()):
                    await self._ready.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        return self._ready.is_set()

    async def out(self, *, since: float) -> bool:
        """Probe the engines, once for all concurrent callers, and return whether there is an outage, or was one at or after the
        monotonic time `since`: an engine may be back before the probe of a call that failed."""
        asked_at = time.monotonic()
        async with self._probing:
            if self._probed_at < asked_at:
                await self.probe()
        return not self._ready.is_set() or self._back_at >= since

    async def probe(self) -> None:
        began = time.monotonic()
        await asyncio.gather(*(lane.probe() for lane in self.lanes))
        self._probed_at = began
        self._oldest = max([self._oldest, *((lane.version or 0) - self._max_behind for lane in self.lanes)])
        if any(lane.healthy and not lane.draining and (lane.version or 0) >= self._oldest for lane in self.lanes):
            if not self._ready.is_set():
                self._ready.set()
                self._back_at = time.monotonic()
        elif self._ready.is_set():
            self._ready.clear()
            self._out_since, self._report_s = time.monotonic(), self._timings.report_s

    def news(self) -> str:
        """Return a message about an outage that began or ended since `news` was last called, or ""."""
        out_s = time.monotonic() - self._out_since
        if self._ready.is_set():
            reported, self._reported = self._reported, False
            return f"an engine answers again after {out_s:.0f} s: calls go on" if reported else ""
        if self._reported or out_s < self._report_s:
            return ""
        self._reported = True
        urls = ", ".join(lane.engine.url for lane in self.lanes if not lane.draining)
        why = f"has weights of version {self._oldest} or later yet" if self.num_healthy else "answers"
        return f"no engine {why} ({urls}): calls wait for one, at most {self._timings.wait_s:.0f} s in all ({count_of(self._waiting, 'call waits', 'calls wait')} now)"
