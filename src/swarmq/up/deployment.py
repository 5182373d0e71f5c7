"""Start of every process of a run, in order and with its address, and the stop of all.

    broker (private node, or a url) ─┐
    GPUs ─> engines (vLLM) ──────────┼─> resolved.toml ──> proxies, collector, learners
                                     └─> endpoints.json, invite

Only this process receives Ctrl-C. It stops the learners first (they write a checkpoint), then collector, proxy and engines,
and the broker last.
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
from typing import Any
from urllib.parse import urlsplit

import msgspec

from swarmq import keys, live_settings
from swarmq.broker import Broker, declare_run, topology
from swarmq.broker.admin.invitations import make_host_invite, renew_rights
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker, initial_connect_timeout_s
from swarmq.broker.node.cluster import PrivateCluster
from swarmq.broker.node.container import find_container
from swarmq.broker.node.files import ALARM_TEXT, check_disk
from swarmq.broker.node.install import find_server
from swarmq.broker.node.process import PrivateNode
from swarmq.broker.run_claim import claim_run
from swarmq.config import Policy, RunFolder, SwarmJob, make_folder, resolve_amqp_url
from swarmq.engine.client.identity import check_routing_replay, identify_all
from swarmq.engine.server.launch import EngineProcess, build_gpu_environment
from swarmq.engine.server.membership import find_unprotected_engines
from swarmq.errors import BrokerError, SwarmqError
from swarmq.learner.memory.estimate import GPU_SHARE_ENV
from swarmq.messages import Change, Event
from swarmq.registries.engines import EngineRegistry
from swarmq.registries.proxies import ProxyRegistry
from swarmq.runtime.files import write_atomically
from swarmq.runtime.logs import log, survive_full_disk
from swarmq.runtime.processes import raise_file_limit, read_tail
from swarmq.up.job_checks import plan_run
from swarmq.up.placement import Placement
from swarmq.up.ports import (
    assign_metrics_ports,
    assign_ports,
    assign_proxy_ports,
    metrics_names,
    proxy_names,
    wait_for_proxy_ports,
)
from swarmq.up.shutdown import drain_s, read_last_step, stop_daemon
from swarmq.up.supervision import Daemon, DaemonFailedError, keep_broker, keep_engine

PROXY_START_S = 240.0
"""Maximum seconds that a proxy may take to listen on its port."""
OLD_CONSUMERS_S = 240.0
"""Maximum seconds to wait until the consumers of the run's previous start are gone from a private RabbitMQ; 90 s were
observed."""
PROBE_S = 0.1
ALARM_EVERY_S = 5.0


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and process ids of a running run; only the user may read them, because the broker URL contains a password."""

    amqp_url: str
    management_url: str | None
    management_user: str | None
    management_password: str | None
    proxy: str
    """URL of the first proxy; ends in `/v1`."""
    proxies: tuple[str, ...]
    engines: dict[str, tuple[str, ...]]
    pids: dict[str, int]
    metrics: dict[str, str]
    """Process -> URL of its metrics for Prometheus; a proxy's need an operator token."""


class Deployment:
    """A run that is up, with its processes."""

    def __init__(
        self,
        job: SwarmJob,
        node: PrivateCluster | None,
        invite: keys.Invite,
        *,
        engines: Mapping[str, EngineProcess],
        placements: Mapping[str, Placement],
    ) -> None:
        """`job` has every address resolved. `node` is None if the settings name a broker. `engines` are the engines started
        here, by name (`<policy>.<number>`); `placements` are by policy."""
        self.job, self.node, self.invite = job, node, invite
        self.engines, self.placements = engines, placements
        self.daemons: dict[str, Daemon] = {}
        self.warnings: list[str] = []
        self.learners_done, self.learning = asyncio.Event(), asyncio.Event()
        """`learners_done` is set while every learner has made its last step, `learning` while some have steps to make."""
        self.learning.set()

    def welcome(self) -> list[str]:
        """Return lines on how to join and watch the run, without invite and password, since output ends up in logs."""
        folder = shlex.quote(str(self.job.run_folder.path))
        host_invite = f"the host's own invite, with operator rights, is {self.job.run_folder.invite}"
        lines = [
            f"up. To join from this machine: export SWARMQ_INVITE={folder}",
            f"for other machines, `swarmq client add NAME --run {folder}` prints an invite; {host_invite}",
        ]
        if self.node:
            lines.append(f"queues: {self.node.identity.management_url}; `swarmq viewer {folder}` prints a login")
        lines.append(
            f"dashboard: {self.invite.base_url.removesuffix('/v1')}/dashboard; `swarmq token {folder} --role read` prints a token to log "
            f"in with. `swarmq dashboard {folder}` serves the same without a token of the run"
        )
        metrics = ", ".join(f"{url} ({name})" for name, url in self.metrics_urls().items())
        lines.append(f"metrics for Prometheus: {metrics}; all of them are in {self.job.run_folder.prometheus_targets}")
        return [*lines, "Ctrl-C stops everything"]

    def endpoints(self) -> Endpoints:
        assert self.job.broker.url
        pids = {name: d.process.pid for name, d in self.daemons.items() if d.process and d.process.returncode is None}
        return Endpoints(
            amqp_url=self.job.broker.url,
            management_url=self.node.identity.management_url if self.node else None,
            management_user=self.node.identity.user if self.node else None,
            management_password=self.node.identity.password if self.node else None,
            proxy=self.invite.base_url,
            proxies=self.invite.base_urls,
            engines={name: policy.engine.urls for name, policy in self.job.policies.items()},
            pids=pids,
            metrics=self.metrics_urls(),
        )

    def metrics_urls(self) -> dict[str, str]:
        """Return name of a process -> URL of its metrics."""
        settings, proxies = self.job.metrics, self.invite.base_urls
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        own = {"collector": settings.collector_port}
        own |= {f"learner.{policy}": port for policy, port in settings.learner_ports.items()}
        return {
            **{name: f"http://{host}:{port}/metrics" for name, port in own.items()},
            **{f"proxy.{number}": f"{url.removesuffix('/v1')}/metrics" for number, url in enumerate(proxies)},
        }

    def prometheus_targets(self) -> list[dict[str, Any]]:
        """Return the metrics pages in the form of Prometheus's `file_sd_configs`."""
        return [
            {
                "targets": [urlsplit(url).netloc],
                "labels": {"run": self.job.run, "process": name, "__scheme__": urlsplit(url).scheme},
            }
            for name, url in self.metrics_urls().items()
        ]

    def broker_nodes(self) -> dict[str, PrivateNode]:
        """Return name -> node of the private RabbitMQ; the names are for messages."""
        nodes = self.node.nodes if self.node else []
        return {
            f"broker node {number}" if len(nodes) > 1 else "the broker": node for number, node in enumerate(nodes, 1)
        }

    def write_endpoints(self) -> None:
        """Write `endpoints.json`; called again whenever a process id changes."""
        text = msgspec.json.format(msgspec.json.encode(self.endpoints()), indent=2)
        with contextlib.suppress(OSError):  # a full disk, which other processes report; the run continues
            write_atomically(self.job.run_folder.endpoints, text)
            targets = msgspec.json.encode(self.prometheus_targets())
            write_atomically(self.job.run_folder.prometheus_targets, targets)


@contextlib.asynccontextmanager
async def deploy(job: SwarmJob, *, report: Callable[[str], None]) -> AsyncIterator[Deployment]:
    """Bring a run up, keep it up while the context is open, and take it down.

    `report` gets a line for each stage. Raises SwarmqError naming the process that cannot start.
    """
    raise_file_limit()
    survive_full_disk()
    requested, (job, placements) = job, plan_run(job, report)
    folder = job.run_folder
    with _lock_run_folder(folder, job.run):
        async with contextlib.AsyncExitStack() as stack:
            await wait_for_proxy_ports(job)
            found = await _find_broker(job, report)
            engines = _plan_engines(job, placements, report)
            proxies = assign_proxy_ports(job, engines)
            metrics = assign_metrics_ports(job, engines)
            # engines take longest, so the broker starts beside them; it is stopped after them
            broker_end, engines_end = [await stack.enter_async_context(contextlib.AsyncExitStack()) for _ in range(2)]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_start_engines(job, engines, engines_end, report))
                node, url, broker = await _claim_broker(job, found, broker_end, report)
            resolved = _resolve_job(msgspec.structs.replace(job, metrics=metrics), url, engines, proxies, placements)
            invite = make_host_invite(resolved, tuple(map(job.proxy.url, proxies.values())))
            deployment = Deployment(resolved, node, invite, engines=engines, placements=placements)
            _write_run_files(requested, deployment)
            await declare_run(broker, job)
            await asyncio.to_thread(_renew_rights, folder, url, node, report)
            await _start_daemons(deployment, proxies, stack, report)
            write_atomically(folder.invite, deployment.invite.encode().encode() + b"\n")
            deployment.write_endpoints()
            async with _supervise(deployment, broker, report):
                yield deployment


def _write_run_files(job: SwarmJob, deployment: Deployment) -> None:
    """Write the files that the daemons read when they start."""
    folder, resolved = job.run_folder, deployment.job
    EngineRegistry(resolved).forget()  # drop engines that were added to an earlier start
    ProxyRegistry(folder.proxies).write(deployment.invite.base_urls)
    write_atomically(folder.job, _with_whole_paths(job).to_toml().encode())
    write_atomically(folder.resolved, resolved.to_toml().encode())


def _with_whole_paths(job: SwarmJob) -> SwarmJob:
    """Return the job with the whole path of each of its files and model folders, so that the file in the run folder can be started
    from anywhere."""
    found = {path: str(Path(named).absolute()) for path, named in job.list_files() if Path(named).exists()}
    return live_settings.change_job(job, found)


@contextlib.asynccontextmanager
async def _supervise(deployment: Deployment, broker: AmqpBroker, report: Callable[[str], None]) -> AsyncIterator[None]:
    """Restart processes that die, and publish warnings, while the context is open. A process that cannot be restarted ends
    the context."""
    warnings: asyncio.Queue[str] = asyncio.Queue()

    def warn(text: str) -> None:
        deployment.warnings.append(text)
        report(f"warning: {text}")
        warnings.put_nowait(text)

    daemons = deployment.daemons.values()
    async with asyncio.TaskGroup() as tasks:
        watchers = [
            tasks.create_task(_emit_warnings(warnings, broker, deployment.job.run)),
            tasks.create_task(report_alarms(broker, report)),
            tasks.create_task(keep_learners(deployment, broker, warn)),
            *(tasks.create_task(daemon.keep_running(warn)) for daemon in daemons if not daemon.is_learner),
            *(tasks.create_task(keep_engine(name, e, warn)) for name, e in deployment.engines.items()),
            *(
                tasks.create_task(keep_broker(node, warn, name=name))
                for name, node in deployment.broker_nodes().items()
            ),
        ]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()


def _renew_rights(folder: RunFolder, url: str, node: PrivateCluster | None, report: Callable[[str], None]) -> None:
    """Update the RabbitMQ rights of clients and hosts that an older version invited; with outdated rights their messages would be
    refused later."""
    try:
        renew_rights(
            folder, ManagementApi.of(url, node.management_login if node else os.environ.get("SWARMQ_MANAGEMENT_URL"))
        )
    except BrokerError as error:
        report(f"warning: the rights of invited clients and hosts in RabbitMQ were not renewed: {error}")


async def check_run_is_down(
    broker: Broker,
    run: str,
    *,
    trained_beside_standby: Sequence[str] = (),
    forget_s: float = 0.0,
    report: Callable[[str], None],
    check_s: float = 1.0,
) -> None:
    """Raise SwarmqError if processes of a run with this name, started without `swarmq up`, use the broker: both runs would share
    their queues.

    `trained_beside_standby`: the trained policies of a run with standbys. One of these may lead, because the collector of this start
    takes over from it, so learners are looked for instead. `forget_s`: seconds that consumers of the run's previous start may
    take to disappear. A broker that was killed together with its clients may restore their consumers with its queues, and notice
    after 90 s that they are gone. Processes that lost their `swarmq up` first finish their work.
    """
    queues, until, is_reported = [topology.inbox(run)], time.monotonic() + forget_s, False
    if trained_beside_standby and await broker.depths([topology.log(run)]):
        queues = [topology.ready(run, policy) for policy in trained_beside_standby]
    while used := [queue for queue, depth in (await broker.depths(queues)).items() if depth.consumers]:
        if time.monotonic() >= until:
            raise SwarmqError(
                f"run {run!r} is already up on this broker: {used[0]} has a consumer. Choose another name, or stop the other run "
                "(a run that has just died disappears from the broker within two minutes)"
            )
        if not is_reported:
            report(f"broker: waiting for consumers of the previous start to leave {used[0]} (up to {forget_s:.0f} s)")
        is_reported = True
        await asyncio.sleep(check_s)


async def keep_learners(deployment: Deployment, broker: Broker, warn: Callable[[str], None]) -> None:
    """Keep the learners running until each has made its last step, and start a learner again when its policy gets more steps."""
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
    """Wait until the collector reports that a policy which had made its last step has more steps to make."""
    last_step = await asyncio.to_thread(read_last_step, job, policy)
    try:
        async with broker.events(job.run) as events:
            async for event in events:
                if event.source == "collector" and event.name == "state" and "changes" in event.fields:
                    changes = msgspec.convert(event.fields["changes"], list[Change])
                    if not live_settings.has_ended(live_settings.apply_changes(job, changes), policy, last_step):
                        return
    except BrokerError as error:
        log.warning("further_steps_unknown", policy=policy, reason=str(error))
    await asyncio.Event().wait()  # the run continues, but a learner with more steps needs a restart of `swarmq up`


async def _find_broker(job: SwarmJob, report: Callable[[str], None]) -> str | None:
    """Return the URL of a broker that runs; None if a private one is to be started, for which the disk has room."""
    if url := resolve_amqp_url(job.broker):
        report("broker: as configured (broker.url)")
        return url
    if job.broker.nodes == 1 and find_server() is None and (container := await asyncio.to_thread(find_container)):
        report(f"broker: {container.place}")
        return container.amqp_url
    check_disk(job.run_folder.path)
    return None


async def _claim_broker(
    job: SwarmJob, url: str | None, stack: contextlib.AsyncExitStack, report: Callable[[str], None]
) -> tuple[PrivateCluster | None, str, AmqpBroker]:
    """Open the broker at the URL, or else a private one, for this run alone; return its node and URL, too. Raises SwarmqError if the run is up elsewhere."""
    node = None
    if url is None:
        report(f"broker: starting a private RabbitMQ{f' of {job.broker.nodes} nodes' if job.broker.nodes > 1 else ''}")
        node = await stack.enter_async_context(PrivateCluster(job.run_folder.broker, job.broker))
        report(f"broker: ready, management UI at {node.identity.management_url}")
        url = node.amqp_url
    broker = await stack.enter_async_context(
        AmqpBroker.open(url, name=f"up {job.run}", deadline_s=None if node else initial_connect_timeout_s())
    )
    await stack.enter_async_context(claim_run(url, job.run))
    await check_run_is_down(
        broker,
        job.run,
        trained_beside_standby=tuple(job.trained) if job.collector.standby else (),
        forget_s=OLD_CONSUMERS_S if node else 0.0,
        report=report,
    )
    return node, url, broker


def _plan_engines(
    job: SwarmJob, placements: Mapping[str, Placement], report: Callable[[str], None]
) -> dict[str, EngineProcess]:
    """Return the engines to start, by name, with their ports."""
    planned: dict[str, tuple[Policy, tuple[int, ...] | None]] = {}
    for name, policy in job.policies.items():
        if policy.engine.urls:
            continue
        if name in placements:
            engine_policy, gpus = placements[name].apply_to_engines(policy)
            planned |= {f"{name}.{index}": (engine_policy, group) for index, group in enumerate(gpus)}
        else:
            planned |= {f"{name}.{index}": (policy, None) for index in range(policy.engine.count)}
    ports = assign_ports(job, [*planned, *proxy_names(job), *metrics_names(job)])
    return {
        name: EngineProcess(
            policy,
            port=ports[name],
            log_path=job.run_folder.logs / f"engine.{name}.log",
            secret=EngineRegistry(job).secret(),
            progress=partial(_report_engine_stage, report, name),
            gpus=gpus,
        )
        for name, (policy, gpus) in planned.items()
    }


async def _start_engines(
    job: SwarmJob,
    engines: Mapping[str, EngineProcess],
    stack: contextlib.AsyncExitStack,
    report: Callable[[str], None],
) -> None:
    """Start all engines concurrently."""
    async with asyncio.TaskGroup() as tasks:
        for name, engine in engines.items():
            report(f"engine {name}: loading {job.policies[name.rpartition('.')[0]].model}")
            tasks.create_task(stack.enter_async_context(engine))
        for name, policy in job.policies.items():
            if policy.engine.urls:
                report(f"engine {name}: the configured URLs")
                for line in await find_unprotected_engines(policy.engine.urls, EngineRegistry(job).secret()):
                    report(f"warning: {line}")
                if policy.replays_routing:
                    identities = await identify_all(policy.engine.urls, secret=EngineRegistry(job).secret())
                    for url, identity in identities.items():
                        check_routing_replay(url, identity)
    for name in engines:
        report(f"engine {name}: serving")


def _report_engine_stage(report: Callable[[str], None], name: str, stage: str) -> None:
    report(f"engine {name}: {stage}")


async def _start_daemons(
    deployment: Deployment,
    proxies: dict[str, int],
    stack: contextlib.AsyncExitStack,
    report: Callable[[str], None],
) -> None:
    """Start proxies, collector and learners, and return when the proxies serve. `stack` stops the daemons, the learners first."""
    job, folder = deployment.job, deployment.job.run_folder
    resolved = str(folder.resolved)

    def daemon(
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> Daemon:
        argv = [*(launcher or [sys.executable]), "-m", "swarmq", *arguments]
        return Daemon(name, argv, folder.logs / f"{name}.log", {BROKER_ANSWERED_ENV: "1", **(environment or {})})

    daemons = [
        *(
            daemon(name, ["proxy", resolved, "--port", str(port), "--number", str(number)])
            for number, (name, port) in enumerate(proxies.items())
        ),
        daemon("collector", ["collector", resolved, *(["--take-over"] if job.collector.standby else [])]),
        *(
            daemon(
                f"learner.{name}",
                *_learner_command(resolved, name, deployment.placements.get(name)),
                job.policies[name].train.launcher,
            )
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
    """Return the arguments and the environment of a policy's learner, for the GPUs of its placement."""
    arguments = ["learner", resolved, "--policy", policy, "--no-collector"]
    if placement is None:
        return arguments, {}
    ranks = ["--num-gpus", str(len(placement.learner))] if len(placement.learner) > 1 else []
    return [*arguments, *ranks], build_gpu_environment(placement.learner) | {
        GPU_SHARE_ENV: str(placement.learner_share)
    }


async def _wait_until_serving(daemon: Daemon, host: str, port: int) -> None:
    """Wait until the daemon listens on the port. Raises DaemonFailedError if it ends first or takes longer than
    `PROXY_START_S`."""
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
        f"{daemon.name} does not listen on {host}:{port}; the end of {daemon.log_path}:\n{read_tail(daemon.log_path)}"
    )


async def _emit_warnings(warnings: asyncio.Queue[str], broker: AmqpBroker, run: str) -> None:
    while True:
        text = await warnings.get()
        await broker.emit(Event(run=run, source="up", name="warning", at=time.time(), fields={"text": text}))


async def report_alarms(broker: Broker, report: Callable[[str], None], *, every_s: float = ALARM_EVERY_S) -> None:
    """Report when the broker starts and stops blocking publishers; a blocked broker accepts no events about it."""
    before = False
    while True:
        if (blocked := await broker.is_blocked()) != before:
            report(ALARM_TEXT if blocked else "RabbitMQ accepts messages again")
        before = blocked
        await asyncio.sleep(every_s)


def _resolve_job(
    job: SwarmJob,
    url: str,
    engines: dict[str, EngineProcess],
    proxies: dict[str, int],
    placements: Mapping[str, Placement],
) -> SwarmJob:
    """Return the job with every address filled in, as the daemons read it."""
    urls = {name: tuple(e.url for key, e in engines.items() if key.rpartition(".")[0] == name) for name in job.policies}
    policies = {
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
            for name, policy in policies.items()
        },
    )


@contextlib.contextmanager
def _lock_run_folder(folder: RunFolder, run: str) -> Iterator[None]:
    """Make the run folder and lock it. If nothing else is in it at the end, as after a refused start, remove the folders that
    were made. Raises SwarmqError with the holder's process id if another `swarmq up` holds the lock."""
    path = folder.lock
    made = [each for each in (folder.path, *folder.path.parents) if not each.exists()]
    make_folder(folder.path)
    folder.path.chmod(0o700)  # the folder contains prompts and completions
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                # the holder removed the folder since the file was opened, and another start made it
                raise FileExistsError(path)
        except OSError as error:
            lock.seek(0)
            raise SwarmqError(
                f"run {run!r} is already up, started by process {lock.read().strip()}: stop it, "
                "or choose another name with --set run=NAME"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # what cannot be removed does no harm
                if list(folder.path.iterdir()) == [path]:
                    path.unlink()
                    for each in made:
                        each.rmdir()  # fails for a folder in which something else is by now
