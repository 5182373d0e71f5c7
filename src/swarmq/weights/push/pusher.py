"""The learner's side of a weight push: make the weights ready once for each way, then have every engine load them at once.

    engine --facts--> route --publish--> parcel --EngineControl.update--> engine 0, engine 1, ...

How tensors travel is transfers.py's business, how an engine is led through the update control.py's. A trainer is not
asynchronous, so neither is this.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from swarmq.errors import EngineError, EngineRefusedError
from swarmq.weights.format.cuda_ipc import gpu_uuid
from swarmq.weights.format.packing import FromFolder, NamedTensors, Tensors
from swarmq.weights.push.engine_control import EngineControl, EngineSilentError, Facts, Parcel, Timeouts
from swarmq.weights.push.transfers import (
    AdaptersTransfer,
    FileTransfer,
    IpcTransfer,
    NcclTransfer,
    Route,
    Staging,
    Transfer,
    distinct,
    route_to,
)

log = structlog.get_logger()

T = TypeVar("T")

RETRY_S = 1.0
DOUBTS = 2
"""So many pushes in a row that fail in an engine which answers condemn it."""
REST_S, LONGEST_REST_S = 30.0, 120.0
"""How long the others are not held up by an engine that was waited for in vain: the first time, and in the end."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine took a push."""

    pause_s: float
    way: str


Outcome = dict[str, Taken | EngineError]
Loads = frozenset[tuple[int, int, int | None]]
"""Of every worker: its process id, how many updates have changed its weights, and the checksum of the newest."""


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Of an engine that does not answer: it is left alone for a while."""

    error: EngineError
    rest_s: float
    until: float


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a push took. `pause_s` is the longest that any engine's agents waited."""

    version: int
    write_s: float = 0.0
    """To make the weights ready, while agents go on."""
    pause_s: float = 0.0
    pauses: dict[str, float] = {}
    """`engine_N`, the N-th of the policy's engines at that moment, from 0 -> its own."""
    ways: dict[str, str] = {}
    """Engine url -> `ipc`, `nccl`, `adapters` or `file`."""
    total_s: float = 0.0
    failed: dict[str, str] = {}
    """Engine url -> why it does not serve this version. `ensure` brings them up to date when they are back."""
    replaced: tuple[str, ...] = ()
    """Urls of engines whose weights somebody else had changed."""


class WeightPusher:
    """Keeps the engines of one policy at the learner's version."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        folder: Path,
        *,
        secret: str = "",
        transfers: Mapping[str, Transfer] | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 180.0,
        current: Callable[[], Sequence[str]] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`secret`: what the engines ask every caller for. `patience_s`: how long to wait for an engine to come back when it is to sleep (one that died is being started
        again, and takes its memory). `current` gives the engines of each moment,
        where they come and go; `engine_urls` are those of the beginning. `check` raises when these engines are another pusher's
        by now; it is asked before each update."""
        staging = Staging()
        self._current, self._check = current or (lambda: engine_urls), check
        self.failing: dict[str, str] = {}
        """Engine url -> why it does not serve the newest version that it was offered."""
        self._transfers = transfers or {
            "ipc": IpcTransfer(staging),
            "nccl": NcclTransfer(staging),
            "adapters": AdaptersTransfer(engine_urls, folder),
            "file": FileTransfer(engine_urls, folder),
        }
        self._secret, self._timeouts = secret, timeouts or Timeouts()
        self._patience_s = patience_s
        self._routes: dict[str, Route] = {}
        self._unfit: set[tuple[str, str, tuple[int, ...]]] = set()
        """Engine, way and workers of what has failed and is not tried again."""
        self._doubts: Counter[str] = Counter()
        self._steps: dict[str, float | None] = {}
        """How many an engine in doubt had computed."""
        self._silent: dict[str, Silence] = {}
        self._loads: dict[str, Loads] = {}
        """Of each engine that took a push of ours: who changed its weights since is not us."""
        self._changed: set[str] = set()
        """Engines whose weights somebody else has changed."""
        self._given_up: set[str] = set()
        """Engines that did not come back while we waited for them to go to sleep."""

    def push(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Serve these weights as `version` everywhere. Raises EngineError when not one engine took them."""
        return asyncio.run(self._push(distinct(named_tensors), version, self._engines()))

    def ensure(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Push to the engines that do not serve `version` as this pusher sent it (started again, left paused or in doubt, taken
        over from another learner, changed by somebody else); often to none."""
        urls = self._engines()
        behind = asyncio.run(self._behind(urls, version))
        self.failing = {url: reason for url, reason in self.failing.items() if url in behind}
        if not behind:
            return PushReport(version=version)
        report = asyncio.run(self._push(distinct(named_tensors), version, behind))
        replaced = tuple(sorted(self._changed & report.ways.keys()))
        self._changed -= report.ways.keys()
        return msgspec.structs.replace(report, replaced=replaced)

    def repair(self, named_tensors: NamedTensors, version: int) -> None:
        """Get engines going that a learner which was killed left paused: with what they serve or, where that is in doubt, with
        these weights. Others are left alone, `ensure` is for them. Raises EngineError when none in doubt took them."""
        urls = self._engines()
        doubtful = asyncio.run(_each(urls, self._get_going))
        if behind := tuple(url for url in urls if doubtful[url]):
            asyncio.run(self._push(distinct(named_tensors), version, behind))

    def sleep(self) -> None:
        """Have all engines give their GPUs' memory back until `wake`. One that is being started again is waited for while
        patience lasts: it takes its memory as soon as it is back. Who refuses goes on as it is."""
        self._tell_each(self._fall_asleep)

    def wake(self) -> None:
        """The learner needs the memory no longer."""
        self._tell_each(self._get_going)

    def _engines(self) -> Sequence[str]:
        """Of this moment. Raises EngineError when there are none, or when nobody can tell."""
        urls = self._current()
        self.failing = {url: reason for url, reason in self.failing.items() if url in urls}
        if urls:
            return urls
        raise EngineError("no engine serves the policy: `swarmq engine start` or `swarmq engine add` brings one")

    def _control(self, url: str) -> EngineControl:
        return EngineControl(url, secret=self._secret, timeouts=self._timeouts)

    def _tell_each(self, order: Callable[[str], Awaitable[object]]) -> None:
        try:
            urls = self._engines()
        except EngineError as error:
            log.warning("no engine to tell", reason=str(error))
        else:
            asyncio.run(_each(urls, order))

    async def _get_going(self, url: str) -> bool:
        """Whether whole weights are what it takes."""
        try:
            async with self._control(url) as engine:
                status = await engine.wake()
        except EngineError as error:
            log.warning("engine does not wake", engine=url, reason=str(error))
            return False
        return status.in_doubt and not status.condemned

    async def _fall_asleep(self, url: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                async with self._control(url) as engine:
                    await engine.sleep()
            except EngineError as error:
                refused = isinstance(error, EngineRefusedError)
                if refused or url in self._given_up or time.monotonic() > deadline:
                    log.warning("engine does not sleep", engine=url, reason=str(error))
                    self._given_up.add(url)
                    return
            else:
                self._given_up.discard(url)
                return
            await asyncio.sleep(RETRY_S)

    async def _push(self, tensors: Tensors, version: int, urls: Sequence[str]) -> PushReport:
        began = time.perf_counter()
        shipment = Shipment(self._transfers, tensors, version)
        try:
            outcome = await self._offer(urls, shipment)
        finally:
            shipment.withdraw()
        taken = {url: result for url, result in outcome.items() if isinstance(result, Taken)}
        return PushReport(
            version=version,
            write_s=shipment.seconds,
            pause_s=max(one.pause_s for one in taken.values()),
            pauses={f"engine_{urls.index(url)}": one.pause_s for url, one in taken.items()},
            ways={url: one.way for url, one in taken.items()},
            total_s=time.perf_counter() - began,
            failed=_failed(outcome),
        )

    async def _offer(self, urls: Sequence[str], shipment: Shipment) -> Outcome:
        """Once: an engine that does not answer now may be minutes away, and `ensure` brings it up to date when it is back."""
        routes = await _each(urls, lambda url: self._route(url, adapted=shipment.adapted))
        for route in routes.values():
            if isinstance(route, Route):
                shipment.publish(route)  # of every way before the first pause begins
        outcome = await self._update_all(routes, shipment)
        self._note(outcome)
        failures = [result for result in outcome.values() if isinstance(result, EngineError)]
        if len(failures) == len(outcome):
            if self._silent.keys() >= set(self._engines()):
                self._silent.clear()  # there is nobody whom they hold up
            raise EngineError(f"no engine took version {shipment.version}: {failures[0]}") from failures[0]
        return outcome

    def _note(self, outcome: Outcome) -> None:
        others = {url: reason for url, reason in self.failing.items() if url not in outcome}
        self.failing = others | _failed(outcome)

    async def _update_all(self, routes: Mapping[str, Route | EngineError], shipment: Shipment) -> Outcome:
        return await _each(list(routes), lambda url: self._update(url, routes[url], shipment))

    async def _route(self, url: str, *, adapted: bool) -> Route | EngineError:
        """How the engine is reached at this moment: it may have been started again since the last push."""
        if error := self._resting(url):
            return error
        try:
            async with self._control(url) as engine:
                if (await engine.status()).condemned:
                    return EngineError(f"engine {url} is left out until it is started again: its weights are in doubt")
                route = route_to(url, await engine.facts(), gpu_uuid(), adapted=adapted)
                route = msgspec.structs.replace(route, ways=await self._open_ways(engine, route))
        except EngineError as error:
            self._heard(url, error)
            return error
        self._heard(url)
        if self._routes.get(url) != route:
            self._routes[url] = route
            log.info("weights go", engine=url, way=route.ways[0], dtype=route.dtype, reason=route.reason)
        return route

    async def _open_ways(self, engine: EngineControl, route: Route) -> tuple[str, ...]:
        opened = []
        for way in route.ways:
            if (engine.url, way, route.workers) in self._unfit:
                continue
            try:
                await self._transfers[way].prepare(engine, route)
            except EngineError as error:
                self._unfit.add((engine.url, way, route.workers))
                log.warning("weights cannot go", engine=engine.url, way=way, reason=str(error))
            else:
                opened.append(way)
        return tuple(opened)

    async def _update(self, url: str, route: Route | EngineError, shipment: Shipment) -> Taken | EngineError:
        if isinstance(route, EngineError):
            log.warning("weights not taken", engine=url, version=shipment.version, reason=str(route))
            return route
        failed = EngineError(f"engine {url}: there is no way to bring it weights")
        async with self._control(url) as engine:
            for way in route.ways:
                if (parcel := await shipment.fetch(way, route)) is None:
                    continue
                self._check()
                try:
                    pause_s = await engine.update(parcel, shipment.version)
                except EngineError as error:
                    failed = error
                    log.warning("weights not taken", engine=url, version=shipment.version, way=way, reason=str(error))
                    if not isinstance(error, EngineRefusedError):
                        break
                    if way != "file":
                        self._unfit.add((url, way, route.workers))
                else:
                    self._doubts.pop(url, None)
                    self._steps.pop(url, None)
                    self._loads[url] = _loads(engine.served)
                    return Taken(pause_s=pause_s, way=way)
            await self._judge(engine, shipment.version, failed)
        return failed

    async def _judge(self, engine: EngineControl, version: int, failed: EngineError) -> None:
        """Condemn an engine that pushes leave in doubt, or that cannot be paused or resumed, again and again: started by us, it is
        started again. One that took too long to answer, and has computed since the last time, is only busy."""
        if not engine.at_fault:
            return
        if isinstance(failed, EngineSilentError):
            before, self._steps[engine.url] = self._steps.get(engine.url), await engine.steps()
            if before not in (None, self._steps[engine.url]):
                return
        self._doubts[engine.url] += 1
        if self._doubts[engine.url] < DOUBTS:
            return
        self._doubts.pop(engine.url)
        log.error("engine condemned", engine=engine.url, version=version, consequence="left out until it is restarted")
        try:
            await engine.condemn(version)
        except EngineError as error:
            log.warning("engine does not answer", engine=engine.url, reason=str(error))

    async def _behind(self, urls: Sequence[str], version: int) -> tuple[str, ...]:
        current = await _each(urls, lambda url: self._is_at(url, version))
        return tuple(url for url, at in current.items() if not at)

    async def _is_at(self, url: str, version: int) -> bool:
        if self._resting(url):
            return False
        try:
            async with self._control(url) as engine:
                status = await engine.status()
                loads = _loads(await engine.facts())
        except EngineError as error:
            self._heard(url, error)
            return False
        self._heard(url)
        as_sent = self._loads.get(url) == loads
        if status.unannounced or (status.version == version and url in self._loads and not as_sent):
            log.error("weights changed by somebody else", engine=url, label=status.label)
            self._changed.add(url)
        return status.version == version and as_sent and not status.paused

    def _resting(self, url: str) -> EngineError | None:
        """Why the engine is not asked now."""
        silence = self._silent.get(url)
        return silence.error if silence and time.monotonic() < silence.until else None

    def _heard(self, url: str, error: EngineError | None = None) -> None:
        """What came of asking it: an answer, or this. Only one that says nothing at all takes the time of others."""
        before = self._silent.pop(url, None)
        if isinstance(error, EngineSilentError):
            rest_s = min(2 * before.rest_s, LONGEST_REST_S) if before else REST_S
            self._silent[url] = Silence(error=error, rest_s=rest_s, until=time.monotonic() + rest_s)


class Shipment:
    """One version of the weights, made ready once for each way and type that engines want."""

    def __init__(self, transfers: Mapping[str, Transfer], tensors: Tensors, version: int) -> None:
        self.version = version
        self.seconds = 0.0
        """Spent on making ready."""
        self.adapted = any(isinstance(tensor, FromFolder) and tensor.adapter for tensor in tensors.values())
        self._transfers, self._tensors = transfers, tensors
        self._parcels: dict[tuple[str, str | None], Parcel | EngineError] = {}
        self._making = asyncio.Lock()

    def publish(self, route: Route) -> None:
        """For the first way of the route for which there is room. Raises EngineError when there is none at all."""
        if all(self.parcel(way, route) is None for way in route.ways):
            failed = self._parcels[route.ways[-1], route.dtype]
            assert isinstance(failed, EngineError)
            raise failed

    def parcel(self, way: str, route: Route) -> Parcel | None:
        """None where there is no room for it."""
        key = (way, route.dtype)
        if key not in self._parcels:
            began = time.perf_counter()
            try:
                self._parcels[key] = self._transfers[way].publish(self._tensors, self.version, route.dtype)
            except EngineError as error:
                log.warning("weights cannot go", way=way, reason=str(error))
                self._parcels[key] = error
            self.seconds += time.perf_counter() - began
        parcel = self._parcels[key]
        return parcel if isinstance(parcel, Parcel) else None

    async def fetch(self, way: str, route: Route) -> Parcel | None:
        """The same while engines are led through updates, which a file that is only written now does not hold up."""
        async with self._making:
            return await asyncio.to_thread(self.parcel, way, route)

    def withdraw(self) -> None:
        for way in {way for way, _ in self._parcels}:
            self._transfers[way].withdraw()


def _loads(facts: Sequence[Facts]) -> Loads:
    return frozenset((worker.pid, worker.loads, worker.checksum) for worker in facts)


def _failed(outcome: Outcome) -> dict[str, str]:
    return {url: str(error) for url, error in outcome.items() if isinstance(error, EngineError)}


async def _each(urls: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    answers = await asyncio.gather(*(ask(url) for url in urls))
    return dict(zip(urls, answers, strict=True))
