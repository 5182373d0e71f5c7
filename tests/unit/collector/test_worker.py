"""A worker consumes for its collector."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import msgspec
import pytest

from swarmq.broker import topology
from swarmq.collector import workers
from swarmq.collector.worker import Worker
from swarmq.collector.workers import Acknowledge, Consume, FromWorker, Received
from swarmq.runtime.frames import read_frame
from swarmq.testing import MemoryBroker

IN = topology.inbox("r")
_records = msgspec.msgpack.Decoder(FromWorker)


@pytest.fixture
async def broker(say):
    broker = MemoryBroker()
    await broker.declare("r", policies=["main"], kinds=["math"])
    for number in range(5):
        await broker.publish(IN, say.turn(f"{number}"))
    return broker


@pytest.fixture
async def collector(broker):
    """The collector's end of the socket to a worker: (reader, writer)."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    working = asyncio.create_task(Worker(broker, writer).run(reader, silent_s=60.0))
    reader_of_collector, writer_of_collector = await asyncio.open_connection(sock=ours)
    yield reader_of_collector, writer_of_collector
    writer_of_collector.close()
    with contextlib.suppress(ExceptionGroup):
        await working
    writer.close()


async def receive(reader, num):
    """The next messages, by number."""
    found = {}
    async with asyncio.timeout(60):  # a former consumer would hold messages for ever
        while len(found) < num:
            record = _records.decode(await read_frame(reader))
            assert isinstance(record, Received)
            found |= enumerate((body for body, _ in record.messages), record.first)
    return found


async def test_a_queue_that_is_consumed_again_has_one_consumer_with_the_new_number_of_messages(collector, broker):
    reader, writer = collector
    await workers.send(writer, Consume(IN, 2))
    first = await receive(reader, 2)
    await workers.send(writer, Consume(IN, 3))
    again = await receive(reader, 3)
    assert list(again.values())[:2] == list(first.values()), "what is not acknowledged comes again"
    assert len(broker.stored(IN)) == 2, "the former consumer holds nothing"
    await workers.send(writer, Acknowledge(IN, max(again)))
    assert len(await receive(reader, 2)) == 2
