"""The proxy's process: opens broker and engines, runs one uvicorn server, and drains on the first signal.

A proxy that has joined a live run (`--join`) first leaves the list of proxies and serves on for a while:

  listening ──> in proxies.json ──signal──> out of it ──no call for LEAVE_S──> drained
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from functools import partial
from types import FrameType
from typing import Protocol

import structlog
import uvicorn
import uvloop
from litestar import Litestar
from litestar.handlers import ASGIRouteHandler

from swarmq import keys
from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
from swarmq.config import ProxySettings, SwarmJob, make_folder, resolve_amqp_url
from swarmq.engine.client.vllm import VllmEngine
from swarmq.errors import ConfigError, MissingExtraError
from swarmq.messages import Turn
from swarmq.proxy.completions.live_sampling import LiveSampling
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.app import create_app, follow
from swarmq.proxy.http.connection_limits import ConnectionLimits, max_connections
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime import logs
from swarmq.runtime.processes import listen, raise_file_limit

DRAIN_S = 10
KEEP_S = 30
LEAVE_S = 30.0
"""Seconds without any call after which a leaving proxy drains, because episodes that began at a proxy stay with it."""
CHECK_S = 0.5
"""Seconds between two checks whether a leaving proxy has calls."""
BACKLOG = 2048
YOUNG_OBJECTS = 10_000
"""Number of allocations between two young garbage collections; a stream's events are freed before and never scanned."""
log = structlog.get_logger()


class ExtraPages(Protocol):
    """Pages that a proxy serves beside its own routes."""

    @property
    def handlers(self) -> Sequence[ASGIRouteHandler]: ...

    def finish(self) -> None:
        """End answers that do not end by themselves, because the proxy drains. Called by a signal handler."""


PagesOpener = Callable[[SwarmJob], AbstractAsyncContextManager[ExtraPages]]


def run(job: SwarmJob, *, number: int = 0, join: bool = False, pages: PagesOpener | None = None) -> None:
    """Serve until SIGTERM or SIGINT; with `join`, beside the proxies of a live run. `pages`: opens further pages to serve.

    Raises SwarmqError if the job names no broker, no engine or a taken port.
    """
    logs.configure(role=f"proxy.{number}", run=job.run)
    gc.freeze()  # imported objects stay: the garbage collector need not scan them while agents wait
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(job, number=number, join=join, pages=pages))


async def serve(job: SwarmJob, *, number: int = 0, join: bool = False, pages: PagesOpener | None = None) -> None:
    url = resolve_amqp_url(job.broker)
    if url is None:
        raise ConfigError("broker.url: the proxy needs one; `swarmq up` fills it in, or set $SWARMQ_AMQP_URL")
    for name, policy in job.policies.items():
        if not policy.engine.urls:
            raise ConfigError(f"policies.{name}.engine.urls: the proxy needs at least one; `swarmq up` fills them in")
    make_folder(job.run_folder.path)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(job.proxy.host, job.proxy.port, backlog=BACKLOG, setting="proxy.port"))
        port = listener.getsockname()[1]
        number = port if join else number
        own_url, membership = job.proxy.url(port), Membership()
        name = f"swarmq proxy.{number} {job.run}"
        broker = await stack.enter_async_context(
            AmqpBroker.open(url, name=name, deadline_s=initial_connect_timeout_s())
        )
        await broker.declare(job.run, policies=job.trained, kinds=job.task_kinds)
        opener = partial(
            VllmEngine.open, deadline_s=None, secret=EngineRegistry(job).secret()
        )  # calls have a deadline of their own
        engines = {
            name: [await stack.enter_async_context(opener(engine)) for engine in policy.engine.urls]
            for name, policy in job.policies.items()
        }
        root = keys.load_root(job.run_folder.root_secret)
        tuning, episodes = LiveSampling(job), EpisodeCache.of_job(job, number=number, url=own_url)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        following = tasks.create_task(follow(job.run, broker, [tuning.handle_event, episodes.handle_event]))
        stack.callback(following.cancel)
        watchers = [membership.called, *([stack.enter_context(_exporting(job, number))] if job.proxy.traces else [])]
        opened = await stack.enter_async_context(pages(job)) if pages else None
        app = create_app(
            job,
            root=root,
            engines=engines,
            broker=broker,
            number=number,
            tuning=tuning,
            episodes=episodes,
            opener=opener,
            watchers=watchers,
            pages=opened.handlers if opened else (),
        )
        log.info("listening", url=own_url)
        server = DrainingServer(server_config(app, job.proxy, most_connections=_most_connections(job.proxy)))
        server.pages = opened
        if join:
            server.membership = membership
            registry = ProxyRegistry(job.run_folder.proxies)
            keeping = tasks.create_task(_keep_membership(server, membership, registry, own_url))
            stack.callback(keeping.cancel)
        await server.serve(sockets=[listener])


def server_config(
    app: Litestar, proxy: ProxySettings, *, most_connections: int, keep_s: int = KEEP_S
) -> uvicorn.Config:
    """Return the configuration of uvicorn for the proxy. `keep_s`: seconds that an idle connection is kept between two calls."""
    limits = ConnectionLimits(
        most=most_connections, receive_s=proxy.receive_timeout_s, keep_s=keep_s, read_s=proxy.request_timeout_s
    )
    return uvicorn.Config(
        app,
        http=limits.protocol(),
        ws="none",
        log_config=None,
        access_log=False,
        ssl_certfile=proxy.certificate,
        ssl_keyfile=proxy.key,
        lifespan="on",
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=keep_s,
    )


class Membership:
    """The membership of a proxy in a run that it has joined."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.leaving = asyncio.Event()
        self._clock = clock
        self._called_at = clock()

    def called(self, _turn: Turn, _seconds: float) -> None:
        self.touch()

    def touch(self) -> None:
        self._called_at = self._clock()

    @property
    def idle_s(self) -> float:
        return self._clock() - self._called_at


class DrainingServer(uvicorn.Server):
    """Server that drains on the first signal and stops waiting on the second; neither is raised again afterwards, so the
    process ends with status 0. A server with a membership leaves the run's list at the first signal, and drains later."""

    membership: Membership | None = None
    pages: ExtraPages | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.membership and not self.membership.leaving.is_set():
            self.membership.leaving.set()
            return
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.pages:
            self.pages.finish()


async def _keep_membership(
    server: DrainingServer, membership: Membership, proxies: ProxyRegistry, url: str, *, check_s: float = CHECK_S
) -> None:
    """Keep this proxy in the run's list until it leaves, then go on serving the episodes that began here."""
    proxies.add(url)
    log.info("joined", url=url)
    try:
        await membership.leaving.wait()
    finally:
        proxies.remove(url)
    membership.touch()  # clients that have just read the list may not have called yet
    log.info("leaving", url=url, idle_s=LEAVE_S)
    while server.server_state.tasks or membership.idle_s < LEAVE_S:  # noqa: ASYNC110 - an agent's last call is not marked
        await asyncio.sleep(check_s)
    server.should_exit = True


def _most_connections(proxy: ProxySettings) -> int:
    """Return the number of connections that the proxy's calls need, or what the host allows, with a warning."""
    files, calls = raise_file_limit(), proxy.max_open_calls + proxy.max_waiting_calls
    most = max_connections(files, calls=calls)
    if most < calls:
        log.warning(
            "warning",
            text=f"this process may open {files} files: the proxy holds {most} connections, not the {calls} of "
            "proxy.max_open_calls and proxy.max_waiting_calls; raise the limit (ulimit -n, LimitNOFILE=)",
        )
    return most


def _exporting(job: SwarmJob, number: int) -> AbstractContextManager[Callable[[Turn, float], None]]:
    """Return a context that exports OpenTelemetry spans. Raises MissingExtraError."""
    try:
        from swarmq.proxy.http.tracing import export_spans  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingExtraError(f"proxy.traces needs {error.name}: pip install 'swarmq[traces]'") from error
    return export_spans(job.run, number)
