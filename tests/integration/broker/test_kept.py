"""A RabbitMQ whose database has ended, as on a full disk: its process lives, and it resets every connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node import PrivateNode
from swarmq.messages import EpisodeEnd
from swarmq.up import keeping

pytestmark = [pytest.mark.broker, pytest.mark.asyncio(loop_scope="module")]


async def test_a_broker_that_lives_and_serves_nobody_is_started_again_with_its_data(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "LOOK_EVERY_S", 0.1)
    inbox, told = topology.inbox(run_name), asyncio.Queue[str]()
    message = EpisodeEnd(run=run_name, episode_id="e", status="aborted")
    async with PrivateNode(tmp_path) as node, asyncio.timeout(200):
        async with AmqpBroker.open(node.amqp_url, name="x", deadline_s=120.0) as broker:
            await broker.declare(run_name, policies=["main"], kinds=["math"])
            await broker.publish(inbox, message)
        before = node.pids
        keeper = asyncio.create_task(keeping.keep_broker(node, told.put_nowait))
        await asyncio.sleep(5 * keeping.LOOK_EVERY_S)
        assert told.empty(), "it serves"
        await node.ctl("eval", "exit(whereis(mnesia_sup), kill).")
        assert "has taken no connections" in await told.get()
        async with (
            AmqpBroker.open(node.amqp_url, name="x", deadline_s=None) as broker,
            broker.consume(inbox, prefetch=1) as deliveries,
        ):
            assert (await anext(deliveries)).message == message
        assert not set(before) & set(node.pids)
        keeper.cancel()
