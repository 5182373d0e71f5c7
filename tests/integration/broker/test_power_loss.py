"""A machine that loses its power takes the broker and everybody on it away at once; the run starts again all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from support.broker import discarded
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.errors import SwarmqError
from swarmq.messages import Ticket
from swarmq.up.deployment import OLD_CONSUMERS_S, check_run_is_down

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(900)]

READER = """
import asyncio, sys
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker

async def main():
    async with AmqpBroker.open(sys.argv[1], name="collector", deadline_s=None) as broker:
        await broker.declare("r", policies=["main"], kinds=["math"])
        async with broker.consume(topology.inbox("r"), prefetch=5):
            print("reads", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


async def reading(url: str) -> asyncio.subprocess.Process:
    """A collector of the run, once it reads the inbox."""
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READER, url),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert reader.stdout is not None
    assert await reader.stdout.readline() == b"reads\n"
    return reader


async def test_a_run_starts_again_after_a_power_loss_and_waits_for_what_still_reads(tmp_path):
    async with PrivateNode(tmp_path) as node:
        reader = await reading(node.amqp_url)
        async with AmqpBroker.open(node.amqp_url, name="test", deadline_s=None) as broker:
            await broker.publish(topology.tickets("r", "math"), Ticket(run="r", ticket_id="t1", kind="math"))
        for pid in (*node.pids, reader.pid):
            os.kill(pid, signal.SIGKILL)
        await reader.wait()
    told: list[str] = []
    async with (
        discarded(PrivateNode(tmp_path)) as node,
        AmqpBroker.open(node.amqp_url, name="up", deadline_s=None) as broker,
    ):
        await check_run_is_down(broker, "r", forget_s=OLD_CONSUMERS_S, report=told.append)
        told.clear()
        left = await reading(node.amqp_url)  # what had begun to stop when its broker went away, and is not done yet
        with pytest.raises(SwarmqError, match="run 'r' is already up on this broker"):
            await check_run_is_down(broker, "r", report=told.append)
        starting = asyncio.create_task(check_run_is_down(broker, "r", forget_s=OLD_CONSUMERS_S, report=told.append))
        while not told:  # noqa: ASYNC110 - a list tells nobody
            await asyncio.sleep(0.01)
        assert not starting.done()
        left.kill()
        await left.wait()
        await starting
        assert told == [
            f"broker: waiting for consumers of the previous start to leave swarmq.r.in (up to {OLD_CONSUMERS_S:.0f} s)"
        ]
        async with broker.consume(topology.tickets("r", "math"), prefetch=5) as deliveries:
            assert (await anext(deliveries)).message.ticket_id == "t1"
