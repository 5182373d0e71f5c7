"""The proxy's HTTP application: its parts, its own routes, errors, and the events that it emits."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from litestar import Litestar, Request, get
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.handlers import ASGIRouteHandler, HTTPRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import RedocRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.response import Response
from litestar.types import ASGIApp, Middleware, Receive, Scope, Send

from swarmq.broker import Broker
from swarmq.config import SwarmJob
from swarmq.engine.client.protocol import Engine
from swarmq.errors import BrokerError
from swarmq.hosts.members import RunMembership, StoredMembership
from swarmq.messages import Event, EventName, Turn, new_id
from swarmq.proxy.completions.answer_receipts import AnswerReceipts
from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.completions.live_sampling import LiveSampling
from swarmq.proxy.completions.pipeline import Completions
from swarmq.proxy.completions.recorder import Recorder, TurnPublisher
from swarmq.proxy.completions.remote_images import RemoteImages
from swarmq.proxy.counters import Counters
from swarmq.proxy.dialects import dialect_of, request_headers
from swarmq.proxy.engines.pool import TIMINGS, PoolTimings
from swarmq.proxy.engines.pools import EnginePools, Opener
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.agent_routes import AgentRoutes, make_unknown_url_error
from swarmq.proxy.http.authorization import AGENT_SCHEME, EPISODE, OPERATOR_SCHEME, Authority
from swarmq.proxy.http.control_routes import FAULTS, ControlRoutes, ProxyStatus
from swarmq.proxy.http.episode_control import EpisodeControl
from swarmq.proxy.http.metrics import CONTENT_TYPE, Metrics
from swarmq.proxy.http_errors import RefusedError, to_refusal
from swarmq.version import __version__

HEALTH = "/health"
STATE_EVERY_S = 2.0
AT_FAULT = frozenset({400, 404, 408, 413})
"""Statuses of calls that an agent must change before it can get an answer."""
MAX_REPORTED_EPISODES, MAX_REASON_CHARS = 4096, 300
log = structlog.get_logger()


def create_app(
    job: SwarmJob,
    *,
    root: bytes,
    engines: Mapping[str, Sequence[Engine]],
    broker: Broker,
    number: int = 0,
    now: Callable[[], float] = time.time,
    state_every_s: float = STATE_EVERY_S,
    tuning: LiveSampling | None = None,
    episodes: EpisodeCache | None = None,
    opener: Opener | None = None,
    watchers: Sequence[Callable[[Turn, float], None]] = (),
    membership: RunMembership | None = None,
    engine_timings: PoolTimings = TIMINGS,
    pages: Sequence[ASGIRouteHandler] = (),
    images: RemoteImages | None = None,
) -> Litestar:
    """Create the proxy of a run.

    `engines`: policy -> its engines; the caller opens and closes them and the broker. `number`: index among the run's
    proxies. `opener`: opens engines that are added later. `tuning` and `episodes`: given if the caller passes the run's
    events to them (`follow`), so that settings can change and ended episodes are forgotten. `watchers`: called with every
    confirmed turn and the seconds that its confirmation took. `membership`: the members of the run; None: those in the run
    folder. `pages`: further routes, which check authorization themselves. `images`: fetches images by URL; None: from public
    addresses.
    """
    membership = StoredMembership(job) if membership is None else membership
    meter = Counters(watchers=list(watchers), alert=job.proxy.drift_alert, window=job.proxy.drift_window)
    episodes = (
        EpisodeCache.of_job(job, number=number, proxies=membership.proxies, now=now) if episodes is None else episodes
    )
    gate = CallLimiter(max_open=job.proxy.max_open_calls, max_waiting=job.proxy.max_waiting_calls)
    fleet = EnginePools(
        {name: engines[name] for name in job.policies},
        roster=membership.roster,
        max_behind=job.groups.max_staleness,
        probe_every_s=job.proxy.probe_every_s,
        opener=opener,
        resumed_at=membership.resumed_at,
        timings=engine_timings,
    )
    service = ProxyService(
        job=job,
        source=f"proxy.{number}",
        broker=broker,
        meter=meter,
        gate=gate,
        fleet=fleet,
        episodes=episodes,
        metrics=Metrics(meter, gate, fleet, episodes),
        refusals=RefusalEvents(),
    )
    authority = Authority(root, job.run, now=now, revoked=membership.revoked)
    control = EpisodeControl(job, broker, root=root, now=now)
    receipts = AnswerReceipts(job.run, broker)
    completions = Completions(
        tuning=tuning or LiveSampling(job),
        pools=fleet.pools,
        episodes=episodes,
        recorder=Recorder(
            broker,
            meter,
            confirm_timeout_s=job.proxy.confirm_timeout_s,
            turn_queues=job.collector.turn_queues,
        ),
        meter=meter,
        gate=gate,
        images=images or RemoteImages(max_bytes=job.proxy.max_body_bytes),
        timeout_s=job.proxy.request_timeout_s,
    )
    agent_routes = AgentRoutes(
        completions,
        job.proxy,
        authority=authority,
        pools=fleet.pools,
        aliases={name: policy.aliases for name, policy in job.policies.items()},
        episodes=episodes,
        meter=meter,
        receipts=receipts,
    )
    control_routes = ControlRoutes(control, authority, episodes, fleet, service.status)

    @asynccontextmanager
    async def run_loops(_: Litestar) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            loops = (service.report(state_every_s), receipts.report(), service.report_refusals())
            running = [tasks.create_task(loop) for loop in loops]
            async with fleet.kept(), control.serve():
                yield
            for task in running:
                task.cancel()

    return Litestar(
        [*agent_routes.handlers(), *service.handlers(authority), *control_routes.handlers(), *pages],
        lifespan=[run_loops],
        openapi_config=OpenAPIConfig(
            title="swarmq proxy",
            version=__version__,
            use_handler_docstrings=True,
            render_plugins=[RedocRenderPlugin()],
            components=Components(
                security_schemes={
                    name: SecurityScheme(type="http", scheme="bearer") for name in (AGENT_SCHEME, OPERATOR_SCHEME)
                }
            ),
        ),
        exception_handlers={Exception: service.refuse, HTTPException: service.refuse},
        middleware=[catch_up_first(membership, job.proxy.confirm_timeout_s)],
        request_max_body_size=job.proxy.max_body_bytes,
        logging_config=None,
    )


def catch_up_first(membership: RunMembership, patience_s: float) -> Middleware:
    """Return middleware that lets requests wait while `membership` is stale, because their client may have been removed. Requests
    that have waited for `patience_s` seconds are answered with status 503."""

    def wrap(app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] != HEALTH and not await membership.wait_current(patience_s):
                raise BrokerError(
                    "this proxy was cut off from RabbitMQ, and the collector has not confirmed the client since: check that both run"
                )
            await app(scope, receive, send)

        return handle

    return wrap


class RefusalEvents:
    """Queue of `refused` events: the first refused call of each episode. If the episode ends without a turn, the collector
    gives it as the reason."""

    def __init__(self) -> None:
        self._reported: OrderedDict[str, None] = OrderedDict()
        self._queue: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    def add(self, episode_id: str, why: str) -> None:
        if episode_id not in self._reported:
            self._reported[episode_id] = None
            self._queue.put_nowait({"episode_id": episode_id, "why": why[:MAX_REASON_CHARS]})
            if len(self._reported) > MAX_REPORTED_EPISODES:
                self._reported.popitem(last=False)

    async def next_fields(self) -> dict[str, str]:
        """Wait for the fields of the next event."""
        return await self._queue.get()


@dataclass(frozen=True, kw_only=True)
class ProxyService:
    """The state of one proxy, as its health, status, metrics and events show it, and its answers to errors."""

    job: SwarmJob
    source: str
    """Source of its events: `proxy.<number>`."""
    broker: TurnPublisher
    meter: Counters
    gate: CallLimiter
    fleet: EnginePools
    episodes: EpisodeCache
    metrics: Metrics
    refusals: RefusalEvents

    def handlers(self, authority: Authority) -> list[HTTPRouteHandler]:
        """Return the route handlers for the application."""
        faults = {status: FAULTS[status] for status in (401, 403)}
        guarded = get(
            "/metrics",
            guards=[authority.require("read")],
            media_type=CONTENT_TYPE,
            responses=faults,
            security=[{OPERATOR_SCHEME: ["read"]}],
        )
        return [get(HEALTH)(self.health), guarded(self.show_metrics)]

    async def health(self) -> Response[dict[str, Any]]:
        """Answer 200 if every policy has an engine that answers."""
        alive = {name: pool.num_healthy for name, pool in self.fleet.pools.items()}
        status = 200 if all(alive.values()) else 503
        return Response({"status": "ok" if status == 200 else "degraded", "engines": alive}, status_code=status)

    async def show_metrics(self) -> bytes:
        """Return metrics for Prometheus; needs an operator token with the role read."""
        return self.metrics.text()

    def status(self) -> ProxyStatus:
        return ProxyStatus(
            run=self.job.run,
            source=self.source,
            policies=self.fleet.views(),
            open_calls=self.gate.open,
            waiting_calls=self.gate.waiting,
            episodes=len(self.episodes),
            counts=self.meter.fields(),
        )

    def refuse(self, request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
        """Answer an error in the form of the path's API, and count it."""
        path = request.url.path
        match error:
            case NotFoundException():
                error = make_unknown_url_error(request.method, path)
            case HTTPException(status_code=413):
                error = RefusedError(
                    f"the body has more than {self.job.proxy.max_body_bytes} bytes (proxy.max_body_bytes)",
                    status=413, code="request_too_large",
                )  # fmt: skip
        refusal = to_refusal(error)
        self.meter.errors += 1
        if refusal.status in AT_FAULT and (episode_id := request.state.get(EPISODE)):
            self.refusals.add(episode_id, refusal.message)
        headers = {**refusal.headers, **request_headers(new_id())}
        if isinstance(error, MethodNotAllowedException):
            headers |= error.headers or {}
        if refusal.status >= 500:
            log.warning(
                "call_failed",
                status=refusal.status,
                reason=str(error),
                request_id=headers["x-request-id"],
                exc_info=refusal.status == 500,
            )
        return Response(dialect_of(path, request.headers).refusal(refusal), status_code=refusal.status, headers=headers)

    async def report(self, every_s: float) -> None:
        """Emit a `state` event, and a `warning` for each alert, every `every_s` seconds."""
        while True:
            self.episodes.sweep()
            await self._emit("state", self.meter.fields() | self.episodes.fields())
            for text in (*self.meter.alerts(), *self.episodes.alerts(), *self.fleet.news()):
                log.warning("warning", text=text)
                await self._emit("warning", {"text": text})
            await asyncio.sleep(every_s)

    async def report_refusals(self) -> None:
        """Emit a `refused` event for the first refused call of each episode."""
        while True:
            await self._emit("refused", await self.refusals.next_fields())

    async def _emit(self, name: EventName, fields: Mapping[str, Any]) -> None:
        await self.broker.emit(
            Event(run=self.job.run, source=self.source, name=name, at=time.time(), fields=dict(fields))
        )


async def follow(run: str, broker: Broker, handlers: Sequence[Callable[[Event], None]]) -> None:
    """Pass the run's events to `handlers` until cancelled."""
    async with broker.events(run) as events:
        async for event in events:
            for handle in handlers:
                handle(event)
