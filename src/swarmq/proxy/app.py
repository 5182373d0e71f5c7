"""The HTTP side of the proxy: routes, keys, disconnects, and the `state` event.

agent ──POST──> key ──> body ──> dialect.parse ──> Completions.begin ──┬─> whole  ──> JSON
                                                                      └─> stream ──> server-sent events
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog
from litestar import Litestar, Request, get, post
from litestar.background_tasks import BackgroundTask
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme
from litestar.response import Response, Stream
from litestar.types import Receive

from swarmq import __version__, keys
from swarmq.broker import Broker
from swarmq.config import SwarmJob
from swarmq.engine.protocol import Engine
from swarmq.messages import Event
from swarmq.proxy import chat
from swarmq.proxy.completion import Completions
from swarmq.proxy.control import Control
from swarmq.proxy.control_routes import SECURITY, Authority, ProxyStatus, control_router
from swarmq.proxy.memory import Episodes
from swarmq.proxy.meter import Meter
from swarmq.proxy.pool import Pool
from swarmq.proxy.recorder import Publisher, Recorder
from swarmq.proxy.refusals import RefusedError, refusal_of

STATE_EVERY_S = 2.0
GONE = 499
"""What the log says of an agent that hung up; nobody receives it."""

T = TypeVar("T")
log = structlog.get_logger()


class GoneError(Exception):
    """The agent hung up."""


def create_app(
    job: SwarmJob,
    *,
    root: bytes,
    engines: Mapping[str, Sequence[Engine]],
    broker: Broker,
    source: str = "proxy.0",
    now: Callable[[], float] = time.time,
    state_every_s: float = STATE_EVERY_S,
) -> Litestar:
    """The proxy of a run. `engines` has every policy's; they and the broker are opened and closed by the caller."""
    meter = Meter(alert=job.proxy.drift_alert, window=job.proxy.drift_window)
    episodes = Episodes(idle_s=job.proxy.key_lifetime_s)
    pools = {name: Pool(engines[name]) for name in job.policies}
    completions = Completions(
        run=job.run,
        policies=job.policies,
        pools=pools,
        episodes=episodes,
        recorder=Recorder(broker, meter, confirm_timeout_s=job.proxy.confirm_timeout_s),
        meter=meter,
    )

    def claims_of(request: Request[Any, Any, Any]) -> keys.Claims:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RefusedError(
                "no api key: send `Authorization: Bearer <key>`, the key that `begin_episode()` returned",
                status=401, code="invalid_api_key",
            )  # fmt: skip
        return keys.verify(root, key.strip(), run=job.run, now=now())

    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: Request[Any, Any, Any]) -> Response[Any]:
        """OpenAI's chat completions, plain and streamed."""
        claims = claims_of(request)
        call = chat.parse(
            await request.body(),
            claims,
            retry=request.headers.get("x-stainless-retry-count"),
            agent=request.headers.get("x-swarmq-agent"),
        )
        if call.policy not in pools:
            raise RefusedError(
                f"policy {call.policy!r} is not in run {job.run!r}", status=404, code="model_not_found", param="model"
            )
        meter.open_calls += 1
        try:
            begun = await unless_gone(request.receive, completions.begin(call))
            if not call.stream:
                choices = await unless_gone(request.receive, completions.whole(begun))
                return Response(
                    chat.completion(begun, choices), media_type="application/json", headers=chat.headers(begun)
                )
        except GoneError:
            return Response(b"", status_code=GONE)
        finally:
            meter.open_calls -= 1
        events = _counted(chat.events(completions, begun, meter), meter)
        return Stream(
            events,
            media_type="text/event-stream",
            headers={**chat.headers(begun), "cache-control": "no-cache"},
            background=BackgroundTask(events.aclose),
        )

    @get("/v1/models")
    async def models(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """The policies that the key may call."""
        names = [name for name in claims_of(request).policies if name in pools]
        card = {"object": "model", "created": 0, "owned_by": "swarmq"}
        return {"object": "list", "data": [{"id": name, **card} for name in names]}

    @get("/health")
    async def health() -> Response[dict[str, Any]]:
        """200 when every policy has an engine that answers."""
        alive = {name: await _alive(pool) for name, pool in pools.items()}
        status = 200 if all(alive.values()) else 503
        return Response({"status": "ok" if status == 200 else "degraded", "engines": alive}, status_code=status)

    def status() -> ProxyStatus:
        engines = {name: [lane.engine.url for lane in pool.lanes] for name, pool in pools.items()}
        return ProxyStatus(run=job.run, source=source, policies=engines, episodes=len(episodes), counts=meter.fields())

    control = Control(job, broker, root=root, now=now)

    @asynccontextmanager
    async def controlling(_: Litestar) -> AsyncIterator[None]:
        async with control.serve():
            yield

    @asynccontextmanager
    async def reporting(_: Litestar) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            reporter = tasks.create_task(_report(job.run, source, meter, episodes, broker, state_every_s))
            yield
            reporter.cancel()

    def refuse(_: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
        refusal = refusal_of(error)
        meter.errors += 1
        if refusal.status >= 500:
            log.warning("call_failed", status=refusal.status, error=str(error), exc_info=refusal.status == 500)
        return Response(refusal.body, status_code=refusal.status, headers=refusal.headers)

    return Litestar(
        [chat_completions, models, health, control_router(control, Authority(root, job.run, now), episodes, status)],
        lifespan=[reporting, controlling],
        openapi_config=OpenAPIConfig(
            title="swarmq proxy",
            version=__version__,
            components=Components(security_schemes={SECURITY: SecurityScheme(type="http", scheme="bearer")}),
        ),
        exception_handlers={Exception: refuse, HTTPException: refuse},
        request_max_body_size=job.proxy.max_body_bytes,
        logging_config=None,
    )


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the agent hangs up. Raises GoneError then."""
    outcome: list[T] = []
    failure: list[Exception] = []
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        worker.cancel()

    async def run() -> None:
        try:
            outcome.append(await work)
        except Exception as error:
            failure.append(error)  # as itself, not in a group
        finally:
            watcher.cancel()

    async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(watch())
        worker = tasks.create_task(run())
    if failure:
        raise failure[0]
    if gone or not outcome:
        raise GoneError
    return outcome[0]


async def _counted(events: AsyncGenerator[bytes, None], meter: Meter) -> AsyncGenerator[bytes, None]:
    meter.open_calls += 1
    try:
        async for event in events:
            yield event
    finally:
        meter.open_calls -= 1
        await events.aclose()


async def _alive(pool: Pool) -> int:
    """How many engines answer."""
    return sum(await asyncio.gather(*(lane.engine.healthy() for lane in pool.lanes)))


async def _report(run: str, source: str, meter: Meter, episodes: Episodes, broker: Publisher, every_s: float) -> None:
    while True:
        episodes.sweep()
        await broker.emit(Event(run=run, source=source, name="state", at=time.time(), fields=meter.fields()))
        for text in meter.alerts():
            log.warning("drift", text=text)
            await broker.emit(Event(run=run, source=source, name="warning", at=time.time(), fields={"text": text}))
        await asyncio.sleep(every_s)
