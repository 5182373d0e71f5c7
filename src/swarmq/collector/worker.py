"""The process of a worker; `workers.py` shows what it does for the collector."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from itertools import takewhile

import structlog

from swarmq.broker import Broker, Deliveries, Delivery
from swarmq.broker.amqp import AmqpBroker
from swarmq.collector import workers
from swarmq.collector.workers import ConsumerFailed, Done, FromWorker, Received
from swarmq.errors import BrokerError, BrokerLostError
from swarmq.messages import Message, RefusedTurn, encode
from swarmq.runtime import event_loop, logs

log = structlog.get_logger()

BATCH = 200
"""Maximum number of messages in a record to the collector."""


def main() -> None:
    """Run the process; its last argument is the file descriptor of the socket to the collector."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the collector closes the socket
    event_loop.run(_run(socket.socket(fileno=int(sys.argv[-1]))))


async def _run(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    hello = await workers.read_command(reader)
    assert isinstance(hello, workers.Hello)
    silent_s = hello.silent_s
    logs.configure(role=hello.name, run=hello.run)
    try:
        async with AmqpBroker.open(hello.url, name=hello.name, deadline_s=None) as broker:
            await Worker(broker, writer).run(reader, silent_s=silent_s)
    except* EOFError:
        pass
    except* TimeoutError:
        log.warning("collector_silent", seconds=silent_s, action="this worker ends, so that a standby may take over")
    finally:
        writer.close()


class Worker:
    """Carries out the collector's records until the collector is gone."""

    def __init__(self, broker: Broker, writer: asyncio.StreamWriter) -> None:
        self._broker, self._writer = broker, writer
        self._received = 0
        """Number of messages that the collector was sent."""
        self._consumed: dict[str, tuple[Deliveries, dict[int, Delivery]]] = {}
        """Queue -> its deliveries, and those of them that the collector has not acknowledged, by number."""

    async def run(self, reader: asyncio.StreamReader, *, silent_s: float) -> None:
        """Raises EOFError when the collector is gone, TimeoutError when it is silent for `silent_s` seconds."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                async with asyncio.timeout(silent_s):
                    command = await workers.read_command(reader)
                match command:
                    case workers.Consume(queue, prefetch):
                        tasks.create_task(self._consume(queue, prefetch))
                    case workers.Acknowledge(queue, through):
                        await self._acknowledge(queue, through)
                    case workers.DeadLetter(token, queue, number, reason):
                        await self._dead_letter(queue, number, reason)
                        await self._send(Done(token))
                    case workers.Publish(token, queue, message, deadline_s):
                        tasks.create_task(self._publish(token, queue, message, deadline_s))
                    case workers.Forward(token, queue, rollout, deadline_s):
                        tasks.create_task(self._publish(token, queue, rollout.assemble(), deadline_s))
                    case workers.Emit(events):
                        tasks.create_task(self._broker.emit(*events))

    async def _consume(self, queue: str, prefetch: int) -> None:
        try:
            async with self._broker.consume(queue, prefetch=prefetch) as deliveries:
                _, held = self._consumed[queue] = deliveries, {}
                while batch := await deliveries.batch(BATCH):
                    first = self._received
                    self._received += len(batch)
                    held.update(enumerate(batch, first))
                    messages = [(_body(delivery), delivery.arrival.sender) for delivery in batch]
                    await self._send(Received(queue, first, messages))
        except BrokerError as error:
            await self._send(ConsumerFailed(queue, _name(error), str(error)))

    async def _acknowledge(self, queue: str, through: int) -> None:
        deliveries, held = self._consumed[queue]
        settled = [held.pop(number) for number in list(takewhile(lambda number: number <= through, held))]
        with suppress(BrokerLostError):  # redeliveries change nothing
            if settled:
                await deliveries.ack_through(settled[-1])

    async def _dead_letter(self, queue: str, number: int, reason: str) -> None:
        _, held = self._consumed[queue]
        if delivery := held.get(number):
            with suppress(BrokerLostError):
                await self._broker.dead_letter(delivery, reason)

    async def _publish(self, token: int, queue: str, message: Message, deadline_s: float) -> None:
        try:
            await self._broker.publish(queue, message, deadline_s=deadline_s)
        except BrokerError as error:
            await self._send(Done(token, _name(error), str(error)))
        else:
            await self._send(Done(token))

    async def _send(self, record: FromWorker) -> None:
        await workers.send(self._writer, record)


def _body(delivery: Delivery) -> bytes:
    """Return the message as the collector is to decode it."""
    return encode(delivery.message) if isinstance(delivery.message, RefusedTurn) else delivery.body


def _name(error: BrokerError) -> str:
    """Return the name of an error that the collector handles. Raises any other one."""
    if type(error).__name__ not in workers.ERRORS:
        raise error
    return type(error).__name__


if __name__ == "__main__":
    main()
