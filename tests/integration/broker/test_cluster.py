"""A cluster of three nodes: where queues live, and what its clients do when nodes die, are cut off, or are too few."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from benchmarks.faults.partition import cut_off, heal

from support.broker import BackgroundCluster
from swarmq.broker import Broker, topology
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.errors import BrokerError
from swarmq.messages import Ticket
from swarmq.runtime.processes import reserve_port
from swarmq.up.supervision import keep_broker

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(600)]

COUNT = 200


@asynccontextmanager
async def opened(cluster: BackgroundCluster, run: str, *, replicas: int | None = None) -> AsyncIterator[AmqpBroker]:
    async with AmqpBroker.open(fast(cluster.cluster.amqp_url), name="test", deadline_s=None) as broker:
        await broker.declare(run, policies=["main"], kinds=["math"], replicas=replicas)
        yield broker


def fast(url: str) -> str:
    """With a heartbeat by which a silent node is noticed within seconds."""
    return ",".join(f"{node}?heartbeat=2" for node in url.split(","))


@asynccontextmanager
async def kept(cluster: BackgroundCluster, logs: Any, *nodes: PrivateNode) -> AsyncIterator[list[str]]:
    """Restart nodes, all by default, as `swarmq up` does; leaves when each of them accepts clients. Yields the warnings."""
    warnings: list[str] = []
    chosen, before = nodes or cluster.cluster.nodes, logs.count("started_again")
    keepers = [
        asyncio.create_task(cluster.do(keep_broker(node, warnings.append, name=node.folder.name))) for node in chosen
    ]
    try:
        yield warnings
        for node in chosen:
            async with AmqpBroker.open(node.amqp_url, name="test", deadline_s=None):
                pass
        while logs.count("started_again") - before < len(warnings):  # noqa: ASYNC110 - logged by another thread
            await asyncio.sleep(0.1)
    finally:
        for keeper in keepers:
            keeper.cancel()


async def queues(cluster: BackgroundCluster, run: str) -> dict[str, dict[str, Any]]:
    """Leader and members of the run's queues, by name."""
    for node in cluster.cluster.nodes:
        try:
            text = await cluster.do(node.ctl("list_queues", "-q", "--formatter", "json", "name", "leader", "members"))
        except BrokerError:  # it is down
            continue
        return {queue["name"]: queue for queue in json.loads(text) if f".{run}." in queue["name"]}
    raise AssertionError("no node answers")


async def leader(cluster: BackgroundCluster, run: str, queue: str) -> PrivateNode:
    name = (await queues(cluster, run))[queue]["leader"]
    return next(node for node in cluster.cluster.nodes if node.identity.node == name)


def names_all(event: dict[str, Any], nodes: list[PrivateNode]) -> bool:
    """Whether a warning says what is wrong: no node takes clients or, on RabbitMQ 4.3, the last one does and its queues are silent."""
    reason = event.get("reason", "")
    is_told = (
        "no node of the RabbitMQ cluster can be reached" in reason or "only while most of its nodes are up" in reason
    )
    return is_told and all(f"127.0.0.1:{node.identity.amqp_port}" in reason for node in nodes)


async def publish_all(broker: Broker, run: str) -> None:
    """Publish COUNT tickets one after another, each confirmed before the next."""
    for number in range(COUNT):
        ticket = Ticket(run=run, ticket_id=str(number), kind="math")
        await broker.publish(topology.tickets(run, "math"), ticket)


async def take_all(broker: Broker, run: str) -> set[str]:
    """Acknowledge tickets until all COUNT have been seen, however often each was delivered."""
    seen: set[str] = set()
    async with broker.consume(topology.tickets(run, "math"), prefetch=10) as deliveries:
        async for delivery in deliveries:
            seen.add(delivery.message.ticket_id)
            try:
                await delivery.ack()
            except BrokerError:  # delivered again
                continue
            if len(seen) == COUNT:
                return seen
    raise AssertionError("the consumer has ended")


async def test_a_queue_lives_on_three_nodes_or_on_as_many_as_asked(cluster, run_name, logs):
    async with opened(cluster, run_name), opened(cluster, f"{run_name}-one", replicas=1) as broker:
        assert {len(queue["members"]) for queue in (await queues(cluster, run_name)).values()} == {3}
        assert {len(queue["members"]) for queue in (await queues(cluster, f"{run_name}-one")).values()} == {1}
        await broker.declare(f"{run_name}-one", policies=["main"], kinds=["math"])
        assert logs.count("queue_keeps_its_group_size") == len(await queues(cluster, f"{run_name}-one"))


async def test_any_node_answers_for_the_management_api(cluster):
    api = ManagementApi.of(cluster.cluster.amqp_url, cluster.cluster.management_login)
    assert len(api.urls) == 3
    assert all(cluster.cluster.identity.user in api.users() for _ in range(4))


async def test_nothing_is_lost_when_the_leader_is_killed_and_the_node_joins_again(cluster, run_name, logs):
    async with opened(cluster, run_name) as broker, asyncio.timeout(300):
        victim = await leader(cluster, run_name, topology.tickets(run_name, "math"))
        async with kept(cluster, logs) as warnings:
            publishing = asyncio.create_task(publish_all(broker, run_name))
            os.kill(victim.pids[0], signal.SIGKILL)
            assert await take_all(broker, run_name) == {str(number) for number in range(COUNT)}
            await publishing
        assert warnings == [f"{victim.folder.name} died with status {-signal.SIGKILL}; restarting"]
        text = await cluster.do(victim.ctl("cluster_status", "--formatter", "json"))
        assert len(json.loads(text)["running_nodes"]) == 3


async def test_nothing_is_lost_when_the_leader_is_cut_off_from_the_others(cluster, run_name, logs):
    nodes = cluster.cluster.nodes
    async with opened(cluster, run_name) as broker, asyncio.timeout(300), kept(cluster, logs):
        victim = await leader(cluster, run_name, topology.tickets(run_name, "math"))
        publishing = asyncio.create_task(publish_all(broker, run_name))
        await cluster.do(cut_off(victim, nodes))
        seen = await take_all(broker, run_name)
        await publishing
        assert await leader(cluster, run_name, topology.tickets(run_name, "math")) is not victim
        await cluster.do(heal(victim, nodes))
        assert seen == {str(number) for number in range(COUNT)}


async def test_without_a_majority_publishers_wait_and_name_every_node(cluster, run_name, logs):
    nodes = cluster.cluster.nodes
    async with opened(cluster, run_name) as broker, asyncio.timeout(300):
        for node in nodes[1:]:
            await cluster.do(node.kill())
        publishing = asyncio.create_task(publish_all(broker, run_name))
        while not any(names_all(event, nodes) for event in logs.events):  # noqa: ASYNC110 - whichever event it is
            await asyncio.sleep(0.1)
        assert not publishing.done()
        async with kept(cluster, logs, nodes[0]):
            await asyncio.gather(*(cluster.do(node.start()) for node in nodes[1:]))
        assert await take_all(broker, run_name) == {str(number) for number in range(COUNT)}
        await publishing


async def test_a_dead_node_in_the_list_is_skipped_and_named(cluster, run_name, logs):
    dead = reserve_port()
    first = cluster.cluster.nodes[0].amqp_url
    urls = f"{first.rpartition(':')[0]}:{dead}/,{first}"
    for _ in range(8):  # enough to begin at the dead node once
        async with AmqpBroker.open(urls, name="test", deadline_s=None):
            pass
    event = await logs.seen("broker_node_unreachable")
    assert (event["node"], "Connect call failed" in event["reason"]) == (f"127.0.0.1:{dead}", True)
