"""The proxy's HTTP application: routes, keys, errors, and the `state` event."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from litestar import Litestar, Request, get
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import RedocRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme
from litestar.response import Response

from swarmq import keys
from swarmq.broker import Broker
from swarmq.config import SwarmJob
from swarmq.engine.client.protocol import Engine
from swarmq.messages import Event, Turn, new_id
from swarmq.proxy.completions.answer_receipts import AnswerReceipts
from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.completions.live_sampling import LiveSampling
from swarmq.proxy.completions.pipeline import Completions
from swarmq.proxy.completions.recorder import Recorder, TurnPublisher
from swarmq.proxy.counters import Counters
from swarmq.proxy.dialects import dialect_of, request_headers
from swarmq.proxy.engines.pool import WAIT_S
from swarmq.proxy.engines.pools import EnginePools, Opener
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.agent_routes import AGENT_KEY, AgentRoutes, not_served, read_key
from swarmq.proxy.http.control_routes import FAULTS, SECURITY, Authority, ProxyStatus, control_routes
from swarmq.proxy.http.episode_control import EpisodeControl
from swarmq.proxy.http.metrics import CONTENT_TYPE, Metrics
from swarmq.proxy.http_errors import RefusedError, to_refusal
from swarmq.registries.clients import RevokedNames
from swarmq.registries.engines import EngineRegistry
from swarmq.version import __version__

STATE_EVERY_S = 2.0
EPISODE = "swarmq_episode"
"""Key of a request's episode in its state."""
AT_FAULT = frozenset({400, 404, 408, 413})
"""Statuses of calls that an agent must change before it can get an answer."""
MAX_KNOWN, MAX_WHY = 4096, 300
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
    engine_wait_s: float = WAIT_S,
) -> Litestar:
    """Create the proxy of a run.

    `engines`: those of every policy, opened and closed by the caller, like the broker. `number`: index among the run's proxies.
    `opener`: opens engines that are added later. With `tuning` and `episodes`, which get the run's events (`follow`), settings
    can change and ended episodes are forgotten. `watchers`: called with every confirmed turn and the seconds of its confirm.
    `engine_wait_s`: seconds that calls wait while no engine can answer.
    """
    meter = Counters(watchers=list(watchers), alert=job.proxy.drift_alert, window=job.proxy.drift_window)
    source = f"proxy.{number}"
    episodes = EpisodeCache.of_job(job, number=number, now=now) if episodes is None else episodes
    gate = CallLimiter(max_open=job.proxy.max_open_calls, max_waiting=job.proxy.max_waiting_calls)
    fleet = EnginePools(
        {name: engines[name] for name in job.policies},
        roster=EngineRegistry(job),
        max_behind=job.groups.max_staleness,
        probe_every_s=job.proxy.probe_every_s,
        opener=opener,
        resumed_at={name: job.run_folder.newest_checkpoint(name) for name in job.policies if name not in job.frozen},
        wait_s=engine_wait_s,
    )
    pools = fleet.pools
    completions = Completions(
        tuning=tuning or LiveSampling(job),
        pools=pools,
        episodes=episodes,
        recorder=Recorder(broker, meter, confirm_timeout_s=job.proxy.confirm_timeout_s),
        meter=meter,
        gate=gate,
        timeout_s=job.proxy.request_timeout_s,
    )

    removed = RevokedNames(job.run_folder.clients)

    def claims_of(request: Request[Any, Any, Any]) -> keys.Claims:
        claims = keys.verify(root, read_key(request), run=job.run, now=now(), removed=removed)
        request.state[EPISODE] = claims.episode_id
        return claims

    refused = RefusalEvents()

    @get("/health")
    async def health() -> Response[dict[str, Any]]:
        """Answer 200 if every policy has an engine that answers."""
        alive = {name: pool.num_healthy for name, pool in pools.items()}
        status = 200 if all(alive.values()) else 503
        return Response({"status": "ok" if status == 200 else "degraded", "engines": alive}, status_code=status)

    def status() -> ProxyStatus:
        return ProxyStatus(
            run=job.run,
            source=source,
            policies=fleet.views(),
            open_calls=gate.open,
            waiting_calls=gate.waiting,
            episodes=len(episodes),
            counts=meter.fields(),
        )

    control = EpisodeControl(job, broker, root=root, now=now)
    serving = AnswerReceipts(job.run, broker)

    metrics = Metrics(meter, gate, fleet, episodes)
    authority = Authority(root, job.run, now, removed)

    @get(
        "/metrics",
        guards=[authority.needs("read")],
        media_type=CONTENT_TYPE,
        responses={status: FAULTS[status] for status in (401, 403)},
        security=[{SECURITY: []}],
    )
    async def show_metrics() -> bytes:
        """Return metrics for Prometheus; needs an operator token with the role read."""
        return metrics.text()

    @asynccontextmanager
    async def controlling(_: Litestar) -> AsyncIterator[None]:
        async with fleet.kept(), control.serve():
            yield

    @asynccontextmanager
    async def reporting(_: Litestar) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(_report(job.run, source, meter, episodes, fleet, broker, state_every_s))
            others = [tasks.create_task(serving.tell()), tasks.create_task(refused.tell(job.run, source, broker))]
            yield
            for task in (reporter, *others):
                task.cancel()

    def refuse(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
        path = request.url.path
        match error:
            case NotFoundException():
                error = not_served(request.method, path)
            case HTTPException(status_code=413):
                error = RefusedError(
                    f"the body has more than {job.proxy.max_body_bytes} bytes (proxy.max_body_bytes)",
                    status=413, code="request_too_large",
                )  # fmt: skip
        refusal = to_refusal(error)
        meter.errors += 1
        if refusal.status in AT_FAULT and (episode_id := request.state.get(EPISODE)):
            refused.add(episode_id, refusal.message)
        told = {**refusal.headers, **request_headers(new_id())}
        if isinstance(error, MethodNotAllowedException):
            told |= error.headers or {}
        if refusal.status >= 500:
            log.warning(
                "call_failed",
                status=refusal.status,
                error=str(error),
                request_id=told["x-request-id"],
                exc_info=refusal.status == 500,
            )
        return Response(dialect_of(path, request.headers).refusal(refusal), status_code=refusal.status, headers=told)

    agent_routes = AgentRoutes(
        completions,
        job.proxy,
        claims_of=claims_of,
        pools=pools,
        aliases={name: policy.aliases for name, policy in job.policies.items()},
        episodes=episodes,
        meter=meter,
        receipts=serving,
    )
    return Litestar(
        [*agent_routes.handlers(), health, show_metrics, *control_routes(control, authority, episodes, fleet, status)],
        lifespan=[reporting, controlling],
        openapi_config=OpenAPIConfig(
            title="swarmq proxy",
            version=__version__,
            render_plugins=[RedocRenderPlugin()],
            components=Components(
                security_schemes={
                    AGENT_KEY: SecurityScheme(type="http", scheme="bearer"),
                    SECURITY: SecurityScheme(type="http", scheme="bearer"),
                }
            ),
        ),
        exception_handlers={Exception: refuse, HTTPException: refuse},
        request_max_body_size=job.proxy.max_body_bytes,
        logging_config=None,
    )


class RefusalEvents:
    """Events that tell the collector once for each episode that a call of it was refused, as a reason if it ends without a
    turn."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()
        self._told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def add(self, episode_id: str, why: str) -> None:
        if episode_id not in self._known:
            self._known[episode_id] = None
            self._told.put_nowait((episode_id, why[:MAX_WHY]))
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    async def tell(self, run: str, source: str, broker: TurnPublisher) -> None:
        while True:
            episode_id, why = await self._told.get()
            fields = {"episode_id": episode_id, "why": why}
            await broker.emit(Event(run=run, source=source, name="refused", at=time.time(), fields=fields))


async def follow(run: str, broker: Broker, hearers: Sequence[Callable[[Event], None]]) -> None:
    """Pass the run's events to `hearers` until cancelled."""
    async with broker.events(run) as events:
        async for event in events:
            for hear in hearers:
                hear(event)


async def _report(
    run: str,
    source: str,
    meter: Counters,
    episodes: EpisodeCache,
    fleet: EnginePools,
    broker: TurnPublisher,
    every_s: float,
) -> None:
    while True:
        episodes.sweep()
        fields = meter.fields() | episodes.fields()
        await broker.emit(Event(run=run, source=source, name="state", at=time.time(), fields=fields))
        for text in (*meter.alerts(), *episodes.alerts(), *fleet.news()):
            log.warning("warning", text=text)
            await broker.emit(Event(run=run, source=source, name="warning", at=time.time(), fields={"text": text}))
        await asyncio.sleep(every_s)
