"""The engines of all policies, which are added and removed while the proxy serves.

engine registry of the run ──read──> add: open, probe, use
                                     remove: drain ──nothing open──> closed, forgotten
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import structlog

from swarmq.engine.client.identity import check_like_others, try_identify
from swarmq.engine.client.protocol import Engine
from swarmq.engine.client.tokenizer_compat import check_same_token_ids, try_tokenize
from swarmq.errors import ConfigError, EngineError
from swarmq.hosts.members import Roster
from swarmq.proxy.engines.pool import TIMINGS, EngineLane, EnginePool, EngineView, PoolTimings
from swarmq.proxy.http_errors import RefusedError

Opener = Callable[[str], contextlib.AbstractAsyncContextManager[Engine]]

log = structlog.get_logger()


class EnginePools:
    """The pools of all policies; `async with pools.kept():` probes them and follows the registry."""

    def __init__(
        self,
        engines: Mapping[str, Sequence[Engine]],
        *,
        roster: Roster,
        max_behind: int,
        probe_every_s: float,
        opener: Opener | None = None,
        resumed_at: Mapping[str, int] | None = None,
        timings: PoolTimings = TIMINGS,
    ) -> None:
        """`engines` are opened and closed by the caller; engines that are added later are opened with `opener`. `resumed_at`:
        policy -> version at which it resumes."""
        versions = resumed_at or {}
        self.pools = {
            name: EnginePool(given, max_behind=max_behind, resumed_at=versions.get(name, 0), timings=timings)
            for name, given in engines.items()
        }
        self.roster = roster
        self._probe_every_s = probe_every_s
        self._opener = opener
        self._following = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
            self._opened, self._tasks = opened, tasks
            keeper = tasks.create_task(self._keep())
            try:
                yield
            finally:
                keeper.cancel()
                for pool in self.pools.values():
                    for lane in pool.lanes:
                        lane.idle.set()  # ends the waits of draining lanes

    def views(self) -> dict[str, list[EngineView]]:
        return {name: [lane.view for lane in pool.lanes] for name, pool in self.pools.items()}

    def news(self) -> list[str]:
        """Return a line for each policy whose engines went away or came back since `news` was last called."""
        return [f"policy {name}: {line}" for name, pool in self.pools.items() if (line := pool.news())]

    async def follow(self) -> None:
        """Update the pools from the registry. Raises EngineError if the registry cannot be read."""
        async with self._following:  # one update at a time, because opening an engine takes a while
            for policy, urls in self.roster.urls().items():
                pool = self.pools[policy]
                present = {lane.engine.url: lane for lane in pool.lanes if not lane.draining}
                if not urls:
                    continue  # the caller gave these engines: the registry does not list them
                for url in urls:
                    if url.rstrip("/") not in present and self._opener:
                        await self._add(policy, url)
                for url, lane in present.items():
                    if url not in {one.rstrip("/") for one in urls}:
                        self._drain(policy, lane)

    async def change(self, policy: str, *, add: str | None = None, remove: str | None = None) -> None:
        """Change the registry and follow it. Raises RefusedError for a change that is impossible."""
        pool = self.pools.get(policy)
        if pool is None:
            raise RefusedError(f"unknown policy {policy!r}: the run has {', '.join(self.pools)}", param="policy")
        present = {lane.engine.url for lane in pool.lanes if not lane.draining}
        if remove is not None and remove.rstrip("/") not in present:
            raise RefusedError(f"{remove} serves no {policy}: its engines are {', '.join(present)}", param="url")
        if remove is not None and len(present) == 1:
            raise RefusedError(f"{remove} is the only engine of {policy}: add another one first", param="url")
        try:
            if add is not None:
                await self._check_like_others(pool, add)
                self.roster.add(policy, add)
            if remove is not None:
                self.roster.remove(policy, remove)
        except ConfigError as error:
            raise RefusedError(str(error), param="url") from error
        await self.follow()

    async def _check_like_others(self, pool: EnginePool, url: str) -> None:
        """Raise RefusedError if version, model or tokenizer of the engine at `url` differ from those of the pool's engines. An engine
        that does not answer passes."""
        if not self._opener:
            return
        async with self._opener(url) as engine:
            token_ids, identity = await try_tokenize(engine), await try_identify(engine)
        if token_ids is None or identity is None:
            return
        others = [lane.engine for lane in pool.lanes if lane.healthy]
        identities = {other.url: found for other in others if (found := await try_identify(other))}
        answers = {other.url: await try_tokenize(other) for other in others}
        try:
            check_like_others(url, identities | {url: identity})
            check_same_token_ids(url, token_ids, {other: ids for other, ids in answers.items() if ids})
        except EngineError as error:
            raise RefusedError(str(error), param="url") from error

    async def _keep(self) -> None:
        while True:
            try:
                await self.follow()
            except EngineError as error:
                log.warning("roster_unreadable", reason=str(error))
            await asyncio.gather(*(pool.probe() for pool in self.pools.values()))
            await asyncio.sleep(self._probe_every_s)

    async def _add(self, policy: str, url: str) -> None:
        assert self._opener
        pool = self.pools[policy]
        lane = pool.lane(await self._opened.enter_async_context(self._opener(url)))
        await lane.probe()
        pool.lanes.append(lane)
        log.info("engine_added", policy=policy, engine=url, healthy=lane.healthy)

    def _drain(self, policy: str, lane: EngineLane) -> None:
        lane.draining = True
        log.info("engine_draining", policy=policy, engine=lane.engine.url, open_calls=lane.open_calls)
        self._tasks.create_task(self._remove(policy, lane))

    async def _remove(self, policy: str, lane: EngineLane) -> None:
        await lane.idle.wait()
        self.pools[policy].lanes.remove(lane)
        log.info("engine_removed", policy=policy, engine=lane.engine.url)
