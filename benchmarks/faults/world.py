"""The run that is to be broken: every part a process of its own, every link through a relay, kept up as `swarmq up` does.

    clients ──relay──> proxy ──relay──> engine <──relay── learner (and its I/O process)
       │                 │                                  │            collector
       └────relay────────┴────────────relay─────────────────┴──────────────relay────> RabbitMQ (private, one node or several)

A part that ends is started again after a moment, whatever it died of; deaths that nobody injected are kept with the
last lines of its log. The harness itself only feeds tasks, and looks. What it sees goes into files of the folder: a
world that is opened again in the same folder goes on, like anything else that was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from benchmarks.faults.client import Line, Lines, clock_of, read_lines
from benchmarks.faults.nursery import Child, Nursery
from support.broker import discarded
from swarmq import keys
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.broker.node import probe
from swarmq.broker.node.cluster import PrivateCluster
from swarmq.broker.node.process import PrivateNode
from swarmq.broker.protocol import declare_run
from swarmq.config import BrokerSettings, RunFolder, SwarmJob
from swarmq.engine.server.launch import EngineProcess
from swarmq.errors import BrokerError
from swarmq.learner.feed.ipc import COMMAND
from swarmq.messages import Slot, Task
from swarmq.registries.engines import EngineRegistry
from swarmq.runtime.processes import find_children, find_free_port, read_tail
from swarmq.testing.relay import TcpRelay

RUN, KIND, POLICY = "faults", "default", "main"
GROUP_SIZE, GROUPS_PER_BATCH = 4, 2
NUM_WORKERS, NUM_CLIENTS = 3, 5
"""Clients that take tasks from the queue, and all: the others know HTTP alone, and the last of them says which answers it got."""
HEARTBEAT_S = 5
SPARE_TASKS = 40
"""Tasks kept waiting in the queue."""
RESTART_S = 0.3
REFUSAL_S, REFUSALS = 1.0, 3
"""How often, and how many times in a row, a living engine may refuse a connection."""
POLL_S = 0.2
STALL_S = 0.5
"""Shorter ones are the usual pace."""
DISK_BYTES = 128 << 20
LOGS = "logs"
PORT = 5672

ROLES = ("proxy", "collector", "learner", *(f"client{n}" for n in range(NUM_WORKERS)))


class Death(msgspec.Struct, frozen=True):
    """A part ended and nobody had killed it."""

    part: str
    status: int
    words: str


class Stall(msgspec.Struct, frozen=True):
    """A stretch without any progress."""

    began: float
    """Unix time."""
    seconds: float


class Part:
    """A process that is to be running."""

    def __init__(
        self, name: str, arguments: list[str], nursery: Nursery, log_path: Path, environment: dict[str, str]
    ) -> None:
        self.name, self.log_path = name, log_path
        self._arguments, self._nursery, self._environment = arguments, nursery, environment
        self._process: Child | None = None
        self._killed = 0
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.wanted = True
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.returncode is None else None

    def start(self) -> None:
        self.starts += 1
        self._process = self._nursery.start(self._arguments, self._environment, self.log_path)

    async def keep(self, deaths: Lines[Death]) -> None:
        """Start it again whenever it ends, until it is no longer wanted."""
        while True:
            assert self._process is not None
            status = await self._process.wait()
            if not self.wanted:
                return
            if status != -signal.SIGKILL or not self._killed:
                deaths.add(Death(self.name, status, read_tail(self.log_path, 3)[-300:]))
            self._killed = 0
            await asyncio.sleep(RESTART_S)
            await self.may_start.wait()
            if not self.wanted:
                return
            self.start()

    @contextlib.asynccontextmanager
    async def down(self) -> AsyncIterator[None]:
        """Killed for as long as the context is open."""
        self.may_start.clear()
        try:
            self.signal(signal.SIGKILL)
            if self._process is not None:
                await self._process.wait()
            yield
        finally:
            self.may_start.set()

    def signal(self, number: int) -> None:
        if (pid := self.pid) is not None:
            self._killed += number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def listens(self) -> bool:
        """Whether it would obey a SIGTERM; a process that is still starting is ended by one."""
        return self.pid is not None and catches(self.pid, signal.SIGTERM)

    async def stop(self, grace_s: float) -> int:
        """Drain; the exit status, or SIGKILL's when it did not end in time."""
        self.wanted = False
        self.may_start.set()
        return await self._process.stop(grace_s=grace_s) if self._process else 0


class World:
    """Everything that runs; `open` brings it up and takes it down."""

    def __init__(
        self, folder: Path, job: SwarmJob, cluster: PrivateCluster, nursery: Nursery, *, broken: str = ""
    ) -> None:
        self.folder, self.job, self.cluster, self.broken = folder, job, cluster, broken
        self.nursery = nursery
        self.run_folder: RunFolder = job.run_folder
        self.parts: dict[str, Part] = {}
        self.relays: dict[str, TcpRelay] = {}
        self.opened = Lines(folder / "opened.jsonl", float)
        """Unix time of every time that this folder was opened."""
        self.opened.add(time.time())
        self.deaths = Lines(folder / "deaths.jsonl", Death)
        self.stalls = Lines(folder / "stalls.jsonl", Stall)
        self.fed: list[Task] = []
        self.engine: EngineProcess | None = None
        """The real vLLM, where that is asked for."""
        self.disk: Path | None = None
        """The batch log's own file system, where we may mount one; what the parts print is there, too."""
        self.logs = folder
        self.feeding, self.watching = asyncio.Event(), asyncio.Event()
        self.broker: AmqpBroker
        self._seen: dict[Path, int] = {}
        self.moved_at = time.monotonic()
        self.moves = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        folder: Path,
        nursery: Nursery,
        *,
        model: Path,
        broken: str = "",
        vllm: bool = False,
        nodes: int = 1,
        collectors: int = 1,
    ) -> AsyncIterator[World]:
        """`broken` names the rules that parts are to break, with commas between; `nodes` is the number of RabbitMQ nodes, `collectors`
        that of the collector's processes."""
        async with contextlib.AsyncExitStack() as stack:
            job = _job(folder, model, proxy_port=find_free_port(), collectors=collectors)
            cluster = PrivateCluster(folder / "broker", BrokerSettings(nodes=nodes))
            await stack.enter_async_context(discarded(cluster))
            world = cls(folder, job, cluster, nursery, broken=broken)
            world.disk = stack.enter_context(_small_disk(folder, job.run_folder.batch_log(POLICY)))
            if world.disk:
                world.logs = world.disk / LOGS
            await world._connect(stack, vllm=vllm)
            async with asyncio.TaskGroup() as tasks:
                keepers = [tasks.create_task(part.keep(world.deaths)) for part in world.parts.values()]
                others = [tasks.create_task(loop()) for loop in (world._feed, world._look, world._watch_engine)]
                if world.engine:
                    others.append(tasks.create_task(world._keep_engine()))
                try:
                    yield world
                finally:
                    for part in world.parts.values():
                        part.signal(signal.SIGCONT)
                        await part.stop(0.0)
                    for task in (*keepers, *others):
                        task.cancel()

    async def _connect(self, stack: contextlib.AsyncExitStack, *, vllm: bool) -> None:
        """Relays, parts, and the harness's own connection."""
        host = "127.0.0.1"
        self.engine_port, journal = find_free_port(), self.folder / "engine.jsonl"
        for role, (number, node) in itertools.product(ROLES, enumerate(self.cluster.nodes)):
            relay = await stack.enter_async_context(TcpRelay.to(host, node.identity.amqp_port))
            self.relays[_broker_link(role, number)] = relay
        for role in ("proxy", "learner"):
            self.relays[f"{role}-engine"] = await stack.enter_async_context(TcpRelay.to(host, self.engine_port))
        self.relays["clients-proxy"] = await stack.enter_async_context(TcpRelay.to(host, self.job.proxy.port))
        self.broker = await stack.enter_async_context(
            AmqpBroker.open(self.cluster.amqp_url, name="faults", deadline_s=None)
        )
        await declare_run(self.broker, self.job)
        if vllm:
            policy = self.job.policies[POLICY]
            self.engine = EngineProcess(
                policy,
                port=self.engine_port,
                log_path=self.logs / "engine.log",
                secret=EngineRegistry(self.job).secret(),
            )
            await stack.enter_async_context(self.engine)
        else:
            self._add("engine", ["benchmarks.faults.engine", str(self.engine_port), str(journal)])
        for role in ("proxy", "collector", "learner"):
            job = str(self._job_of(role))
            if self.broken and (rule := self._broken_by(role)):
                self._add(role, ["benchmarks.faults.broken", role, job, rule])
            else:
                self._add(role, ["swarmq", role, job, *(["--no-collector"] if role == "learner" else [])])
        self._fed.unlink(missing_ok=True)
        for number in range(NUM_CLIENTS):
            name, names = f"client{number}", number != NUM_WORKERS
            given = {"SWARMQ_INVITE": self._invite(name), "SWARMQ_SPOOL": str(self.folder / "spool")}
            if number < NUM_WORKERS:
                self._add(name, ["benchmarks.faults.client", str(self.ledger(name))], **given)
            else:
                arguments = [str(self.ledger(name)), str(self._fed), *(["names"] if names else [])]
                self._add(name, ["benchmarks.faults.http_client", *arguments], **given)
        for part in self.parts.values():
            part.start()

    def _broken_by(self, role: str) -> str:
        """Return the rule that this part is to break, or ""."""
        from benchmarks.faults.broken import RULES  # noqa: PLC0415  (imports every part; only where one is broken)

        return next((rule for rule in self.broken.split(",") if RULES[rule] == role), "")

    def _add(self, name: str, arguments: list[str], **environment: str) -> None:
        known = {key: value for key, value in os.environ.items() if key != "SWARMQ_AMQP_URL"}
        given = {**known, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", BROKER_ANSWERED_ENV: "1", **environment}
        self.parts[name] = Part(name, arguments, self.nursery, self.logs / f"{name}.log", given)

    def feed(self, *, on: bool) -> None:
        """Let clients begin episodes, or no more of them."""
        if on:
            self._fed.touch()
            self.feeding.set()
        else:
            self._fed.unlink(missing_ok=True)
            self.feeding.clear()

    @property
    def _fed(self) -> Path:
        """Exists while clients that feed themselves may begin episodes."""
        return self.folder / "feeding"

    def ledger(self, client: str) -> Path:
        return self.folder / f"{client}.jsonl"

    def clock(self, client: str) -> Path:
        """By how many seconds the client's clock is wrong, from its next start on."""
        return clock_of(self.ledger(client))

    def lines(self) -> list[Line]:
        """What all clients have written."""
        return [line for number in range(NUM_CLIENTS) for line in read_lines(self.ledger(f"client{number}"), Line)]

    @property
    def node(self) -> PrivateNode:
        """The node of RabbitMQ that obeys commands."""
        return self.cluster.nodes[0]

    def io_pid(self) -> int | None:
        """The learner's I/O process."""
        pid = self.parts["learner"].pid
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if COMMAND[-1].encode() in Path(f"/proc/{child}/cmdline").read_bytes() or self.broken:
                    return int(child)
        return None

    def worker_pids(self) -> list[int]:
        """Return the process ids of the collector's processes other than the first."""
        pid = self.parts["collector"].pid
        return sorted(find_children(pid, sys.executable)) if pid else []

    def segment(self) -> Path | None:
        """The batch log's last segment."""
        return max(self.run_folder.batch_log(POLICY).glob("*.log"), default=None)

    def _job_of(self, role: str) -> Path:
        engine = msgspec.structs.replace(
            self.job.policies[POLICY].engine, urls=(f"http://127.0.0.1:{self._port(role, 'engine')}",)
        )
        policy = msgspec.structs.replace(self.job.policies[POLICY], engine=engine)
        job = msgspec.structs.replace(
            self.job,
            broker=msgspec.structs.replace(self.job.broker, url=self._broker_url(role)),
            policies={POLICY: policy},
        )
        path = self.folder / f"{role}.toml"
        path.write_text(job.to_toml())
        return path

    def _port(self, role: str, to: str) -> int:
        return self.relays.get(f"{role}-{to}", self.relays["proxy-engine"]).port

    def _broker_url(self, role: str) -> str:
        login = f"{self.cluster.identity.user}:{self.cluster.identity.password}"
        ports = [self.relays[_broker_link(role, number)].port for number in range(len(self.cluster.nodes))]
        return ",".join(f"amqp://{login}@127.0.0.1:{port}/?heartbeat={HEARTBEAT_S}" for port in ports)

    def _invite(self, name: str) -> str:
        """A client that cannot say which answers it got is where no network loses any: at the proxy."""
        direct = name == f"client{NUM_WORKERS}"
        port = self.job.proxy.port if direct else self.relays["clients-proxy"].port
        root = keys.load_root(self.run_folder.root_secret)
        return keys.Invite(
            run=RUN,
            client=name,
            secret=keys.derive_client_secret(root, name),
            amqp_url=self._broker_url(name if name in ROLES else "proxy"),
            base_url=f"http://127.0.0.1:{port}/v1",
            policies=(POLICY,),
            kinds=(KIND,),
            group_size=GROUP_SIZE,
        ).encode()

    async def _keep_engine(self) -> None:
        assert self.engine
        while True:
            await self.engine.wait()
            await self.engine.restart()

    async def _watch_engine(self) -> None:
        """Kill an engine that lives and refuses connections, as `swarmq up` does with one that has lost its core."""
        served: int | None = None
        while "engine" in self.parts:
            engine, refused = self.parts["engine"], 0
            while refused < REFUSALS:
                await asyncio.sleep(REFUSAL_S)
                pid, answers = engine.pid, await probe.can_connect("127.0.0.1", self.engine_port)
                served = pid if answers else served
                refused = refused + 1 if pid is not None and pid == served and not answers else 0
            engine.signal(signal.SIGKILL)

    async def _feed(self) -> None:
        """Keep tasks waiting while `feeding` is set: all repeats of one after another."""
        queue = topology.tasks(RUN, KIND)
        opening, number = len(self.opened.found), 0
        while True:
            await self.feeding.wait()
            with contextlib.suppress(BrokerError, TimeoutError):
                async with asyncio.timeout(5):
                    depth = (await self.broker.depths([queue]))[queue].ready
                while depth < SPARE_TASKS and self.feeding.is_set():
                    for repeat in range(GROUP_SIZE):
                        slot = Slot(task_id=f"t{opening}.{number}", repeat=repeat)
                        task = Task(run=RUN, slot=slot, kind=KIND, group_size=GROUP_SIZE)
                        await self.broker.publish(queue, task)
                        self.fed.append(task)
                    number += 1
                    depth += GROUP_SIZE
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        """Progress is a line in a client's ledger or a byte in the batch log."""
        while True:
            paths = [self.ledger(f"client{n}") for n in range(NUM_CLIENTS)] + [self.segment()]
            sizes = {path: path.stat().st_size for path in paths if path and path.exists()}
            now = time.monotonic()
            if sizes != self._seen:
                if (seconds := now - self.moved_at) > STALL_S and self.watching.is_set():
                    self.stalls.add(Stall(time.time() - seconds, seconds))
                self._seen, self.moved_at = sizes, now
                self.moves += 1
            await asyncio.sleep(POLL_S)

    @property
    def still_s(self) -> float:
        """Seconds since anything moved."""
        return time.monotonic() - self.moved_at

    def story(self) -> Counter[str]:
        """Deaths that nobody injected, by role and last words, without what differs from one to the next."""
        return Counter(
            f"{death.part.rstrip('0123456789')} (status {death.status}): {_gist(death.words)}"
            for death in self.deaths.found
        )


def _broker_link(role: str, number: int) -> str:
    """Return the name of a role's relay to a node of RabbitMQ."""
    return f"{role}-broker{number or ''}"


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; one that is gone has none."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def _gist(words: str) -> str:
    last = words.splitlines()[-1] if words else ""
    return re.sub(r"127\.0\.0\.1:\d+", "its relay", re.sub(r"\S*/batches\b", "batches", last))


def make_model(folder: Path) -> Path:
    """A random Qwen3 of two layers for 128 tokens, once."""
    from support.episodes import make_qwen  # noqa: PLC0415  (its imports take a second; not where a model is given)

    return folder if folder.exists() else make_qwen(folder)


def _job(folder: Path, model: Path, *, proxy_port: int, collectors: int) -> SwarmJob:
    job = SwarmJob.build(
        {
            "run": RUN,
            "folder": str(folder / "runs"),
            "proxy": {"port": proxy_port},
            "collector": {"processes": collectors},
            "groups": {
                "group_size": GROUP_SIZE,
                "groups_per_batch": GROUPS_PER_BATCH,
                "max_staleness": 6,
                "deadline_s": 30.0,
                "idle_timeout_s": 30.0,
            },
            "policies": {
                POLICY: {
                    "model": str(model),
                    "sampling": {"max_tokens": 12},
                    "engine": {"max_model_len": 512, "dtype": "float32"},
                    "train": {
                        "learning_rate": 1e-4,
                        "checkpoint_every": 5,
                        "deterministic": True,
                        "engine_gap_max": 0.0,  # its engine answers random letters
                        "gradient_checkpointing": False,
                    },
                }
            },
        }
    )
    job.run_folder.path.mkdir(parents=True, exist_ok=True)
    keys.load_root(job.run_folder.root_secret)
    return job


@contextlib.contextmanager
def _small_disk(folder: Path, at: Path) -> Iterator[Path | None]:
    """Mount a file system of its own at `at`, so that it can be filled; None where we may not."""
    image = folder / "disk.img"
    at.mkdir(parents=True, exist_ok=True)
    try:
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(DISK_BYTES)
            subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True, check=True)
        subprocess.run(["umount", "-l", at], capture_output=True, check=False)  # of a run that was killed
        subprocess.run(["mount", "-o", "loop", image, at], capture_output=True, check=True)
        (at / LOGS).mkdir(exist_ok=True)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    try:
        yield at
    finally:
        shutil.copytree(at / LOGS, folder / LOGS, dirs_exist_ok=True)
        subprocess.run(["umount", "-l", at], capture_output=True, check=False)
