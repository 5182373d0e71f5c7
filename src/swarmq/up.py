"""One host, one command: start every part of a run, keep each running, stop them in order.

    broker (private node, or a url) ─┐
    GPUs ─> engines (vLLM) ──────────┼─> resolved.toml ──> proxies, collector, learners
                                     └─> endpoints.json, invite

A part that dies is started again on the same port, later each time; one that keeps dying ends the whole run with
the last lines of its log. Ctrl-C reaches this process alone: it stops the learners first (they write a checkpoint),
then collector, proxy and engines, the broker last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from swarmq import keys
from swarmq.broker import Broker, topology
from swarmq.broker.amqp import ANSWERED, AmqpBroker, first_wait_s
from swarmq.broker.claim import claimed
from swarmq.broker.container import find_container
from swarmq.broker.install import find_server
from swarmq.broker.node import PrivateNode
from swarmq.broker.node_files import tls_listener
from swarmq.client.invitations import host_invite
from swarmq.config import Policy, SwarmJob, amqp_url, make_folder
from swarmq.engine.gpus import Gpu, visible_gpus
from swarmq.engine.launch import EngineProcess, check_arguments, check_model, is_cuda_build, visible
from swarmq.engine.model import Model, size_of
from swarmq.engine.roster import Roster
from swarmq.errors import ConfigError, SwarmqError
from swarmq.learner.memory import GPU_SHARE, MOMENTS_BYTES, WHOLE_BYTES, judges
from swarmq.logs import log, survive_full_disk
from swarmq.messages import Event
from swarmq.open_files import raise_file_limit
from swarmq.placement import Placement, place_all
from swarmq.process import die_with_parent, held_port, last_words, port_is_free, stop_group, tail
from swarmq.proxies import Proxies

MAX_DEATHS = 5
DEATH_WINDOW_S = 120.0
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
DRAIN_S = {"learner": 60.0, "collector": 30.0, "proxy": 15.0}
"""Beside a learner's checkpoints."""
SLOW_DISK_BYTES_PER_S = 100e6
MOST_DRAIN_S = 1800.0
SERVE_S = 240.0
PROBE_S = 0.1
PORT_S = 5.0
"""A proxy whose run was killed has given its port back by then."""


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


class DaemonFailedError(SwarmqError):
    """A part of the run could not be kept running."""


@dataclasses.dataclass
class Daemon:
    """A process of ours that is to be running, and the history of its deaths."""

    name: str
    argv: list[str]
    log_path: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Beside ours."""
    process: asyncio.subprocess.Process | None = None
    deaths: list[float] = dataclasses.field(default_factory=list)
    finished: bool = False
    begins_at: int = 0
    """Bytes of the log that earlier starts wrote."""

    async def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as sink:
            self.begins_at = os.fstat(sink.fileno()).st_size
            self.process = await asyncio.create_subprocess_exec(
                *self.argv,
                env=os.environ | self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                preexec_fn=die_with_parent,
            )

    async def keep_running(self, warn: Callable[[str], None]) -> None:
        """Return when the process ends with status 0; start it again when it dies. Raises DaemonFailedError when it keeps dying, or
        says that to start it again is of no use."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            if status == 0:
                self.finished = True
                return
            why = last_words(self.log_path, self.begins_at)
            if status == os.EX_CONFIG:
                raise DaemonFailedError(f"{self.name}: {why or tail(self.log_path)}")
            now = time.monotonic()
            self.deaths = [at for at in self.deaths if at > now - DEATH_WINDOW_S] + [now]
            if len(self.deaths) >= MAX_DEATHS:
                raise DaemonFailedError(
                    f"{self.name} died {MAX_DEATHS} times within {DEATH_WINDOW_S:.0f} s (status {status}); "
                    f"the end of {self.log_path}:\n{tail(self.log_path)}"
                )
            delay_s = BACKOFF_S[len(self.deaths) - 1]
            said = f" ({why})" if why else ""
            warn(f"{self.name} died with status {status}{said}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            await self.start()

    async def stop(self, grace_s: float) -> int | None:
        """The exit status."""
        if self.process is None:
            return None
        await stop_group(self.process, grace_s=grace_s)
        return self.process.returncode


class Deployment:
    """A run whose parts are up."""

    def __init__(self, job: SwarmJob, node: PrivateNode | None, invite: keys.Invite) -> None:
        self.job = job
        self.node = node
        self.invite = invite
        self.daemons: dict[str, Daemon] = {}
        self.engines: dict[str, EngineProcess] = {}
        self.placements: dict[str, Placement] = {}
        self.warnings: list[str] = []
        self.learners_done = asyncio.Event()
        """Set when every learner has reached its last step."""

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


@contextlib.asynccontextmanager
async def deploy(job: SwarmJob, *, report: Callable[[str], None]) -> AsyncIterator[Deployment]:
    """Bring a run up, keep it up while the context is open, take it down.

    `report` gets a line for each stage. Raises SwarmqError when a part cannot start, naming it.
    """
    raise_file_limit()
    survive_full_disk()
    served = {name: policy for name, policy in job.policies.items() if not policy.engine.urls}
    for policy in served.values():
        check_arguments(policy)
    models = {name: check_model(policy.model, trained=policy.trained) for name, policy in served.items()}
    placements = _placements(job, models, visible_gpus() if models and is_cuda_build() else [])
    for name, placement in placements.items():
        report(f"placement of {name}: {placement}")
    for line in untrainable_calls(job, models):
        report(f"warning: {line}")
    folder = job.run_folder
    make_folder(folder.path)
    folder.path.chmod(0o700)  # prompts and completions are in it
    with _exclusive(folder.lock, job.run):
        async with contextlib.AsyncExitStack() as stack:
            await _free_ports(job)
            node, url = await _broker(job, stack, report)
            broker = await stack.enter_async_context(
                AmqpBroker.open(url, name=f"up {job.run}", deadline_s=None if node else first_wait_s())
            )
            await stack.enter_async_context(claimed(url, job.run))
            await refuse_twin(broker, job.run)
            engines = await _engines(job, placements, stack, report)
            proxies = _proxies(job, engines)
            resolved = _resolve(job, url, engines, proxies, placements)
            Roster(resolved).forget()  # engines that were added to an earlier start
            deployment = Deployment(resolved, node, host_invite(resolved, tuple(map(job.proxy.url, proxies.values()))))
            Proxies(folder.proxies).write(deployment.invite.base_urls)
            deployment.engines = engines
            deployment.placements = placements
            folder.job.write_text(job.to_toml())
            _write_private(folder.resolved, resolved.to_toml().encode())
            await broker.declare(job.run, policies=_trained(job), kinds=job.task_kinds)

            def warn(text: str) -> None:
                deployment.warnings.append(text)
                log.warning("part died", what=text)
                warnings.put_nowait(text)

            warnings: asyncio.Queue[str] = asyncio.Queue()
            await _daemons(deployment, proxies, stack, report)
            _write_private(folder.invite, deployment.invite.encode().encode() + b"\n")
            _write_private(folder.endpoints, msgspec.json.format(msgspec.json.encode(deployment.endpoints()), indent=2))
            async with asyncio.TaskGroup() as tasks:
                watchers = [
                    tasks.create_task(_tell(warnings, broker, job.run)),
                    tasks.create_task(_learners(deployment, warn)),
                    *(
                        tasks.create_task(d.keep_running(warn))
                        for n, d in deployment.daemons.items()
                        if not n.startswith("learner")
                    ),
                    *(tasks.create_task(keep_engine(name, e, warn)) for name, e in engines.items()),
                    *([tasks.create_task(keep_broker(node, warn))] if node else []),
                ]
                try:
                    yield deployment
                finally:
                    for watcher in watchers:
                        watcher.cancel()


async def refuse_twin(broker: Broker, run: str) -> None:
    """Raises SwarmqError when parts of a run of this name are up on the broker already, started by hand: their queues
    would be the same."""
    inbox = topology.inbox(run)
    depth = (await broker.depths([inbox])).get(inbox)
    if depth and depth.consumers:
        raise SwarmqError(
            f"run {run!r} is up on this broker already: somebody reads {inbox}. Choose another name, or stop that run "
            "(one that has just died is forgotten within a minute)"
        )


async def _learners(deployment: Deployment, warn: Callable[[str], None]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for name, daemon in deployment.daemons.items():
            if name.startswith("learner"):
                tasks.create_task(daemon.keep_running(warn))
    deployment.learners_done.set()


def _placements(job: SwarmJob, models: Mapping[str, Model], gpus: Sequence[Gpu]) -> dict[str, Placement]:
    trained = {name: job.policies[name] for name in models if job.policies[name].trained} if gpus else {}
    sizes = {
        name: [size_of(judge) for judge in judges(policy.train, policy.model).values()]
        for name, policy in trained.items()
    }
    return place_all(job.policies, models, gpus, judges=sizes)


def untrainable_calls(job: SwarmJob, models: Mapping[str, Model]) -> Iterator[str]:
    """A line for each policy whose engine answers calls that are longer than what its learner computes in one pass."""
    for name, model in models.items():
        engine, train = job.policies[name].engine, job.policies[name].train
        served = min(engine.max_model_len, model.max_length or engine.max_model_len)
        if job.policies[name].trained and served > train.micro_batch_tokens:
            yield (
                f"policies.{name}.engine.max_model_len lets calls grow to {served} tokens, and an episode with one of more than "
                f"policies.{name}.train.micro_batch_tokens = {train.micro_batch_tokens} is sampled and then dropped (over_budget): "
                "raise the latter, or lower the former to it"
            )


async def _broker(
    job: SwarmJob, stack: contextlib.AsyncExitStack, report: Callable[[str], None]
) -> tuple[PrivateNode | None, str]:
    if url := amqp_url(job.broker):
        report("broker: the one you named")
        return None, url
    if find_server() is None and (container := await asyncio.to_thread(find_container)):
        report(f"broker: {container.place}")
        return None, container.amqp_url
    report("broker: starting a private RabbitMQ")
    node = await stack.enter_async_context(
        PrivateNode(job.run_folder.broker, port=job.broker.port, config=tls_listener(job.broker))
    )
    report(f"broker: ready, management UI at {node.management_url}")
    return node, node.amqp_url


async def _engines(
    job: SwarmJob, placements: Mapping[str, Placement], stack: contextlib.AsyncExitStack, report: Callable[[str], None]
) -> dict[str, EngineProcess]:
    """Start all engines side by side; name -> process."""
    wanted: dict[str, tuple[Policy, tuple[int, ...] | None]] = {}
    for name, policy in job.policies.items():
        if policy.engine.urls:
            report(f"engine {name}: the ones you named")
        elif name in placements:
            own, gpus = placements[name].applied(policy)
            wanted |= {f"{name}.{index}": (own, group) for index, group in enumerate(gpus)}
        else:
            wanted |= {f"{name}.{index}": (policy, None) for index in range(policy.engine.count)}
    ports = _ports(job.run_folder.path / "ports.json", [*wanted, *_proxy_names(job)])
    engines = {
        name: EngineProcess(
            policy,
            port=ports[name],
            log_path=job.run_folder.logs / f"engine.{name}.log",
            progress=partial(_report_engine, report, name),
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


def _report_engine(report: Callable[[str], None], name: str, stage: str) -> None:
    report(f"engine {name}: {stage}")


async def keep_engine(name: str, engine: EngineProcess, warn: Callable[[str], None]) -> None:
    """Start it again when it dies, on the same port. One that does not start is tried again: its learner may have the memory."""

    async def ended() -> str:
        status = await engine.wait()
        return engine.given_up or f"died with status {status}"

    await _keep(f"engine {name}", ended, engine.restart, lambda: f"the end of its log:\n{tail(engine.log_path)}", warn)


async def keep_broker(node: PrivateNode, warn: Callable[[str], None]) -> None:
    """Start the private RabbitMQ again when it dies: same url, same queues; everybody else waits and connects again."""

    async def ended() -> str:
        return f"died with status {await node.wait()}"

    async def restart() -> None:
        await node.stop()
        await node.start()

    await _keep("the broker", ended, restart, lambda: f"its logs are in {node.folder / 'log'}", warn)


async def _keep(
    name: str,
    ended: Callable[[], Awaitable[str]],
    restart: Callable[[], Awaitable[None]],
    ending: Callable[[], str],
    warn: Callable[[str], None],
) -> None:
    """Raises when it keeps dying, with its `ending`, or does not start however often it is tried. `ended` says why it died."""
    deaths: list[float] = []
    failed = 0
    """Starts in a row."""
    while True:
        why = await ended()
        deaths = [at for at in deaths if at > time.monotonic() - DEATH_WINDOW_S] + [time.monotonic()]
        if len(deaths) >= MAX_DEATHS:
            raise DaemonFailedError(f"{name} died {MAX_DEATHS} times; {ending()}")
        warn(f"{name} {why}; starting it again")
        try:
            await restart()
        except (SwarmqError, OSError) as error:
            failed += 1
            if failed == MAX_DEATHS:
                raise
            delay_s, why = BACKOFF_S[failed], str(error).partition("; the end of")[0]
            warn(f"{name} does not start ({why}); trying again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
        else:
            failed = 0


async def _daemons(
    deployment: Deployment,
    proxies: dict[str, int],
    stack: contextlib.AsyncExitStack,
    report: Callable[[str], None],
) -> None:
    job, folder = deployment.job, deployment.job.run_folder
    resolved = str(folder.resolved)
    learners = [
        (f"learner.{name}", ["learner", resolved, "--policy", name, "--no-collector", *_ranks(deployment, name)])
        for name in _trained(job)
    ]
    serving = [
        (name, ["proxy", resolved, "--port", str(port), "--number", str(number)])
        for number, (name, port) in enumerate(proxies.items())
    ]
    plans = [*serving, ("collector", ["collector", resolved]), *learners]
    for name, arguments in plans:
        report(f"{name}: starting")
        argv, log_path = [sys.executable, "-m", "swarmq", *arguments], folder.logs / f"{name}.log"
        placement = deployment.placements.get(name.removeprefix("learner.")) if name.startswith("learner.") else None
        gpus = visible(placement.learner) | {GPU_SHARE: str(placement.learner_share)} if placement else {}
        daemon, grace_s = Daemon(name, argv, log_path, {ANSWERED: "1", **gpus}), _drain_s(job, name)
        await daemon.start()
        stack.push_async_callback(_stop, daemon, grace_s, report)
        deployment.daemons[name] = daemon
    for name, port in proxies.items():
        await _until_serving(deployment.daemons[name], job.proxy.host, port)
        report(f"{name}: serving")


async def _stop(daemon: Daemon, grace_s: float, report: Callable[[str], None]) -> None:
    if daemon.process is None or daemon.process.returncode is not None or not daemon.name.startswith("learner."):
        await daemon.stop(grace_s)
        return
    report(f"{daemon.name}: stopping; it has {grace_s:.0f} s to write its checkpoint, Ctrl-C again ends it without")
    if await daemon.stop(grace_s) == -signal.SIGKILL:
        report(f"{daemon.name}: not done in time; steps since its newest checkpoint are made again from the batch log")


def _drain_s(job: SwarmJob, name: str) -> float:
    """Of a learner: enough for two checkpoints on a slow disk, the one that is being written and the last."""
    role, _, policy = name.partition(".")
    if role != "learner":
        return DRAIN_S[role]
    parameters = 0
    with contextlib.suppress(SwarmqError):  # the learner says so as well
        parameters = size_of(job.policies[policy].model)
    two_bytes = 2 * (WHOLE_BYTES + MOMENTS_BYTES) * parameters
    return min(DRAIN_S[role] + two_bytes / SLOW_DISK_BYTES_PER_S, MOST_DRAIN_S)


def _ranks(deployment: Deployment, policy: str) -> list[str]:
    """Arguments of a learner that is placed on several GPUs."""
    placement = deployment.placements.get(policy)
    return ["--num-gpus", str(len(placement.learner))] if placement and len(placement.learner) > 1 else []


async def _until_serving(daemon: Daemon, host: str, port: int) -> None:
    """Return when somebody listens on the port. Raises DaemonFailedError when the daemon ends first, or takes long."""
    assert daemon.process is not None
    try:
        async with asyncio.timeout(SERVE_S):
            while daemon.process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    return
                await asyncio.sleep(PROBE_S)
    except TimeoutError:
        pass
    raise DaemonFailedError(f"{daemon.name} does not serve; the end of {daemon.log_path}:\n{tail(daemon.log_path)}")


async def _tell(warnings: asyncio.Queue[str], broker: AmqpBroker, run: str) -> None:
    while True:
        text = await warnings.get()
        await broker.emit(Event(run=run, source="up", name="warning", at=time.time(), fields={"text": text}))


def _proxy_names(job: SwarmJob) -> list[str]:
    return ["proxy", *(f"proxy.{number}" for number in range(1, job.proxy.count))]


def _proxies(job: SwarmJob, engines: Iterable[str]) -> dict[str, int]:
    """Proxy -> port: from the job's on, or free ones."""
    names = _proxy_names(job)
    if job.proxy.port:
        return {name: job.proxy.port + number for number, name in enumerate(names)}
    ports = _ports(job.run_folder.path / "ports.json", [*engines, *names])
    return {name: ports[name] for name in names}


async def _free_ports(job: SwarmJob) -> None:
    """Those that the job names for its proxies; one of a run that was killed a moment ago is waited for. Raises ConfigError."""
    for port in range(job.proxy.port, job.proxy.port + job.proxy.count) if job.proxy.port else ():
        until = time.monotonic() + PORT_S
        while True:
            try:
                socket.create_server((job.proxy.host, port)).close()
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise ConfigError(
                        f"proxy.port: nobody can listen on {job.proxy.host}:{port} ({os.strerror(error.errno or 0)}); name another port or host, "
                        f"leave the port out for a free one, or see who has it: ss -ltnp 'sport = :{port}'"
                    ) from error
            await asyncio.sleep(PROBE_S)


def _resolve(
    job: SwarmJob,
    url: str,
    engines: dict[str, EngineProcess],
    proxies: dict[str, int],
    placements: Mapping[str, Placement],
) -> SwarmJob:
    """The job with every address filled in, as the daemons read it."""
    urls = {name: tuple(e.url for key, e in engines.items() if key.rpartition(".")[0] == name) for name in job.policies}
    planned = {
        name: placements[name].resolved(policy) if name in placements else policy
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


def _trained(job: SwarmJob) -> list[str]:
    return [name for name, policy in job.policies.items() if policy.trained]


def _ports(path: Path, names: list[str]) -> dict[str, int]:
    """A port for each name: the one of the last time where it is still free, so that clients find the run again."""
    known: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    ports = {name: known[name] if port_is_free(known.get(name, 0)) and name in known else held_port() for name in names}
    path.write_text(json.dumps(ports))
    return ports


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        sink.write(content)


@contextlib.contextmanager
def _exclusive(path: Path, run: str) -> Iterator[None]:
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
