"""The learner's side of a weight push: publish the weights once per transfer method, then update all engines concurrently.

    engine --facts--> route --publish--> payload --EngineControl.update--> engine 0, engine 1, ...

transfers.py moves the tensors; engine_control.py takes one engine through an update. The trainer is synchronous, so the pusher
is too.
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
from swarmq.weights.format.cuda_ipc import get_gpu_uuid
from swarmq.weights.format.packing import FolderWeight, NamedTensors, Tensors
from swarmq.weights.push.engine_control import EngineControl, EngineSilentError, Payload, Timeouts, WorkerFacts
from swarmq.weights.push.http_transfer import HttpTransfer
from swarmq.weights.push.transfers import (
    AdapterTransfer,
    FileTransfer,
    IpcTransfer,
    NcclTransfer,
    Route,
    StagingBuffer,
    Transfer,
    choose_route,
    deduplicate,
)

log = structlog.get_logger()

T = TypeVar("T")

RETRY_S = 1.0
"""Seconds between two attempts to put an engine to sleep."""
MAX_DOUBTFUL_PUSHES = 2
"""Number of consecutive pushes that may leave an engine in doubt although it answers; then it is condemned."""
COOLDOWN_S, MAX_COOLDOWN_S = 30.0, 120.0
"""First and longest time for which an engine that did not answer is skipped, so that it does not delay others."""


class PushSuccess(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a push to one engine."""

    pause_s: float
    method: str


PushOutcome = dict[str, PushSuccess | EngineError]
LoadState = frozenset[tuple[int, int, int | None]]
"""One entry per worker: process id, number of updates that changed its weights, checksum of the newest update."""


class EngineCooldown(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which an engine that did not answer is skipped."""

    error: EngineError
    rest_s: float
    until: float


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a push. `pause_s` is the longest pause of any engine."""

    version: int
    write_s: float = 0.0
    """Seconds to publish the weights, during which engines serve."""
    pause_s: float = 0.0
    pauses: dict[str, float] = {}
    """`engine_N` -> pause in seconds; N is the engine's index among the policy's engines at that time."""
    methods: dict[str, str] = {}
    """Engine URL -> transfer method (transfers.py)."""
    total_s: float = 0.0
    failed: dict[str, str] = {}
    """Engine url -> reason why the engine does not serve this version. `ensure` updates the engine later."""
    replaced: tuple[str, ...] = ()
    """URLs of engines whose weights somebody else had changed."""


class WeightPusher:
    """Pusher that keeps the engines of one policy at the learner's version."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        folder: Path,
        *,
        secret: str = "",
        transfers: Mapping[str, Transfer] | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 180.0,
        retry_s: float = RETRY_S,
        cooldown_s: float = COOLDOWN_S,
        current: Callable[[], Sequence[str]] | None = None,
        check: Callable[[], None] = lambda: None,
        keep_cache: bool = False,
    ) -> None:
        """`engine_urls`: engines at the start. `secret`: the engines' secret. `patience_s`: seconds that `sleep` waits for an
        engine that is being restarted, because it will take GPU memory again; `retry_s`: seconds between attempts. `cooldown_s`:
        first time for which an engine that did not answer is skipped. `current`: returns the present engines, if they change.
        `check`: called before each update; raises if another pusher owns the engines by now. `keep_cache`: see EngineControl."""
        staging = StagingBuffer()
        self._current, self._check = current or (lambda: engine_urls), check
        self.failing: dict[str, str] = {}
        """Engine url -> reason why it does not serve the newest version that it was sent."""
        self._transfers = transfers or {
            "ipc": IpcTransfer(staging),
            "nccl": NcclTransfer(staging),
            "adapters": AdapterTransfer(engine_urls, folder),
            "file": FileTransfer(engine_urls, folder),
            "http_adapters": HttpTransfer(AdapterTransfer((), folder), secret=secret),
            "http": HttpTransfer(FileTransfer((), folder), secret=secret),
        }
        self._secret, self._timeouts, self._keep_cache = secret, timeouts or Timeouts(), keep_cache
        self._patience_s, self._retry_s, self._cooldown_s = patience_s, retry_s, cooldown_s
        self._routes: dict[str, Route] = {}
        self._unusable: set[tuple[str, str, tuple[int, ...]]] = set()
        """(engine url, method, process ids of workers) of failed transfers, which are not tried again."""
        self._doubtful_pushes: Counter[str] = Counter()
        self._steps: dict[str, float | None] = {}
        """Engine url -> value of `EngineControl.steps` when its last push failed."""
        self._cooldowns: dict[str, EngineCooldown] = {}
        self._load_states: dict[str, LoadState] = {}
        """Engine url -> state after its last push; a different state means that somebody else changed the weights."""
        self._changed: set[str] = set()
        """Urls of engines whose weights somebody else has changed."""
        self._given_up: set[str] = set()
        """Urls of engines that did not come back while `sleep` waited for them."""

    def push(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Serve these weights as `version` on all engines. Raises EngineError if no engine accepted them."""
        return asyncio.run(self._push(deduplicate(named_tensors), version, self._engines()))

    def ensure(self, named_tensors: NamedTensors, version: int) -> PushReport:
        """Push to all engines that do not serve `version` as sent by this pusher: restarted, paused, in doubt, or changed by
        another learner or somebody else. Often there are none."""
        urls = self._engines()
        behind = asyncio.run(self._find_behind(urls, version))
        self.failing = {url: reason for url, reason in self.failing.items() if url in behind}
        if not behind:
            return PushReport(version=version)
        report = asyncio.run(self._push(deduplicate(named_tensors), version, behind))
        replaced = tuple(sorted(self._changed & report.methods.keys()))
        self._changed -= report.methods.keys()
        return msgspec.structs.replace(report, replaced=replaced)

    def repair(self, named_tensors: NamedTensors, version: int) -> None:
        """Resume engines that a killed learner left paused, with their present weights or, if those are in doubt, with
        `named_tensors`. Other engines are left to `ensure`. Raises EngineError if no engine in doubt accepted the weights."""
        urls = self._engines()
        doubtful = asyncio.run(_gather_by_url(urls, self._wake_engine))
        if behind := tuple(url for url in urls if doubtful[url]):
            asyncio.run(self._push(deduplicate(named_tensors), version, behind))

    def sleep(self) -> None:
        """Make all engines free their GPU memory until `wake`. Engines that are being restarted are awaited for `patience_s`,
        because they take memory as soon as they are back. Engines that refuse stay awake."""
        self._run_on_each(self._fall_asleep)

    def wake(self) -> None:
        """Let all engines take their GPU memory again."""
        self._run_on_each(self._wake_engine)

    def _engines(self) -> Sequence[str]:
        """Return the present engines. Raises EngineError if there are none or the list is unavailable."""
        urls = self._current()
        self.failing = {url: reason for url, reason in self.failing.items() if url in urls}
        if urls:
            return urls
        raise EngineError(
            "no engine serves the policy: start one with `swarmq engine start`, or add one with `swarmq engine add`"
        )

    def _control(self, url: str) -> EngineControl:
        return EngineControl(url, secret=self._secret, timeouts=self._timeouts, keep_cache=self._keep_cache)

    def _run_on_each(self, order: Callable[[str], Awaitable[object]]) -> None:
        try:
            urls = self._engines()
        except EngineError as error:
            log.warning("no_engines", reason=str(error))
        else:
            asyncio.run(_gather_by_url(urls, order))

    async def _wake_engine(self, url: str) -> bool:
        """Wake an engine, and return whether it needs a full set of weights."""
        try:
            async with self._control(url) as engine:
                status = await engine.wake()
        except EngineError as error:
            log.warning("engine_wake_failed", engine=url, reason=str(error))
            return False
        return status.is_in_doubt and not status.is_condemned

    async def _fall_asleep(self, url: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                async with self._control(url) as engine:
                    await engine.sleep()
            except EngineError as error:
                refused = isinstance(error, EngineRefusedError)
                if refused or url in self._given_up or time.monotonic() > deadline:
                    log.warning("engine_sleep_failed", engine=url, reason=str(error))
                    self._given_up.add(url)
                    return
            else:
                self._given_up.discard(url)
                return
            await asyncio.sleep(self._retry_s)

    async def _push(self, tensors: Tensors, version: int, urls: Sequence[str]) -> PushReport:
        began = time.perf_counter()
        snapshot = WeightSnapshot(self._transfers, tensors, version)
        try:
            outcome = await self._update_engines(urls, snapshot)
        finally:
            snapshot.withdraw()
        taken = {url: result for url, result in outcome.items() if isinstance(result, PushSuccess)}
        return PushReport(
            version=version,
            write_s=snapshot.write_s,
            pause_s=max(one.pause_s for one in taken.values()),
            pauses={f"engine_{urls.index(url)}": one.pause_s for url, one in taken.items()},
            methods={url: one.method for url, one in taken.items()},
            total_s=time.perf_counter() - began,
            failed=_get_failures(outcome),
        )

    async def _update_engines(self, urls: Sequence[str], snapshot: WeightSnapshot) -> PushOutcome:
        """Update every engine, without a second attempt: an engine that does not answer may be down for minutes, and `ensure`
        updates it later."""
        routes = await _gather_by_url(urls, lambda url: self._route(url, has_adapters=snapshot.has_adapters))
        for route in routes.values():
            if isinstance(route, Route):
                snapshot.publish(route)  # published by all methods before the first engine is paused
        outcome = await self._update_all(routes, snapshot)
        self._record_failures(outcome)
        failures = [result for result in outcome.values() if isinstance(result, EngineError)]
        if len(failures) == len(outcome):
            if self._cooldowns.keys() >= set(self._engines()):
                self._cooldowns.clear()  # they delay no other engine
            raise EngineError(f"no engine took version {snapshot.version}: {failures[0]}") from failures[0]
        return outcome

    def _record_failures(self, outcome: PushOutcome) -> None:
        others = {url: reason for url, reason in self.failing.items() if url not in outcome}
        self.failing = others | _get_failures(outcome)

    async def _update_all(self, routes: Mapping[str, Route | EngineError], snapshot: WeightSnapshot) -> PushOutcome:
        return await _gather_by_url(list(routes), lambda url: self._update(url, routes[url], snapshot))

    async def _route(self, url: str, *, has_adapters: bool) -> Route | EngineError:
        """Return the present route to an engine, which may have been restarted since the last push."""
        if error := self._get_cooldown_error(url):
            return error
        try:
            async with self._control(url) as engine:
                if (await engine.status()).is_condemned:
                    return EngineError(f"engine {url} is skipped until its restart: its weights are in doubt")
                route = choose_route(url, await engine.facts(), get_gpu_uuid(), has_adapters=has_adapters)
                route = msgspec.structs.replace(route, methods=await self._prepare_methods(engine, route))
        except EngineError as error:
            self._note_answer(url, error)
            return error
        self._note_answer(url)
        if self._routes.get(url) != route:
            self._routes[url] = route
            log.info("push_route", engine=url, method=route.methods[0], dtype=route.dtype, reason=route.reason)
        return route

    async def _prepare_methods(self, engine: EngineControl, route: Route) -> tuple[str, ...]:
        opened = []
        for method in route.methods:
            if (engine.url, method, route.workers) in self._unusable:
                continue
            try:
                await self._transfers[method].prepare(engine, route)
            except EngineError as error:
                self._unusable.add((engine.url, method, route.workers))
                log.warning("transfer_unusable", engine=engine.url, method=method, reason=str(error))
            else:
                opened.append(method)
        return tuple(opened)

    async def _update(
        self, url: str, route: Route | EngineError, snapshot: WeightSnapshot
    ) -> PushSuccess | EngineError:
        if isinstance(route, EngineError):
            log.warning("weights_refused", engine=url, version=snapshot.version, reason=str(route))
            return route
        failed = EngineError(f"engine {url}: no transfer method works")
        async with self._control(url) as engine:
            for method in route.methods:
                if (payload := await snapshot.get_payload_async(method, route)) is None:
                    continue
                self._check()
                try:
                    if payload.deliver:
                        payload = await payload.deliver(route.receiver)
                        self._check()
                    pause_s = await engine.update(payload, snapshot.version)
                except EngineError as error:
                    failed = error
                    log.warning(
                        "weights_refused", engine=url, version=snapshot.version, method=method, reason=str(error)
                    )
                    if not isinstance(error, EngineRefusedError):
                        if payload.deliver and isinstance(error, EngineSilentError):
                            self._note_answer(url, error)  # its receiver holds up other engines as a silent engine does
                        break
                    if method != route.methods[-1]:
                        self._unusable.add((url, method, route.workers))
                else:
                    self._doubtful_pushes.pop(url, None)
                    self._steps.pop(url, None)
                    self._load_states[url] = _get_load_state(engine.loaded_facts)
                    return PushSuccess(pause_s=pause_s, method=method)
            await self._count_doubt(engine, snapshot.version, failed)
        return failed

    async def _count_doubt(self, engine: EngineControl, version: int, failed: EngineError) -> None:
        """Condemn an engine that repeated pushes leave in doubt, or that cannot be paused or resumed; an engine started by
        swarmq is then restarted. An engine that was too slow to answer but computes is only busy."""
        if not engine.is_at_fault:
            return
        if isinstance(failed, EngineSilentError):
            before, self._steps[engine.url] = self._steps.get(engine.url), await engine.steps()
            if before not in (None, self._steps[engine.url]):
                return
        self._doubtful_pushes[engine.url] += 1
        if self._doubtful_pushes[engine.url] < MAX_DOUBTFUL_PUSHES:
            return
        self._doubtful_pushes.pop(engine.url)
        log.error("engine_condemned", engine=engine.url, version=version, action="it is skipped until its restart")
        try:
            await engine.condemn(version)
        except EngineError as error:
            log.warning("engine_silent", engine=engine.url, reason=str(error))

    async def _find_behind(self, urls: Sequence[str], version: int) -> tuple[str, ...]:
        current = await _gather_by_url(urls, lambda url: self._is_at(url, version))
        return tuple(url for url, at in current.items() if not at)

    async def _is_at(self, url: str, version: int) -> bool:
        if self._get_cooldown_error(url):
            return False
        try:
            async with self._control(url) as engine:
                status = await engine.status()
                loads = _get_load_state(await engine.facts())
        except EngineError as error:
            self._note_answer(url, error)
            return False
        self._note_answer(url)
        as_sent = self._load_states.get(url) == loads
        if status.is_unannounced or (status.version == version and url in self._load_states and not as_sent):
            log.error(
                "weights_replaced",
                engine=url,
                label=status.label,
                reason="another process changed the engine's weights",
                action="the engine gets the learner's weights again",
            )
            self._changed.add(url)
        return status.version == version and as_sent and not status.is_paused

    def _get_cooldown_error(self, url: str) -> EngineError | None:
        """Return the error because of which the engine is skipped at present, or None."""
        silence = self._cooldowns.get(url)
        return silence.error if silence and time.monotonic() < silence.until else None

    def _note_answer(self, url: str, error: EngineError | None = None) -> None:
        """Record an answer or an error. Only an engine that does not answer at all is skipped for a while, because a push
        waits for all of its engines."""
        before = self._cooldowns.pop(url, None)
        if isinstance(error, EngineSilentError):
            rest_s = min(2 * before.rest_s, MAX_COOLDOWN_S) if before else self._cooldown_s
            self._cooldowns[url] = EngineCooldown(error=error, rest_s=rest_s, until=time.monotonic() + rest_s)


class WeightSnapshot:
    """One version of the weights, published once per transfer method and dtype."""

    def __init__(self, transfers: Mapping[str, Transfer], tensors: Tensors, version: int) -> None:
        self.version = version
        self.write_s = 0.0
        """Seconds spent on publishing."""
        self.has_adapters = any(isinstance(tensor, FolderWeight) and tensor.adapter for tensor in tensors.values())
        self._transfers, self._tensors = transfers, tensors
        self._payloads: dict[tuple[str, str | None], Payload | EngineError] = {}
        self._making = asyncio.Lock()

    def publish(self, route: Route) -> None:
        """Publish by the first method of the route that has room. Raises EngineError if no method has room."""
        if all(self.get_payload(method, route) is None for method in route.methods):
            failed = self._payloads[route.methods[-1], route.dtype]
            assert isinstance(failed, EngineError)
            raise failed

    def get_payload(self, method: str, route: Route) -> Payload | None:
        """Return the published payload, or None if there is no room for it."""
        key = (method, route.dtype)
        if key not in self._payloads:
            began = time.perf_counter()
            try:
                self._payloads[key] = self._transfers[method].publish(self._tensors, self.version, route.dtype)
            except EngineError as error:
                log.warning("transfer_unusable", method=method, reason=str(error))
                self._payloads[key] = error
            self.write_s += time.perf_counter() - began
        payload = self._payloads[key]
        return payload if isinstance(payload, Payload) else None

    async def get_payload_async(self, method: str, route: Route) -> Payload | None:
        """Call `get_payload` in a thread, so that writing a file does not block updates of other engines."""
        async with self._making:
            return await asyncio.to_thread(self.get_payload, method, route)

    def withdraw(self) -> None:
        for method in {method for method, _ in self._payloads}:
            self._transfers[method].withdraw()


def _get_load_state(facts: Sequence[WorkerFacts]) -> LoadState:
    return frozenset((worker.pid, worker.loads, worker.checksum) for worker in facts)


def _get_failures(outcome: PushOutcome) -> dict[str, str]:
    return {url: str(error) for url, error in outcome.items() if isinstance(error, EngineError)}


async def _gather_by_url(urls: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    answers = await asyncio.gather(*(ask(url) for url in urls))
    return dict(zip(urls, answers, strict=True))
