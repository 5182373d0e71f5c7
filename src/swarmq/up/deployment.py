"""Starts every part of a run in order, says where each is, and takes all down again.

    broker (private node, or a url) ─┐
    GPUs ─> engines (vLLM) ──────────┼─> resolved.toml ──> proxies, collector, learners
                                     └─> endpoints.json, invite

Ctrl-C reaches this process alone: it stops the learners first (they write a checkpoint),
then collector, proxy and engines, the broker last.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from swarmq import keys, live_settings
from swarmq.broker import Broker, topology
from swarmq.broker.admin.invitations import make_host_invite, renew_clients
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker, initial_connect_timeout_s
from swarmq.broker.node.container import find_container
from swarmq.broker.node.files import ALARM_TEXT, check_disk, render_tls_listener
from swarmq.broker.node.install import find_server
from swarmq.broker.node.process import PrivateNode
from swarmq.broker.run_claim import claim_run
from swarmq.config import Policy, RunFolder, SwarmJob, make_folder, resolve_amqp_url
from swarmq.engine.server.launch import EngineProcess, visible
from swarmq.engine.server.membership import warn_of_open
from swarmq.errors import BrokerError, SwarmqError
from swarmq.learner.memory.estimate import GPU_SHARE
from swarmq.messages import Change, Event
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.files import write_atomically
from swarmq.runtime.logs import log, survive_full_disk
from swarmq.runtime.processes import raise_file_limit, read_tail
from swarmq.up.job_checks import plan_run
from swarmq.up.placement import Placement
from swarmq.up.ports import assign_ports, assign_proxy_ports, proxy_names, wait_for_proxy_ports
from swarmq.up.shutdown import drain_s, read_last_step, stop_daemon
from swarmq.up.supervision import Daemon, DaemonFailedError, keep_broker, keep_engine

PROXY_START_S = 240.0
"""For a proxy to listen on its port."""
OLD_CONSUMERS_S = 240.0
"""For a private RabbitMQ, which nobody else uses, to be rid of the readers of the run's last life; 90 s were seen."""
PROBE_S = 0.1
ALARM_EVERY_S = 5.0


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts of a running run listen; readable by the user alone, because the broker url has a password."""

    amqp_url: str
    management_url: str | None
    management_user: str | None
    management_password: str | None
    proxy: str
    """The first one; ends in `/v1`."""
    proxies: tuple[str, ...]
    engines: dict[str, tuple[str, ...]]
    pids: dict[str, int]


class Deployment:
    """A run whose parts are up."""

    def __init__(
        self,
        job: SwarmJob,
        node: PrivateNode | None,
        invite: keys.Invite,
        *,
        engines: Mapping[str, EngineProcess],
        placements: Mapping[str, Placement],
    ) -> None:
        """`job` with every address filled in. `node` is None for a broker that was named. `engines` are those that were started here,
        by name (`<policy>.<number>`), `placements` by policy."""
        self.job, self.node, self.invite = job, node, invite
        self.engines, self.placements = engines, placements
        self.daemons: dict[str, Daemon] = {}
        self.warnings: list[str] = []
        self.learners_done, self.learning = asyncio.Event(), asyncio.Event()
        """The one is set while every learner has made its last step, the other while some have steps to go."""
        self.learning.set()

    def welcome(self) -> list[str]:
        """How to take part and look on. Without invite and password, since what is printed ends up in logs."""
        folder = shlex.quote(str(self.job.run_folder.path))
        own = f"the host's own, with an operator's rights, is {self.job.run_folder.invite}"
        lines = [
            f"up. On this machine clients join after: export SWARMQ_INVITE={folder}",
            f"for others, `swarmq client add NAME --run {folder}` prints an invite; {own}",
        ]
        if self.node:
            lines.append(f"queues: {self.node.management_url}; `swarmq viewer {folder}` makes a login")
        return [*lines, "Ctrl-C stops everything"]

    def endpoints(self) -> Endpoints:
        assert self.job.broker.url
        pids = {name: d.process.pid for name, d in self.daemons.items() if d.process and d.process.returncode is None}
        return Endpoints(
            amqp_url=self.job.broker.url,
            management_url=self.node.management_url if self.node else None,
            management_user=self.node.user if self.node else None,
            management_password=self.node.password if self.node else None,
            proxy=self.invite.base_url,
            proxies=self.invite.base_urls,
            engines={name: policy.engine.urls for name, policy in self.job.policies.items()},
            pids=pids,
        )

    def write_endpoints(self) -> None:
        """Now, and whenever a part has another process id."""
        text = msgspec.json.format(msgspec.json.encode(self.endpoints()), indent=2)
        with contextlib.suppress(OSError):  # a full disk, of which others tell: the run goes on
            write_atomically(self.job.run_folder.endpoints, text)


@contextlib.asynccontextmanager
async def deploy(job: SwarmJob, *, report: Callable[[str], None]) -> AsyncIterator[Deployment]:
    """Bring a run up, keep it up while the context is open, take it down.

    `report` gets a line for each stage. Raises SwarmqError when a part cannot start, naming it.
    """
    raise_file_limit()
    survive_full_disk()
    given, (job, placements) = job, plan_run(job, report)
    folder = job.run_folder
    make_folder(folder.path)
    folder.path.chmod(0o700)  # prompts and completions are in it
    with _lock_run_folder(folder.lock, job.run):
        async with contextlib.AsyncExitStack() as stack:
            await wait_for_proxy_ports(job)
            node, url = await _open_broker(job, stack, report)
            broker = await stack.enter_async_context(
                AmqpBroker.open(url, name=f"up {job.run}", deadline_s=None if node else initial_connect_timeout_s())
            )
            await stack.enter_async_context(claim_run(url, job.run))
            await check_run_is_down(broker, job.run, forget_s=OLD_CONSUMERS_S if node else 0.0, report=report)
            engines = await _start_engines(job, placements, stack, report)
            proxies = assign_proxy_ports(job, engines)
            resolved = _resolve_job(job, url, engines, proxies, placements)
            invite = make_host_invite(resolved, tuple(map(job.proxy.url, proxies.values())))
            deployment = Deployment(resolved, node, invite, engines=engines, placements=placements)
            _write_run_files(given, deployment)
            await broker.declare(job.run, policies=job.trained, kinds=job.task_kinds)
            await asyncio.to_thread(_renew_clients, folder, url, node, report)
            await _start_daemons(deployment, proxies, stack, report)
            write_atomically(folder.invite, deployment.invite.encode().encode() + b"\n")
            deployment.write_endpoints()
            async with _supervise(deployment, broker, report):
                yield deployment


def _write_run_files(job: SwarmJob, deployment: Deployment) -> None:
    """What the parts read when they start."""
    folder, resolved = job.run_folder, deployment.job
    EngineRegistry(resolved).forget()  # engines that were added to an earlier start
    ProxyRegistry(folder.proxies).write(deployment.invite.base_urls)
    write_atomically(folder.job, job.to_toml().encode())
    write_atomically(folder.resolved, resolved.to_toml().encode())


@contextlib.asynccontextmanager
async def _supervise(deployment: Deployment, broker: AmqpBroker, report: Callable[[str], None]) -> AsyncIterator[None]:
    """While the context is open parts that die are started again, and people are told; one that cannot be ends the context."""
    warnings: asyncio.Queue[str] = asyncio.Queue()

    def warn(text: str) -> None:
        deployment.warnings.append(text)
        report(f"warning: {text}")
        warnings.put_nowait(text)

    node, daemons = deployment.node, deployment.daemons.values()
    async with asyncio.TaskGroup() as tasks:
        watchers = [
            tasks.create_task(_emit_warnings(warnings, broker, deployment.job.run)),
            tasks.create_task(report_alarms(broker, report)),
            tasks.create_task(keep_learners(deployment, broker, warn)),
            *(tasks.create_task(daemon.keep_running(warn)) for daemon in daemons if not daemon.is_learner),
            *(tasks.create_task(keep_engine(name, e, warn)) for name, e in deployment.engines.items()),
            *([tasks.create_task(keep_broker(node, warn))] if node else []),
        ]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()


def _renew_clients(folder: RunFolder, url: str, node: PrivateNode | None, report: Callable[[str], None]) -> None:
    """Clients that an older version invited lose what clients may no longer do; without this their messages are refused later."""
    login = f"http://{node.user}:{node.password}@{urlsplit(node.management_url).netloc}" if node else None
    try:
        renew_clients(folder, ManagementApi.of(url, login or os.environ.get("SWARMQ_MANAGEMENT_URL")))
    except BrokerError as error:
        report(f"warning: the rights of invited clients in RabbitMQ were not renewed: {error}")


async def check_run_is_down(
    broker: Broker, run: str, *, forget_s: float = 0.0, report: Callable[[str], None], look_s: float = 1.0
) -> None:
    """Raises SwarmqError when parts of a run of this name are up on the broker already, started by hand: their queues
    would be the same.

    `forget_s`: how long readers of before may take to go. A broker that was killed together with its clients may recover them with
    its queues, and find out that they are gone after a minute and a half; and parts that lost `up` stop in order.
    """
    inbox, until, told = topology.inbox(run), time.monotonic() + forget_s, False
    while (depth := (await broker.depths([inbox])).get(inbox)) and depth.consumers:
        if time.monotonic() >= until:
            raise SwarmqError(
                f"run {run!r} is up on this broker already: somebody reads {inbox}. Choose another name, or stop that run "
                "(one that has just died is forgotten within two minutes)"
            )
        if not told:
            report(f"broker: waiting until nobody from before reads {inbox} any more (up to {forget_s:.0f} s)")
        told = True
        await asyncio.sleep(look_s)


async def keep_learners(deployment: Deployment, broker: Broker, warn: Callable[[str], None]) -> None:
    """Keep them running until each has made its last step, and start those again that are given further steps."""
    learners = [daemon for daemon in deployment.daemons.values() if daemon.is_learner]
    ended: set[str] = set()

    async def keep(daemon: Daemon) -> None:
        while True:
            await daemon.keep_running(warn)
            ended.add(daemon.name)
            if len(ended) == len(learners):
                deployment.learning.clear()
                deployment.learners_done.set()
            await _wait_for_more_steps(deployment.job, daemon.name.partition(".")[2], broker)
            await daemon.start()
            ended.remove(daemon.name)
            deployment.learners_done.clear()
            deployment.learning.set()

    async with asyncio.TaskGroup() as tasks:
        for daemon in learners:
            tasks.create_task(keep(daemon))


async def _wait_for_more_steps(job: SwarmJob, policy: str, broker: Broker) -> None:
    """Return when the collector says that a policy which had made its last step has another one to make."""
    made = await asyncio.to_thread(read_last_step, job, policy)
    try:
        async with broker.events(job.run) as events:
            async for event in events:
                if event.source == "collector" and event.name == "state" and "changes" in event.fields:
                    changes = msgspec.convert(event.fields["changes"], list[Change])
                    if not live_settings.has_ended(live_settings.apply_changes(job, changes), policy, made):
                        return
    except BrokerError as error:
        log.warning("further_steps_not_heard_of", policy=policy, error=str(error))
    await asyncio.Event().wait()  # the run is as good as before, but a learner of further steps takes a new start


async def _open_broker(
    job: SwarmJob, stack: contextlib.AsyncExitStack, report: Callable[[str], None]
) -> tuple[PrivateNode | None, str]:
    if url := resolve_amqp_url(job.broker):
        report("broker: the one you named")
        return None, url
    if find_server() is None and (container := await asyncio.to_thread(find_container)):
        report(f"broker: {container.place}")
        return None, container.amqp_url
    check_disk(job.run_folder.path)
    report("broker: starting a private RabbitMQ")
    node = await stack.enter_async_context(
        PrivateNode(job.run_folder.broker, port=job.broker.port, config=render_tls_listener(job.broker))
    )
    report(f"broker: ready, management UI at {node.management_url}")
    return node, node.amqp_url


async def _start_engines(
    job: SwarmJob, placements: Mapping[str, Placement], stack: contextlib.AsyncExitStack, report: Callable[[str], None]
) -> dict[str, EngineProcess]:
    """Start all engines side by side; name -> process."""
    wanted: dict[str, tuple[Policy, tuple[int, ...] | None]] = {}
    for name, policy in job.policies.items():
        if policy.engine.urls:
            report(f"engine {name}: the ones you named")
            for line in await warn_of_open(policy.engine.urls, EngineRegistry(job).secret()):
                report(f"warning: {line}")
        elif name in placements:
            own, gpus = placements[name].apply_to_engines(policy)
            wanted |= {f"{name}.{index}": (own, group) for index, group in enumerate(gpus)}
        else:
            wanted |= {f"{name}.{index}": (policy, None) for index in range(policy.engine.count)}
    ports = assign_ports(job, [*wanted, *proxy_names(job)])
    engines = {
        name: EngineProcess(
            policy,
            port=ports[name],
            log_path=job.run_folder.logs / f"engine.{name}.log",
            secret=EngineRegistry(job).secret(),
            progress=partial(_report_engine_stage, report, name),
            gpus=gpus,
        )
        for name, (policy, gpus) in wanted.items()
    }
    async with asyncio.TaskGroup() as tasks:
        for name, engine in engines.items():
            report(f"engine {name}: loading {wanted[name][0].model}")
            tasks.create_task(stack.enter_async_context(engine))
    for name in engines:
        report(f"engine {name}: serving")
    return engines


def _report_engine_stage(report: Callable[[str], None], name: str, stage: str) -> None:
    report(f"engine {name}: {stage}")


async def _start_daemons(
    deployment: Deployment,
    proxies: dict[str, int],
    stack: contextlib.AsyncExitStack,
    report: Callable[[str], None],
) -> None:
    """Start proxies, collector and learners; return when the proxies serve. `stack` stops them, the learners first."""
    job, folder = deployment.job, deployment.job.run_folder
    resolved = str(folder.resolved)

    def daemon(name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Daemon:
        argv = [sys.executable, "-m", "swarmq", *arguments]
        return Daemon(name, argv, folder.logs / f"{name}.log", {BROKER_ANSWERED_ENV: "1", **(environment or {})})

    daemons = [
        *(
            daemon(name, ["proxy", resolved, "--port", str(port), "--number", str(number)])
            for number, (name, port) in enumerate(proxies.items())
        ),
        daemon("collector", ["collector", resolved]),
        *(
            daemon(f"learner.{name}", *_learner_command(resolved, name, deployment.placements.get(name)))
            for name in job.trained
        ),
    ]
    for each in daemons:
        report(f"{each.name}: starting")
        grace_s = drain_s(job, each.name)
        await each.start()
        stack.push_async_callback(stop_daemon, each, grace_s, report)
        deployment.daemons[each.name] = each
        each.restarted = deployment.write_endpoints
    for name, port in proxies.items():
        await _wait_until_serving(deployment.daemons[name], job.proxy.host, port)
        report(f"{name}: serving")


def _learner_command(resolved: str, policy: str, placement: Placement | None) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a policy's learner, on the GPUs that it is placed on."""
    arguments = ["learner", resolved, "--policy", policy, "--no-collector"]
    if placement is None:
        return arguments, {}
    ranks = ["--num-gpus", str(len(placement.learner))] if len(placement.learner) > 1 else []
    return [*arguments, *ranks], visible(placement.learner) | {GPU_SHARE: str(placement.learner_share)}


async def _wait_until_serving(daemon: Daemon, host: str, port: int) -> None:
    """Return when somebody listens on the port. Raises DaemonFailedError when the daemon ends first, or takes long."""
    assert daemon.process is not None
    try:
        async with asyncio.timeout(PROXY_START_S):
            while daemon.process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    return
                await asyncio.sleep(PROBE_S)
    except TimeoutError:
        pass
    raise DaemonFailedError(
        f"{daemon.name} does not serve; the end of {daemon.log_path}:\n{read_tail(daemon.log_path)}"
    )


async def _emit_warnings(warnings: asyncio.Queue[str], broker: AmqpBroker, run: str) -> None:
    while True:
        text = await warnings.get()
        await broker.emit(Event(run=run, source="up", name="warning", at=time.time(), fields={"text": text}))


async def report_alarms(broker: Broker, report: Callable[[str], None], *, every_s: float = ALARM_EVERY_S) -> None:
    """Say when the broker begins to hold up publishers, and when that is over: nobody can tell it by an event meanwhile."""
    before = False
    while True:
        if (blocked := await broker.is_blocked()) != before:
            report(ALARM_TEXT if blocked else "RabbitMQ takes messages again")
        before = blocked
        await asyncio.sleep(every_s)


def _resolve_job(
    job: SwarmJob,
    url: str,
    engines: dict[str, EngineProcess],
    proxies: dict[str, int],
    placements: Mapping[str, Placement],
) -> SwarmJob:
    """The job with every address filled in, as the daemons read it."""
    urls = {name: tuple(e.url for key, e in engines.items() if key.rpartition(".")[0] == name) for name in job.policies}
    planned = {
        name: placements[name].apply_to_policy(policy) if name in placements else policy
        for name, policy in job.policies.items()
    }
    return msgspec.structs.replace(
        job,
        folder=str(Path(job.folder).resolve()),
        broker=msgspec.structs.replace(job.broker, url=url),
        proxy=msgspec.structs.replace(job.proxy, port=proxies["proxy"]),
        policies={
            name: msgspec.structs.replace(
                policy, engine=msgspec.structs.replace(policy.engine, urls=urls[name] or policy.engine.urls)
            )
            for name, policy in planned.items()
        },
    )


@contextlib.contextmanager
def _lock_run_folder(path: Path, run: str) -> Iterator[None]:
    """Hold the run folder; a second `up` on it is refused with the holder's pid."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise SwarmqError(
                f"run {run!r} is already up, started by process {lock.read().strip()}: stop that one, "
                "or choose another name with --set run=NAME"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
