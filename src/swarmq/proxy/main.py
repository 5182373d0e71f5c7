"""The proxy's process: opens broker and engines, runs one uvicorn server, and drains on the first signal.

A proxy that has joined a live run (`--join`) leaves the list of proxies at the first signal, and drains once it has no calls:

  listening ──> in proxies.json ──signal──> out of it ──no call for LEAVE_S──> drained

On the run's own host it reads and edits files of the run folder; on another host it has an invite, follows the run's membership over
the broker, and asks the collector to edit the list.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

import msgspec
import structlog
import uvicorn
from litestar import Litestar
from litestar.handlers import ASGIRouteHandler

from swarmq import keys
from swarmq.broker import Broker, declare_run
from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s
from swarmq.config import ProxySettings, SwarmJob, make_folder, resolve_amqp_url
from swarmq.engine.client.vllm import VllmEngine
from swarmq.errors import ConfigError, MissingExtraError
from swarmq.hosts.addresses import ListenAddress, check_announced
from swarmq.hosts.follow import EventHandler, FollowedMembership, choose_address, is_run_on_this_host, join_run
from swarmq.hosts.members import RunMembership, StoredMembership, build_job, number_proxy
from swarmq.hosts.register import keep_registered
from swarmq.keys import HostInvite
from swarmq.messages import Turn
from swarmq.proxy.completions.live_sampling import LiveSampling
from swarmq.proxy.episodes.cache import EpisodeCache
from swarmq.proxy.http.app import create_app, follow
from swarmq.proxy.http.connection_limits import ConnectionLimits, max_connections
from swarmq.registries.engines import EngineRegistry, Urls
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime import event_loop, logs
from swarmq.runtime.processes import listen, raise_file_limit

DRAIN_S = 10
KEEP_S = 30
LEAVE_S = 30.0
"""Seconds without any call after which a leaving proxy drains, because episodes that began at a proxy stay with it."""
CHECK_S = 0.5
"""Seconds between two checks whether a leaving proxy has calls, or a joining one engines."""
BACKLOG = 2048
log = structlog.get_logger()


class ExtraPages(Protocol):
    """Pages that a proxy serves beside its own routes."""

    @property
    def handlers(self) -> Sequence[ASGIRouteHandler]: ...

    def finish(self) -> None:
        """End answers that do not end by themselves, because the proxy drains. Called by a signal handler."""


PagesOpener = Callable[[SwarmJob], AbstractAsyncContextManager[ExtraPages]]


@dataclass(frozen=True, kw_only=True)
class ServedRun:
    """What a proxy needs of its run, on the run's own host or on another one."""

    job: SwarmJob
    broker: Broker
    membership: RunMembership
    pass_on: Callable[[Sequence[EventHandler]], Coroutine[Any, Any, None]]
    """Function that passes the run's events to handlers until cancelled."""
    root: bytes
    engine_secret: str


def run(job: SwarmJob, *, number: int = 0, join: bool = False, pages: PagesOpener | None = None) -> None:
    """Serve until SIGTERM or SIGINT; with `join`, beside the proxies of a live run. `pages`: opens further pages to serve.

    Raises SwarmqError if the job names no broker, no engine or a taken port.
    """
    _run(serve(job, number=number, join=join, pages=pages), role=f"proxy.{number}", run_name=job.run)


def run_elsewhere(invite: HostInvite, place: ListenAddress) -> None:
    """Serve beside the proxies of a live run on another host, until SIGTERM or SIGINT.

    Raises SwarmqError if the invite has expired, the run or one of its engines cannot be reached, the run does not fit this host, or
    other hosts cannot reach the announced address.
    """
    invite.check_current(time.time())
    _run(serve_elsewhere(invite, place), role=f"proxy.{invite.host}", run_name=invite.run)


def _run(serving: Coroutine[Any, Any, None], *, role: str, run_name: str) -> None:
    logs.configure(role=role, run=run_name)
    event_loop.run(serving)


async def serve(job: SwarmJob, *, number: int = 0, join: bool = False, pages: PagesOpener | None = None) -> None:
    url = resolve_amqp_url(job.broker)
    if url is None:
        raise ConfigError("broker.url: the proxy needs one; `swarmq up` fills it in, or set $SWARMQ_AMQP_URL")
    for name, policy in job.policies.items():
        if not policy.engine.urls:
            raise ConfigError(f"policies.{name}.engine.urls: the proxy needs at least one; `swarmq up` fills them in")
    make_folder(job.run_folder.path)
    with listen(job.proxy.host, job.proxy.port, backlog=BACKLOG, setting="proxy.port") as listener:
        port = listener.getsockname()[1]
        number, own_url = port if join else number, job.proxy.url(port)
        name = f"swarmq proxy.{number} {job.run}"
        async with AmqpBroker.open(url, name=name, deadline_s=initial_connect_timeout_s()) as broker:
            await declare_run(broker, job)
            served = ServedRun(
                job=job,
                broker=broker,
                membership=StoredMembership(job),
                pass_on=partial(follow, job.run, broker),
                root=keys.load_root(job.run_folder.root_secret),
                engine_secret=EngineRegistry(job).secret(),
            )
            listed = _keep_listed(ProxyRegistry(job.run_folder.proxies), own_url) if join else None
            await _serve(served, listener, number=number, url=own_url, listed=listed, pages=pages)


async def serve_elsewhere(invite: HostInvite, place: ListenAddress) -> None:
    host = choose_address(invite, place)
    with listen(host, place.port, backlog=BACKLOG, setting="--host, --port") as listener:
        port = listener.getsockname()[1]
        own_url = place.announce(host, port, "/v1")
        check_announced(own_url, is_run_on_this_host=is_run_on_this_host(invite))
        async with join_run(invite, name=f"swarmq proxy {invite.host} {invite.run}") as (broker, known):
            engines = await _wait_for_engines(known)
            own = {"host": host, "port": port, **(msgspec.to_builtins(place.tls) if place.tls else {})}
            served = ServedRun(
                job=build_job(known.members, engines=engines, proxy=own),
                broker=broker,
                membership=known,
                pass_on=known.pass_on,
                root=invite.root,
                engine_secret=invite.engine_secret,
            )
            listed = keep_registered(broker, invite.run, "proxy", own_url)
            await _serve(served, listener, number=number_proxy(own_url), url=own_url, listed=listed)


async def _wait_for_engines(known: FollowedMembership, *, check_s: float = CHECK_S) -> Urls:
    """Return the engines of the run once every policy has one that this host can reach."""
    waits_for: dict[str, tuple[str, ...]] = {}
    while lacking := {policy: known.members.engines[policy] for policy, urls in known.urls().items() if not urls}:
        if lacking != waits_for:
            waits_for = lacking
            for policy, urls in lacking.items():
                log.warning(
                    "waiting_for_engine",
                    policy=policy,
                    engines=urls,
                    reason="this host can reach none of them: they are on the loopback of the run's host"
                    if urls
                    else "there is none",
                    action="start one that other hosts reach: `swarmq engine start` with --join, or with --host on the run's host",
                )
        await asyncio.sleep(check_s)
    return known.urls()


async def _serve(
    run: ServedRun,
    listener: socket.socket,
    *,
    number: int,
    url: str,
    listed: AbstractAsyncContextManager[str] | None,
    pages: PagesOpener | None = None,
) -> None:
    """Serve on `listener` until the first signal. `listed`: keeps a joined proxy in the run's list while it is open, and provides
    the listed URL."""
    job = run.job
    async with AsyncExitStack() as stack:
        membership = Membership()
        opener = partial(
            VllmEngine.open, deadline_s=None, secret=run.engine_secret
        )  # calls have a deadline of their own
        engines = {
            name: [await stack.enter_async_context(opener(engine)) for engine in policy.engine.urls]
            for name, policy in job.policies.items()
        }
        tuning = LiveSampling(job)
        episodes = EpisodeCache.of_job(job, number=number, url=url, proxies=run.membership.proxies)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        following = tasks.create_task(run.pass_on([tuning.handle_event, episodes.handle_event]))
        stack.callback(following.cancel)
        watchers = [membership.called, *([stack.enter_context(_exporting(job, number))] if job.proxy.traces else [])]
        opened = await stack.enter_async_context(pages(job)) if pages else None
        app = create_app(
            job,
            root=run.root,
            engines=engines,
            broker=run.broker,
            number=number,
            tuning=tuning,
            episodes=episodes,
            opener=opener,
            watchers=watchers,
            membership=run.membership,
            pages=opened.handlers if opened else (),
        )
        log.info("listening", url=url)
        server = DrainingServer(server_config(app, job.proxy, most_connections=_most_connections(job.proxy)))
        server.pages = opened
        if listed:
            server.membership = membership
            keeping = tasks.create_task(_keep_membership(server, membership, listed))
            stack.callback(keeping.cancel)
        await server.serve(sockets=[listener])


@asynccontextmanager
async def _keep_listed(proxies: ProxyRegistry, url: str) -> AsyncIterator[str]:
    """Keep this proxy in the list of the run folder."""
    proxies.add(url)
    try:
        yield url
    finally:
        proxies.remove(url)


def server_config(
    app: Litestar, proxy: ProxySettings, *, most_connections: int, keep_s: int = KEEP_S
) -> uvicorn.Config:
    """Return uvicorn's configuration for the proxy. `keep_s`: seconds for which a connection stays open without a call."""
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
    process ends with status 0. A server with a membership leaves the run's list at the first signal, and drains once it has no calls."""

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
    server: DrainingServer,
    membership: Membership,
    listed: AbstractAsyncContextManager[str],
    *,
    check_s: float = CHECK_S,
) -> None:
    """Keep this proxy in the run's list until it leaves, then go on serving the episodes that began here. `listed`: keeps it in the
    list while it is open, and provides the listed URL."""
    async with listed as url:
        log.info("joined", url=url)
        await membership.leaving.wait()
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
