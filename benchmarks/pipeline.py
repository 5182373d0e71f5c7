"""What an episode costs between proxy and learner: bytes of every message, and processor time of RabbitMQ and the collector.

The messages are those of real runs: turns go through the proxy's recorder (wire.py), and begins, reports and ends stand around them.
They are published to a private RabbitMQ of one or three nodes, a real collector joins them, and this process takes the rollouts from
`ready` and reports them as trained, as a learner does. Counted is processor time, which a busy machine changes less than the time by
the clock. Connections are opened as clients open them, and RabbitMQ's memory is read before and after. Example:

    python -m benchmarks.pipeline
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.wire import Episode
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.cluster import PrivateCluster
from swarmq.config import BrokerSettings, SwarmJob
from swarmq.messages import (
    DeliveryReport,
    EpisodeBegin,
    EpisodeEnd,
    Message,
    Rollout,
    Slot,
    StepReport,
    Turn,
    encode,
    new_id,
)
from swarmq.runtime.processes import die_with_parent, stop_group

RUN, POLICY, KIND = "pipeline", "main", "math"
GROUP_SIZE, GROUPS_PER_BATCH = 8, 8
GROUPS_AT_ONCE = 16
NODES = (1, 3)
STEP_VERSION = 1


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode's calls add to its context, in tokens."""

    turns: int
    prompt: int
    """New tokens of a turn's prompt."""
    sampled: int

    @property
    def trained(self) -> int:
        return self.turns * self.sampled


SHAPES = {
    "question": Shape(turns=1, prompt=1000, sampled=250),
    "chat": Shape(turns=8, prompt=160, sampled=128),
    "agent": Shape(turns=10, prompt=1000, sampled=250),
}
"""`chat` has the turns and sampled tokens of the loop benchmark, and about as many tokens in all."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode of a shape took, on average."""

    shape: str
    nodes: int
    episodes: int
    messages: float
    broker_ms: float
    """Processor time of all nodes together."""
    collector_ms: float
    bytes: dict[str, float]
    """Record -> bytes of all such messages."""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens that each measurement trains, or more")
    parser.add_argument("--least", type=int, default=512, help="fewest episodes of a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=300)
    arguments = parser.parse_args()
    costs, figures = [], dict[str, float]()
    for name, shape in SHAPES.items():
        episodes = max(arguments.least, arguments.tokens // shape.trained) // GROUP_SIZE * GROUP_SIZE
        for nodes in NODES:
            found = [asyncio.run(measure(name, nodes, episodes)) for _ in range(arguments.repeats)]
            costs += found
            suffix = f"{name}_{nodes}_nodes" if nodes > 1 else name
            figures[f"broker_ms_{suffix}"] = statistics.median(cost.broker_ms for cost in found)
            figures[f"collector_ms_{suffix}"] = statistics.median(cost.collector_ms for cost in found)
            print(report.table(["", "ms"], list(figures.items())[-2:]), flush=True)
        figures[f"bytes_per_trained_token_{name}"] = sum(found[0].bytes.values()) / shape.trained
    figures["broker_kib_per_connection"] = asyncio.run(measure_connections(arguments.connections))
    detail = {
        "shapes": {name: msgspec.to_builtins(shape) for name, shape in SHAPES.items()},
        "costs": [msgspec.to_builtins(cost) for cost in costs],
        "connections": arguments.connections,
        "load": os.getloadavg(),
    }
    report.save("pipeline", figures, detail=detail, out=arguments.out)


async def converse(shape: Shape) -> list[Turn]:
    """Return the turns of one episode, as a proxy publishes them."""
    episode = Episode(sampled=shape.sampled, observed=shape.prompt)
    await episode.converse(shape.turns, episode.said("system", 0), "solver")
    return episode.turns


def group(task: str, turns: list[Turn]) -> Iterator[Message]:
    """Yield the messages of a group whose members go on side by side, with one delivery report for each row of turns."""
    names = [new_id() for _ in range(GROUP_SIZE)]
    calls = [[new_id() for _ in turns] for _ in names]
    for repeat, name in enumerate(names):
        slot = Slot(task_id=task, repeat=repeat)
        yield EpisodeBegin(
            run=RUN,
            episode_id=name,
            slot=slot,
            kind=KIND,
            group_size=GROUP_SIZE,
            policies=(POLICY,),
            client_id="agents-on-gpu-host-3",
        )
    for number, turn in enumerate(turns):
        for name, ids in zip(names, calls, strict=True):
            parent = ids[number - 1] if number else None
            here = {"run": RUN, "episode_id": name, "policy": POLICY, "call_id": ids[number], "parent": parent}
            yield msgspec.structs.replace(turn, **here, versions=_first_version(turn))
        sent = {name: (ids[number],) for name, ids in zip(names, calls, strict=True)}
        yield DeliveryReport(run=RUN, served_id=new_id(), sent=sent)
    for repeat, name in enumerate(names):
        yield EpisodeEnd(run=RUN, episode_id=name, status="finished", rewards={POLICY: repeat / GROUP_SIZE})


def _first_version(turn: Turn) -> Any:
    return tuple(msgspec.structs.replace(span, version=0) for span in turn.versions)


async def measure(name: str, nodes: int, episodes: int) -> Cost:
    """Send so many episodes through broker and collector."""
    turns = await converse(SHAPES[name])
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmq-pipeline-")))
        cluster = await stack.enter_async_context(PrivateCluster(folder / "broker", BrokerSettings(nodes=nodes)))
        collector = await start_collector(folder, cluster.amqp_url)
        stack.push_async_callback(stop_group, collector, grace_s=5.0)
        broker = await stack.enter_async_context(AmqpBroker.open(cluster.amqp_url, name="pipeline"))
        await broker.declare(RUN, policies=[POLICY], kinds=[KIND])
        async with broker.events(RUN) as events:
            async with asyncio.timeout(60):
                await anext(event async for event in events if event.name == "state" and event.source == "collector")

        def spent() -> tuple[float, float]:
            return sum(report.processor_s(node.pids[0]) for node in cluster.nodes), report.processor_s(collector.pid)

        sizes: dict[str, int] = {}
        count = 0
        slots = asyncio.Semaphore(GROUPS_AT_ONCE)

        async def publish(number: int) -> None:
            nonlocal count
            async with slots:
                for message in group(f"t{number}", turns):
                    count += 1
                    add(sizes, message)
                    await broker.publish(topology.inbox(RUN), message)

        before = spent()
        async with asyncio.timeout(900), asyncio.TaskGroup() as tasks:
            trained = tasks.create_task(train(broker, episodes, sizes))
            for number in range(episodes // GROUP_SIZE):
                tasks.create_task(publish(number))
        count += episodes + trained.result()
        after = spent()
    broker_s, collector_s = (late - early for early, late in zip(before, after, strict=True))
    return Cost(
        shape=name,
        nodes=nodes,
        episodes=episodes,
        messages=count / episodes,
        broker_ms=1000 * broker_s / episodes,
        collector_ms=1000 * collector_s / episodes,
        bytes={kind: size / episodes for kind, size in sizes.items()},
    )


async def train(broker: AmqpBroker, episodes: int, sizes: dict[str, int]) -> int:
    """Take all rollouts, and report each batch; return the number of reports."""
    batch: list[str] = []
    taken = reports = 0
    async with broker.consume(topology.ready(RUN, POLICY), prefetch=256) as deliveries:
        async for delivery in deliveries:
            assert isinstance(delivery.message, Rollout)
            add(sizes, delivery.message)
            taken += 1
            batch.append(delivery.message.episode_id)
            await delivery.ack()
            if len(batch) == GROUP_SIZE * GROUPS_PER_BATCH or taken == episodes:
                reports += 1
                done = StepReport(run=RUN, policy=POLICY, record=reports, version=STEP_VERSION, trained=tuple(batch))
                add(sizes, done)
                await broker.publish(topology.inbox(RUN), done)
                batch = []
            if taken == episodes:
                break
    return reports


def add(sizes: dict[str, int], message: Message) -> None:
    kind = type(message).__name__
    sizes[kind] = sizes.get(kind, 0) + len(encode(message))


async def start_collector(folder: Path, amqp_url: str) -> asyncio.subprocess.Process:
    tree = {
        "run": RUN,
        "folder": str(folder / "runs"),
        "broker": {"url": amqp_url},
        "mix": {KIND: 1.0},
        "groups": {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH},
        "policies": {POLICY: {"model": "none", "engine": {"urls": ["http://127.0.0.1:9"]}}},
    }
    path = folder / "job.toml"
    path.write_text(SwarmJob.build(tree).to_toml())
    with (folder / "collector.log").open("ab") as sink:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarmq", "collector", str(path)),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            preexec_fn=die_with_parent,
        )


async def measure_connections(count: int) -> float:
    """Return the KiB of RabbitMQ's memory for each further connection that has published."""
    with tempfile.TemporaryDirectory(prefix="swarmq-pipeline-") as folder:
        async with PrivateCluster(Path(folder), BrokerSettings()) as cluster, AsyncExitStack() as stack:
            pid = cluster.nodes[0].pids[0]
            brokers = []
            for number in range(count + 1):
                broker = await stack.enter_async_context(AmqpBroker.open(cluster.amqp_url, name=f"client.{number}"))
                if not number:
                    await broker.declare(RUN, policies=[POLICY], kinds=[KIND])
                await broker.publish(topology.inbox(RUN), next(group("t", [])))
                brokers.append(broker)
                if not number:
                    before = resident_kib(pid)
            return (resident_kib(pid) - before) / count


def resident_kib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


if __name__ == "__main__":
    main()
