"""A RabbitMQ whose database has ended, as on a full disk: its process lives, and it resets every connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.broker import discarded
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.messages import EpisodeEnd
from swarmq.up import supervision

pytestmark = [pytest.mark.broker, pytest.mark.asyncio(loop_scope="module")]


async def test_a_broker_that_lives_and_serves_nobody_is_started_again_with_its_data(
    tmp_path: Path, run_name: str
) -> None:
    inbox, told = topology.inbox(run_name), asyncio.Queue[str]()
    message = EpisodeEnd(run=run_name, episode_id="e", status="aborted")
    async with discarded(PrivateNode(tmp_path)) as node, asyncio.timeout(200):
        async with AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker:
            await broker.declare(run_name, policies=["main"], kinds=["math"])
            await broker.publish(inbox, message)
        before = node.pids
        keeper = asyncio.create_task(supervision.keep_broker(node, told.put_nowait, check_every_s=0.1))
        await asyncio.sleep(0.5)
        assert told.empty(), "it serves"
        await node.ctl("eval", "exit(whereis(mnesia_sup), kill).")
        assert "has accepted no connections" in await told.get()
        async with (
            AmqpBroker.open(node.amqp_url, name="x", deadline_s=None) as broker,
            broker.consume(inbox, prefetch=1) as deliveries,
        ):
            assert (await anext(deliveries)).message == message
        assert not set(before) & set(node.pids)
        keeper.cancel()


@pytest.mark.parametrize("damaged", [["node.json"], ["node.json", "rabbitmq.conf", "home/.erlang.cookie"]])
async def test_a_node_whose_small_files_are_empty_starts_with_its_data(
    tmp_path: Path, run_name: str, damaged: list[str]
) -> None:
    """What a power loss left of files that were rewritten without a rename."""
    inbox = topology.inbox(run_name)
    message = EpisodeEnd(run=run_name, episode_id="e", status="aborted")
    async with asyncio.timeout(400):
        node = PrivateNode(tmp_path)
        async with node, AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker:
            url = node.amqp_url
            await broker.declare(run_name, policies=["main"], kinds=["math"])
            await broker.publish(inbox, message)
        for name in damaged:
            (tmp_path / name).chmod(0o600)
            (tmp_path / name).write_bytes(b"")
        async with (
            discarded(PrivateNode(tmp_path)) as node,
            AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker,
            broker.consume(inbox, prefetch=1) as deliveries,
        ):
            assert (await anext(deliveries)).message == message
            assert (node.amqp_url == url) == (damaged == ["node.json"]), "a port and password that are known are kept"
