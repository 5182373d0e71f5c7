"""Dead queues: queues that RabbitMQ lists but cannot bring up after a crash in the middle of their deletion.

A dead queue looks empty, confirms nothing and delivers nothing. It is found by its depth and by probes on separate connections, and
deleted; the collector then declares it again and sends its content again.
"""

from __future__ import annotations

from collections.abc import Sequence

from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import ChannelNotFoundEntity

from swarmq.broker.protocol import Depth
from swarmq.broker.session import Session, open_session
from swarmq.errors import BrokerError, BrokerLostError
from swarmq.runtime.amqp_urls import split_nodes

PROBES = 2
PROBE_S = 5.0
"""Maximum seconds that a probe waits for an answer; a live empty queue answers at once."""


async def delete_if_dead(session: Session, url: str, queue: str, *, name: str) -> bool:
    """Delete `queue` and return True if it is dead; `name`: name of the probes' connections. See `Broker.delete_if_dead`.

    In a cluster, a queue that lacks a majority of its nodes looks dead, too, and RabbitMQ would delete it with its messages. So no
    queue of a cluster counts as dead.
    """
    if len(split_nodes(url)) > 1:
        return False
    depth = (await session.call(read_depths(session.connection, [queue]))).get(queue)
    if depth != Depth(0, 0):
        return False
    for _ in range(PROBES):  # a broken connection does not prove a dead queue
        if await is_alive(url, queue, name=name):
            return False
    await session.call(session.channel.queue_delete(queue))
    return True


async def is_alive(url: str, queue: str, *, name: str) -> bool:
    """Return whether a queue answers `basic.get`. For a dead queue, RabbitMQ 3.10 closes the connection and 4.0 stays silent."""
    try:
        async with open_session(url, name=name) as session:
            source = await session.channel.get_queue(queue, ensure=False)
            await session.call(source.get(fail=False, timeout=None), answer_s=PROBE_S)
    except BrokerLostError:
        return False
    except BrokerError:  # a refusal, e.g. of a second consumer, comes from a live queue
        return True
    return True


async def read_depths(connection: AbstractConnection, queues: Sequence[str]) -> dict[str, Depth]:
    """Return the depth of each queue that exists."""
    found: dict[str, Depth] = {}
    channel = await connection.channel(publisher_confirms=False)
    for name in queues:
        try:
            answer = (await channel.declare_queue(name, passive=True)).declaration_result
        except ChannelNotFoundEntity:  # which closes the channel
            channel = await connection.channel(publisher_confirms=False)
        else:
            found[name] = Depth(answer.message_count or 0, answer.consumer_count or 0)
    await channel.close()
    return found
