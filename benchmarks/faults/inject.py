"""The faults, how often each is injected, and the hand that injects them at moments that a seed chooses.

A fault that lasts (a stop, a held link, an alarm) runs beside the next ones. A fault that is aimed waits for its moment
(the log grows, a draft of a checkpoint appears, weights lie in shared memory) and strikes within a millisecond of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import aio_pika
import aio_pika.exceptions
import msgspec
import structlog
from aio_pika.abc import AbstractIncomingMessage

from benchmarks.faults.client import Lines
from benchmarks.faults.partition import cut_off, heal
from benchmarks.faults.world import GROUP_SIZE, KIND, NUM_CLIENTS, NUM_WORKERS, POLICY, RUN, World, catches
from swarmq.broker import topology
from swarmq.broker.node.cluster import PrivateCluster
from swarmq.broker.node.process import PrivateNode
from swarmq.errors import BrokerError, SwarmqError
from swarmq.learner.store import batch_log
from swarmq.messages import Message, StepReport, Ticket, decode
from swarmq.testing.relay import TcpRelay, Way
from swarmq.up.supervision import CHECK_EVERY_S, MAX_FAILED_CHECKS

log = structlog.get_logger()

PATIENCE_S = 10.0
"""How long an injection waits for the run to have moved since the one before."""
CALM_S = 45.0
"""Nothing has moved for so long: no more faults until something does."""
HANG_S = 600.0
"""Nothing has moved for so long although every outage is over: that is a hang, on the busiest of machines."""
AIM_S = 12.0
RECENT_TASKS = 120
TRY_S = 120.0
"""How long a fault looks for something to hit: its target may be starting, on a busy machine."""
POLL_S = 0.0002
SHARED_MEMORY = Path("/dev/shm")
BLOCK_BYTES = 4096
WORST_CLOCK_S = 2 * 3600.0
MOST_SHUFFLED = 500

CLIENTS = tuple(f"client{number}" for number in range(NUM_CLIENTS))
WORKERS = CLIENTS[:NUM_WORKERS]
Fault = Callable[["Nemesis"], Awaitable[str | None]]
"""Returns what was hit, None when there was nothing to hit."""


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the log of faults."""

    number: int
    fault: str
    at: float
    """Unix time."""
    hit: str


class HangError(Exception):
    """Nothing moves any more."""


class Nemesis:
    """Injects a plan into a world."""

    def __init__(self, world: World, *, seed: int) -> None:
        self.world = world
        self.log = Lines(world.folder / "faults.jsonl", Injection)
        self.rng = random.Random(f"{seed} {len(self.injections)}")
        self.stop = asyncio.Event()
        """No more faults."""
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lasting: set[asyncio.Task[None]] = set()

    @property
    def injections(self) -> list[Injection]:
        """All so far, those before an interruption too."""
        return self.log.found

    async def run(self, plan: list[str], *, gap_s: float) -> None:
        """What is left of the plan. Raises HangError. Whoever cancels it ends the faults that last, too."""
        try:
            await self._inject(plan, gap_s=gap_s)
        finally:
            for task in self._lasting:
                task.cancel()
            await asyncio.gather(*self._lasting, return_exceptions=True)

    async def _inject(self, plan: list[str], *, gap_s: float) -> None:
        for number, name in list(enumerate(plan, 1))[len(self.injections) :]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.expovariate(1 / gap_s)):
                    await self.stop.wait()
            await self._until_moved()
            if self.stop.is_set():
                break
            until = time.monotonic() + TRY_S
            while time.monotonic() < until and not self.stop.is_set():
                if name in CLUSTER_FAULTS:
                    async with self.alone("broker"):  # the one before has ended
                        pass
                began = time.time()
                if (hit := await FAULTS[name](self)) is not None:
                    self.log.add(Injection(number=number, fault=name, at=began, hit=hit))
                    break
                await asyncio.sleep(1.0)  # its target is being started again
        if self._lasting:
            await asyncio.wait(self._lasting)

    async def _until_moved(self) -> None:
        """Faults upon a run that stands still are no load test; but after a while the next one comes all the same,
        unless nothing moves for so long that what is still under way must be given the time to end. A run with a broken
        rule may stand still for good: what is wrong with it shows by then."""
        moves, since = self.world.moves, time.monotonic()
        while self.world.moves == moves and time.monotonic() - since < PATIENCE_S:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self.world.still_s > CALM_S:
            if self._lasting:
                await asyncio.wait(self._lasting)
            over = time.monotonic()
            while self.world.still_s > CALM_S:
                if self.world.broken or time.monotonic() - over > HANG_S:
                    raise HangError(f"nothing has moved for {self.world.still_s:.0f} s")
                await asyncio.sleep(0.2)

    def lasting(self, what: Awaitable[None]) -> None:
        """Go on with the next fault while this one lasts."""
        task = asyncio.ensure_future(what)
        self._lasting.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lasting.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the harness failed", fault=task.get_name(), error=repr(error))

    @contextlib.asynccontextmanager
    async def alone(self, what: str) -> AsyncIterator[None]:
        """Faults of one thing that cannot overlap."""
        async with self._locks[what]:
            yield

    async def aim(self, look: Callable[[], object], kill: Callable[[], None], *, delay_s: float) -> bool:
        """Kill when what `look` sees changes, `delay_s` later; False when it did not within AIM_S."""

        def watch() -> bool:
            before, deadline = look(), time.monotonic() + AIM_S
            while time.monotonic() < deadline:
                if look() != before:
                    time.sleep(delay_s)
                    kill()
                    return True
                time.sleep(POLL_S)
            return False

        return await asyncio.to_thread(watch)


# -------------------------------------------------------------------------------------------------- processes


def killed(*parts: str) -> Fault:
    async def fault(nemesis: Nemesis) -> str | None:
        part = nemesis.world.parts.get(nemesis.rng.choice(parts))
        if part is None or part.pid is None:
            return None
        part.signal(signal.SIGKILL)
        return part.name

    return fault


def stopped(*parts: str) -> Fault:
    async def fault(nemesis: Nemesis) -> str | None:
        part = nemesis.world.parts.get(nemesis.rng.choice(parts))
        if part is None or (pid := part.pid) is None:
            return None
        seconds = _seconds(nemesis.rng, 6.0)
        nemesis.lasting(_stop(pid, seconds))
        return f"{part.name} for {seconds:.1f} s"

    return fault


async def _stop(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


async def io_killed(nemesis: Nemesis) -> str | None:
    if (pid := nemesis.world.io_pid()) is None:
        return None
    _kill(pid)
    return "learner's I/O process"


async def io_stopped(nemesis: Nemesis) -> str | None:
    if (pid := nemesis.world.io_pid()) is None:
        return None
    nemesis.lasting(_stop(pid, seconds := _seconds(nemesis.rng, 6.0)))
    return f"learner's I/O process for {seconds:.1f} s"


async def worker_killed(nemesis: Nemesis) -> str | None:
    if not (pids := nemesis.world.worker_pids()):
        return None
    _kill(nemesis.rng.choice(pids))
    return "a worker of the collector"


async def broker_killed(nemesis: Nemesis) -> str | None:
    async def restart() -> None:
        async with nemesis.alone("broker"):
            await nemesis.world.cluster.kill()
            await asyncio.sleep(_seconds(nemesis.rng, 2.0))
            await _start(nemesis.world.cluster)

    nemesis.lasting(restart())
    return "RabbitMQ"


async def _start(broker: PrivateNode | PrivateCluster) -> None:
    while True:
        try:
            return await broker.start()
        except BrokerError as error:
            log.warning("not up, trying again", error=str(error))


async def power_lost(nemesis: Nemesis) -> str | None:
    """Everything dies at once. Then what `swarmq up` does: the broker first, the other parts when it takes clients."""

    async def lose() -> None:
        async with nemesis.alone("broker"), contextlib.AsyncExitStack() as parts:
            for part in nemesis.world.parts.values():
                part.signal(signal.SIGKILL)
            await asyncio.gather(
                nemesis.world.cluster.kill(),
                *(parts.enter_async_context(part.down()) for part in nemesis.world.parts.values()),
            )
            await _start(nemesis.world.cluster)

    nemesis.lasting(lose())
    return "everything"


async def core_killed(nemesis: Nemesis) -> str | None:
    """The engine's core dies: its server closes the port and lives on."""
    engine = nemesis.world.parts.get("engine")
    if engine is None or (pid := engine.pid) is None or not catches(pid, signal.SIGUSR1):
        return None
    os.kill(pid, signal.SIGUSR1)
    return "the port of the engine"


async def clock_wrong(nemesis: Nemesis) -> str | None:
    """A client that starts again finds its machine's clock ahead or behind."""
    name = nemesis.rng.choice(CLIENTS)
    part = nemesis.world.parts[name]
    if part.pid is None:
        return None
    offset_s = nemesis.rng.choice((-1, 1)) * nemesis.rng.choice((30.0, 600.0, 3600.0, WORST_CLOCK_S))
    nemesis.world.clock(name).write_text(str(offset_s))
    part.signal(signal.SIGKILL)
    return f"{name} by {offset_s:+.0f} s"


async def file_emptied(nemesis: Nemesis) -> str | None:
    """A crash of the machine cuts a small file that was written shortly before it; whoever owns the file starts again."""
    owner, path = nemesis.rng.choice(_small_files(nemesis.world))
    size = nemesis.rng.choice((0, nemesis.rng.randrange(max(1, path.stat().st_size))))

    async def cut() -> None:
        if owner == "broker":
            async with nemesis.alone("broker"):
                await nemesis.world.node.kill()
                os.truncate(path, size)
                await _start(nemesis.world.node)
        else:
            async with nemesis.world.parts[owner].down():
                os.truncate(path, size)

    nemesis.lasting(cut())
    return f"{path.relative_to(nemesis.world.folder)} to {size} bytes"


def _small_files(world: World) -> list[tuple[str, Path]]:
    """With the part that writes them. The run's secret is not among them: nobody could make it anew."""
    policy = world.run_folder.path / POLICY
    found = [
        *(("broker", world.folder / "broker" / name) for name in ("node.json", "rabbitmq.conf", "enabled_plugins")),
        *(("learner", policy / "batches" / name) for name in ("control", "reported", "lock")),
        *(("learner", path) for path in sorted((policy / "checkpoints").glob("step-*/*.json"))[-3:]),
        *(("collector", path) for path in world.run_folder.path.glob("*.json")),
        *((name, path) for name in WORKERS for path in (world.folder / "spool").glob(f"*/{name}@*/*.end")),
    ]
    return [(owner, path) for owner, path in found if path.is_file()]


async def broker_stopped(nemesis: Nemesis) -> str | None:
    seconds = _seconds(nemesis.rng, 8.0)

    async def stop() -> None:
        async with nemesis.alone("broker"):
            await asyncio.gather(*(_stop(node.pids[0], seconds) for node in nemesis.world.cluster.nodes))

    nemesis.lasting(stop())
    return f"RabbitMQ for {seconds:.1f} s"


# -------------------------------------------------------------------------------------- nodes of a cluster


async def leader_killed(nemesis: Nemesis) -> str | None:
    """The node with the leader of the busiest queue dies, and joins again."""

    async def restart() -> None:
        async with nemesis.alone("broker"):
            if (node := await _leader(nemesis.world)) is not None:
                await _away(nemesis, [node])

    nemesis.lasting(restart())
    return f"leader of {topology.inbox(RUN)}"


async def majority_killed(nemesis: Nemesis) -> str | None:
    """The last node accepts nobody until another one is back."""
    nodes = nemesis.rng.sample(nemesis.world.cluster.nodes, len(nemesis.world.cluster.nodes) // 2 + 1)

    async def restart() -> None:
        async with nemesis.alone("broker"):
            await _away(nemesis, nodes)

    nemesis.lasting(restart())
    return f"{len(nodes)} nodes"


async def _away(nemesis: Nemesis, nodes: list[PrivateNode]) -> None:
    await asyncio.gather(*(node.kill() for node in nodes))
    await asyncio.sleep(_seconds(nemesis.rng, 3.0))
    starts = [asyncio.ensure_future(_start(node)) for node in nodes]
    others = [node for node in nemesis.world.cluster.nodes if node not in nodes]
    await asyncio.gather(*starts, *(_rejoin(node, starts) for node in others))


async def _rejoin(node: PrivateNode, others: Sequence[asyncio.Future[None]] = ()) -> None:
    """Return when a node accepts clients and the others have started. Restart it where `swarmq up` would: RabbitMQ 3.10 can fail
    to go on after a pause, when another node is just starting, and the others then wait for its data."""
    refused = 0
    while True:
        if await node.refuses_connections():
            refused += 1
        elif all(start.done() for start in others):
            return
        else:
            refused = 0
        if refused == MAX_FAILED_CHECKS:
            log.warning("node does not go on, starting it again", node=node.folder.name)
            await node.stop()
            await _start(node)
            refused = 0
        await asyncio.sleep(CHECK_EVERY_S)


async def leader_cut_off(nemesis: Nemesis) -> str | None:
    """The node with the leader of the busiest queue loses the others, while clients still reach it."""
    nodes, seconds = nemesis.world.cluster.nodes, 2.0 + _seconds(nemesis.rng, 6.0)

    async def cut() -> None:
        async with nemesis.alone("broker"):
            if (node := await _leader(nemesis.world)) is not None:
                await cut_off(node, nodes)
                await asyncio.sleep(seconds)
                await heal(node, nodes)
                await _rejoin(node)

    nemesis.lasting(cut())
    return f"leader of {topology.inbox(RUN)} for {seconds:.1f} s"


async def node_stopped(nemesis: Nemesis) -> str | None:
    node, seconds = nemesis.rng.choice(nemesis.world.cluster.nodes), 2.0 + _seconds(nemesis.rng, 12.0)

    async def stop() -> None:
        async with nemesis.alone("broker"):
            await _stop(node.pids[0], seconds)

    nemesis.lasting(stop())
    return f"{node.folder.name} for {seconds:.1f} s"


async def _leader(world: World) -> PrivateNode | None:
    """Return the node with the leader of the inbox, the queue with most messages; None while there is none."""
    for node in world.cluster.nodes:
        with contextlib.suppress(BrokerError):  # it may be busy dying
            text = await node.ctl("list_queues", "-q", "--formatter", "json", "name", "leader")
            leaders = {queue["name"]: queue["leader"] for queue in json.loads(text)}
            return next((one for one in world.cluster.nodes if one.identity.node == leaders[topology.inbox(RUN)]), None)
    return None


# ---------------------------------------------------------------------------------------------- aimed kills


async def killed_while_logging(nemesis: Nemesis) -> str | None:
    """The log grows: the I/O process is in `write`, in `fsync`, or between the log and the acknowledgement."""
    world = nemesis.world
    if (pid := world.io_pid()) is None or (segment := world.segment()) is None:
        return None
    delay_s = nemesis.rng.choice([0.0, 0.0, 0.001, 0.003])
    hit = await nemesis.aim(lambda: segment.stat().st_size, lambda: _kill(pid), delay_s=delay_s)
    return f"{delay_s * 1000:g} ms after the log grew" if hit else None


async def killed_while_checkpointing(nemesis: Nemesis) -> str | None:
    learner, folder = nemesis.world.parts["learner"], nemesis.world.run_folder.checkpoints(POLICY)
    delay_s = nemesis.rng.uniform(0.0, 0.06)
    hit = await nemesis.aim(
        lambda: bool(list(folder.glob(".draft-step-*"))), lambda: learner.signal(signal.SIGKILL), delay_s=delay_s
    )
    left = [path.name for path in folder.glob(".draft-*")]
    return f"{delay_s * 1000:.0f} ms after the draft appeared, {len(left)} drafts left" if hit else None


def killed_while_pushing(victim: str) -> Fault:
    async def fault(nemesis: Nemesis) -> str | None:
        learner, part = nemesis.world.parts["learner"], nemesis.world.parts.get(victim)
        if learner.pid is None or part is None or part.pid is None:
            return None
        pattern, delay_s = f"swarmq-weights-{learner.pid}-*", nemesis.rng.uniform(0.0, 0.04)
        hit = await nemesis.aim(
            lambda: bool(list(SHARED_MEMORY.glob(pattern))), lambda: part.signal(signal.SIGKILL), delay_s=delay_s
        )
        return f"{victim}, {delay_s * 1000:.0f} ms after the weights were written" if hit else None

    return fault


async def killed_while_committing(nemesis: Nemesis) -> str | None:
    """The write-ahead log of the collector's store is written: before, in or after the commit."""
    part, inbox = nemesis.world.parts["collector"], nemesis.world.run_folder.inbox
    wal = inbox.with_name(inbox.name + "-wal")
    if part.pid is None or not wal.exists():
        return None
    delay_s = nemesis.rng.choice([0.0, 0.0, 0.001, 0.004])
    hit = await nemesis.aim(lambda: _mtime(wal), lambda: part.signal(signal.SIGKILL), delay_s=delay_s)
    return f"{delay_s * 1000:g} ms after the store was written" if hit else None


async def killed_while_answering(nemesis: Nemesis) -> str | None:
    """A turn has reached the collector: about now its proxy hears of the confirm and lets the answer go."""
    part, inbox = nemesis.world.parts["proxy"], nemesis.world.run_folder.inbox
    wal = inbox.with_name(inbox.name + "-wal")
    if part.pid is None or not wal.exists():
        return None
    delay_s = nemesis.rng.choice([0.0, 0.001, 0.004])
    hit = await nemesis.aim(lambda: _mtime(wal), lambda: part.signal(signal.SIGKILL), delay_s=delay_s)
    return f"{delay_s * 1000:g} ms after the store was written" if hit else None


async def killed_while_ending(nemesis: Nemesis) -> str | None:
    """An outcome is about to be sent, or was confirmed and its task is not acknowledged yet."""
    name = nemesis.rng.choice(CLIENTS)
    part, ledger = nemesis.world.parts[name], nemesis.world.ledger(name)
    if part.pid is None or not ledger.exists():
        return None
    delay_s = nemesis.rng.choice([0.0, 0.002, 0.01])
    hit = await nemesis.aim(lambda: ledger.stat().st_size, lambda: part.signal(signal.SIGKILL), delay_s=delay_s)
    return f"{name}, {delay_s * 1000:g} ms after a line in its ledger" if hit else None


# ---------------------------------------------------------------------------------------------------- links


def link_cut(between: str = "") -> Fault:
    """`between`: how the names of the links begin of which one is cut."""

    async def fault(nemesis: Nemesis) -> str | None:
        name = nemesis.rng.choice(sorted(name for name in nemesis.world.relays if name.startswith(between)))
        nemesis.world.relays[name].cut()
        return name

    return fault


async def link_cut_in_a_frame(nemesis: Nemesis) -> str | None:
    name, size = nemesis.rng.choice(sorted(nemesis.world.relays)), nemesis.rng.randrange(4000)
    nemesis.world.relays[name].cut_after(size)
    return f"{name} after {size} bytes"


async def link_refused(nemesis: Nemesis) -> str | None:
    name, seconds = nemesis.rng.choice(sorted(nemesis.world.relays)), _seconds(nemesis.rng, 5.0)

    async def refuse(relay: TcpRelay) -> None:
        async with nemesis.alone(name):
            relay.cut(refuse=True)
            await asyncio.sleep(seconds)
            relay.release()

    nemesis.lasting(refuse(nemesis.world.relays[name]))
    return f"{name} for {seconds:.1f} s"


def link_held(*ways: Way) -> Fault:
    async def fault(nemesis: Nemesis) -> str | None:
        name, way = nemesis.rng.choice(sorted(nemesis.world.relays)), nemesis.rng.choice(ways)
        seconds, cut = nemesis.rng.choice([_seconds(nemesis.rng, 5.0), 18.0]), nemesis.rng.random() < 0.5

        async def hold(relay: TcpRelay) -> None:
            async with nemesis.alone(name):
                relay.hold(way)
                await asyncio.sleep(seconds)
                if cut:
                    relay.cut()
                relay.release()

        nemesis.lasting(hold(nemesis.world.relays[name]))
        return f"{name} {way.name} for {seconds:.1f} s"

    return fault


# ------------------------------------------------------------------------------------------------- messages


async def piece_again(nemesis: Nemesis) -> str | None:
    """Begins, turns and ends that the collector has, old and new, published once more."""
    bodies: list[bytes] = []
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_inbox(nemesis.world)) as inbox:
        for query in (
            "SELECT begin FROM episodes WHERE begin IS NOT NULL ORDER BY random() LIMIT 4",
            "SELECT end FROM episodes WHERE end IS NOT NULL ORDER BY random() LIMIT 4",
            "SELECT body FROM turns ORDER BY random() LIMIT 6",
        ):
            bodies += [body for (body,) in inbox.execute(query)]
    nemesis.rng.shuffle(bodies)
    return nemesis_sends(nemesis, topology.inbox(RUN), [decode(body) for body in bodies])


async def pieces_shuffled(nemesis: Nemesis) -> str | None:
    """Somebody else reads `in` while the collector is away, and gives back what it holds in another order."""
    world = nemesis.world
    if world.parts["collector"].pid is None:
        return None

    async def shuffle() -> None:
        async with world.parts["collector"].down():
            with contextlib.suppress(aio_pika.exceptions.AMQPError, OSError, TimeoutError):
                async with asyncio.timeout(20.0):
                    await _shuffle(world.node.amqp_url, nemesis.rng, hold_s=_seconds(nemesis.rng, 2.0))

    nemesis.lasting(shuffle())
    return "in"


async def _shuffle(url: str, rng: random.Random, *, hold_s: float) -> None:
    held: list[AbstractIncomingMessage] = []

    async def keep(message: AbstractIncomingMessage) -> None:
        held.append(message)

    async with await aio_pika.connect(url) as connection, await connection.channel() as channel:
        await channel.set_qos(prefetch_count=MOST_SHUFFLED)
        queue = await channel.get_queue(topology.inbox(RUN), ensure=False)
        tag = await queue.consume(keep)
        await asyncio.sleep(hold_s)
        await queue.cancel(tag)
        rng.shuffle(held)
        for message in held:
            await message.reject(requeue=True)


async def episode_again(nemesis: Nemesis) -> str | None:
    """A finished episode that waits for a learner, or that one has trained, on its queue once more."""
    places = await asyncio.to_thread(batch_log.scan_log, nemesis.world.run_folder.batch_log(POLICY))
    trained = [place for place in places if place.index.trained]
    if not trained:
        return None
    place, share = nemesis.rng.choice(
        [(trained[-1], 8), (nemesis.rng.choice(trained[-20:]), nemesis.rng.randint(1, 8))]
    )
    return nemesis_sends(nemesis, topology.ready(RUN, POLICY), list(batch_log.read_record(place).episodes[:share]))


async def report_again(nemesis: Nemesis) -> str | None:
    places = await asyncio.to_thread(batch_log.scan_log, nemesis.world.run_folder.batch_log(POLICY))
    if not places:
        return None
    index = nemesis.rng.choice(places).index
    report = StepReport(
        run=RUN, policy=POLICY, record=index.record, version=index.version, trained=index.trained, dropped=index.dropped
    )
    return nemesis_sends(nemesis, topology.inbox(RUN), [report])


async def task_again(nemesis: Nemesis) -> str | None:
    """Two clients attempt the slots of a group, at once or long after the group was trained."""
    fed = nemesis.world.fed[: len(nemesis.world.fed) // GROUP_SIZE * GROUP_SIZE]
    if not fed:
        return None
    first = nemesis.rng.randrange(max(0, len(fed) - RECENT_TASKS), len(fed), GROUP_SIZE)
    return nemesis_sends(nemesis, topology.tasks(RUN, KIND), fed[first : first + GROUP_SIZE])


async def ticket_again(nemesis: Nemesis) -> str | None:
    ticket = Ticket(run=RUN, ticket_id=f"{KIND}.{nemesis.rng.randint(1, 200)}", kind=KIND)
    return nemesis_sends(nemesis, topology.tickets(RUN, KIND), [ticket])


def nemesis_sends(nemesis: Nemesis, queue: str, messages: list[Message]) -> str | None:
    async def send() -> None:
        for message in messages:
            with contextlib.suppress(BrokerError):
                await nemesis.world.broker.publish(queue, message, deadline_s=20.0)

    if not messages:
        return None
    nemesis.lasting(send())
    return f"{len(messages)} on {queue}"


def queue_emptied(action: str) -> Fault:
    """An operator's slip: what the collector had sent and nobody has answered for must come again."""

    async def fault(nemesis: Nemesis) -> str | None:
        queue = nemesis.rng.choice((topology.tickets(RUN, KIND), topology.ready(RUN, POLICY)))

        async def empty() -> None:
            async with nemesis.alone("broker"):
                with contextlib.suppress(SwarmqError):  # it may be busy dying, or the queue be gone already
                    await nemesis.world.node.ctl(action, queue)

        nemesis.lasting(empty())
        return queue

    return fault


# ------------------------------------------------------------------------------------------ memory and disk


def alarm(set_it: tuple[str, ...], clear_it: tuple[str, ...], *, least_s: float = 0.2, most_s: float = 5.0) -> Fault:
    async def fault(nemesis: Nemesis) -> str | None:
        seconds = max(least_s, _seconds(nemesis.rng, most_s))

        async def raise_alarm() -> None:
            async with nemesis.alone("broker"):
                with contextlib.suppress(SwarmqError):  # it may be busy dying
                    await nemesis.world.node.ctl(*set_it)
                    await asyncio.sleep(seconds)
                for _ in range(5):
                    with contextlib.suppress(SwarmqError):
                        await nemesis.world.node.ctl(*clear_it)
                        return

        nemesis.lasting(raise_alarm())
        return f"for {seconds:.1f} s"

    return fault


async def disk_full(nemesis: Nemesis) -> str | None:
    """No byte is left where the batch log is, nor in the last blocks of what the parts print."""
    if (disk := nemesis.world.disk) is None:
        return None
    seconds = 2.0 + _seconds(nemesis.rng, 4.0)

    async def fill() -> None:
        async with nemesis.alone("disk"):
            ballast = disk / "ballast"
            try:
                await asyncio.to_thread(_fill, ballast, nemesis.world.logs)
                await asyncio.sleep(seconds)
            finally:
                ballast.unlink(missing_ok=True)

    nemesis.lasting(fill())
    return f"for {seconds:.1f} s"


def _fill(path: Path, logs: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 512):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size) == size:
                    pass
    for log in logs.glob("*.log"):
        with contextlib.suppress(OSError), log.open("ab", buffering=0) as file:
            file.write(b"\n" * (-log.stat().st_size % BLOCK_BYTES))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return 0


def _inbox(world: World) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{world.run_folder.inbox}?mode=ro", uri=True)


def _seconds(rng: random.Random, longest: float) -> float:
    """Mostly short."""
    return 0.2 + (longest - 0.2) * rng.random() ** 2


DISK_FULL = "batch log's disk full"

MEMORY = (
    ("set_vm_memory_high_watermark", "absolute", "1MB"),
    ("set_vm_memory_high_watermark", "absolute", "1500MB"),
)
LONG_ALARM_S = (18.0, 48.0)
"""Longer than a proxy waits for the broker's confirm before it refuses a call."""

CLUSTER_FAULTS: dict[str, Fault] = {
    "broker's leader killed": leader_killed,
    "broker's leader cut off": leader_cut_off,
    "broker's majority killed": majority_killed,
    "broker node stopped": node_stopped,
}
"""Only with several nodes."""
WORKER_FAULTS: dict[str, Fault] = {"collector's worker killed": worker_killed}
"""Faults that need several processes of the collector, by name."""

FAULTS: dict[str, Fault] = {
    "client killed": killed(*CLIENTS),
    "client killed around an outcome": killed_while_ending,
    "client stopped": stopped(*CLIENTS),
    "proxy killed": killed("proxy"),
    "proxy killed while it answers": killed_while_answering,
    "proxy stopped": stopped("proxy"),
    "collector killed": killed("collector"),
    "collector killed around a commit": killed_while_committing,
    "collector stopped": stopped("collector"),
    **WORKER_FAULTS,
    "learner killed": killed("learner"),
    "learner killed in a checkpoint": killed_while_checkpointing,
    "learner killed in a weight push": killed_while_pushing("learner"),
    "learner stopped": stopped("learner"),
    "learner I/O killed": io_killed,
    "learner I/O killed around the log": killed_while_logging,
    "learner I/O stopped": io_stopped,
    "engine killed": killed("engine"),
    "engine killed in a weight push": killed_while_pushing("engine"),
    "engine's core killed": core_killed,
    "engine stopped": stopped("engine"),
    "broker killed": broker_killed,
    "broker stopped": broker_stopped,
    **CLUSTER_FAULTS,
    "broker memory alarm": alarm(*MEMORY),
    "long broker memory alarm": alarm(*MEMORY, least_s=LONG_ALARM_S[0], most_s=LONG_ALARM_S[1]),
    "broker disk alarm": alarm(("set_disk_free_limit", "900000000000000"), ("set_disk_free_limit", "50MB")),
    "power lost": power_lost,
    "small file cut": file_emptied,
    "client's clock wrong": clock_wrong,
    "link cut": link_cut(),
    "proxy's link to the broker cut": link_cut("proxy-broker"),
    "link cut inside a frame": link_cut_in_a_frame,
    "link refused": link_refused,
    "link held": link_held(Way.BOTH),
    "link half-open": link_held(Way.REQUESTS, Way.ANSWERS),
    "pieces out of order": pieces_shuffled,
    "pieces sent again": piece_again,
    "episodes sent again": episode_again,
    "reports sent again": report_again,
    "tasks sent again": task_again,
    "tickets sent again": ticket_again,
    "queue deleted": queue_emptied("delete_queue"),
    "queue purged": queue_emptied("purge_queue"),
    DISK_FULL: disk_full,
}

SHARES = {
    "client killed": 70,
    "client killed around an outcome": 70,
    "client stopped": 50,
    "proxy killed": 50,
    "proxy killed while it answers": 40,
    "proxy stopped": 30,
    "collector killed": 60,
    "collector killed around a commit": 80,
    "collector stopped": 30,
    "collector's worker killed": 60,
    "learner killed": 20,
    "learner killed in a checkpoint": 15,
    "learner killed in a weight push": 20,
    "learner stopped": 20,
    "learner I/O killed": 40,
    "learner I/O killed around the log": 50,
    "learner I/O stopped": 20,
    "engine killed": 25,
    "engine's core killed": 20,
    "engine killed in a weight push": 20,
    "engine stopped": 20,
    "broker killed": 15,
    "broker stopped": 15,
    "broker's leader killed": 15,
    "broker's leader cut off": 15,
    "broker's majority killed": 10,
    "broker node stopped": 15,
    "broker memory alarm": 8,
    "long broker memory alarm": 5,
    "broker disk alarm": 8,
    "power lost": 5,
    "small file cut": 12,
    "client's clock wrong": 15,
    "link cut": 60,
    "proxy's link to the broker cut": 15,
    "link cut inside a frame": 40,
    "link refused": 20,
    "link held": 20,
    "link half-open": 30,
    "pieces out of order": 15,
    "pieces sent again": 30,
    "episodes sent again": 25,
    "reports sent again": 15,
    "tasks sent again": 30,
    "tickets sent again": 10,
    "queue deleted": 12,
    "queue purged": 12,
    DISK_FULL: 8,
}
"""Of about a thousand. Starting a learner takes ten seconds of processor time, a RabbitMQ five: those are rarer."""


def possible(world: World) -> tuple[str, ...]:
    """The faults that can be injected here: a file system of its own can be mounted by root alone."""
    impossible = set() if world.disk else {DISK_FULL}
    if len(world.cluster.nodes) == 1:
        impossible |= CLUSTER_FAULTS.keys()
    if world.job.collector.processes == 1:
        impossible |= WORKER_FAULTS.keys()
    return tuple(name for name in FAULTS if name not in impossible)


def plan(injections: int, *, seed: int, only: tuple[str, ...] = ()) -> list[str]:
    """Names of faults in random order, in the proportions of SHARES, each at least once where there is room."""
    rng = random.Random(seed)
    names = [name for name in SHARES if not only or name in only]
    wanted = sum(SHARES[name] for name in names)
    more = [name for name in names for _ in range(injections * SHARES[name] // wanted - 1)]
    rng.shuffle(more)
    more += rng.choices(names, [SHARES[name] for name in names], k=max(0, injections - len(names) - len(more)))
    chosen = names + more[: max(0, injections - len(names))]
    rng.shuffle(chosen)
    return chosen[:injections]


assert FAULTS.keys() == SHARES.keys(), "a fault has no share"
