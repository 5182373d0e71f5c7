"""One AMQP connection with one channel, discarded as a whole on any fault.

A closed connection, a closed channel, a consumer cancelled by the broker and a missed deadline all end the session: `lost`.
Every call to the broker goes through `Session.call`, which ends when the session does. The call runs in a task of its own,
because aio-pika ends calls on dead connections with a CancelledError although nobody cancelled; `Session.call` turns it into a
BrokerLostError.

aio-pika's robust connections would reconnect by themselves with the same consumer tags, without telling the holders of old
deliveries. `BrokerLink` opens a new session instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import DeliveryError
from yarl import URL

from swarmq.broker.error_mapping import combine_failures, describe_closing, extract_cause, map_error
from swarmq.broker.failover import NodeFailures
from swarmq.errors import BrokerError, BrokerLostError
from swarmq.runtime.amqp_urls import redact_node, split_nodes
from swarmq.runtime.logs import log

HEARTBEAT_S = 15
"""Heartbeat interval in seconds; a connection that is silent for three intervals is closed. `?heartbeat=` in the URL
overrides it."""

CONNECT_S = 8.0
"""Time limit in seconds for opening the connection, and again for its channel."""

ANSWER_S = 15.0
"""Time limit in seconds for an answer of the broker, confirms included."""

NOTICE_S = 2.0
"""Seconds after which a pending operation checks whether an alarm of the broker blocks it, and logs that."""

CLOSE_S = 2.0

RECYCLED_PREFIX = "recycled"
"""Prefix of the reason when swarmq itself ends a session to open another."""

T = TypeVar("T")

# swarmq logs faults itself, once; an application that configures logging still sees the driver's own messages.
for driver in ("aio_pika", "aiormq"):
    logging.getLogger(driver).addHandler(logging.NullHandler())


node_failures = NodeFailures()


@asynccontextmanager
async def open_session(url: str, *, name: str) -> AsyncIterator[Session]:
    """Open a session with the first node of `url` that can be reached.

    Raises BrokerLostError if no node can be reached, BrokerError if no node accepts and one refuses.
    """
    node, session = await _open_any(split_nodes(url), name)
    try:
        yield session
    finally:
        if session.lost.done() and not session.lost.result().startswith(RECYCLED_PREFIX):
            node_failures.add(node)
        await _close_quietly(_disconnect(session))


async def _open_any(nodes: tuple[str, ...], name: str) -> tuple[str, Session]:
    failures: dict[str, BrokerError] = {}
    for node in node_failures.order(nodes):
        try:
            session = await _open(node, name, nodes)
        except BrokerError as error:
            node_failures.add(node)
            failures[node] = error
            continue
        for failed, failure in failures.items():
            node_failures.skip(failed, extract_cause(failure))
        node_failures.remove(node)
        return node, session
    raise combine_failures({redact_node(node): failure for node, failure in failures.items()})


async def _open(node: str, name: str, nodes: tuple[str, ...]) -> Session:
    where = redact_node(node)
    query = {"heartbeat": str(HEARTBEAT_S), **URL(node).query, "name": name}
    connection = aio_pika.Connection(URL(node).with_query(query))
    try:
        await _await_open(connection.connect(), where)
        return await _await_open(Session.on(connection, where, [redact_node(one) for one in nodes]), where)
    except BaseException:
        await _close_quietly(connection.close())
        raise


class Session:
    """An open connection and channel; the future `lost` gets the reason when the session has ended."""

    def __init__(
        self,
        connection: AbstractConnection,
        channel: AbstractChannel,
        underlay: Any,
        where: str,
        nodes: Sequence[str],
    ) -> None:
        self.connection = connection
        self.channel = channel
        self.where = where
        self._nodes = nodes
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.underlay = underlay
        self._gates: set[asyncio.Future[None]] = set()
        self._blocked = False
        underlay.connection.closing.add_done_callback(
            lambda ended: self.fail(describe_closing(ended, "connection closed"))
        )
        underlay.closing.add_done_callback(lambda ended: self.fail(describe_closing(ended, "channel closed")))
        underlay.on_consumer_cancel_callbacks.add(lambda _: self.fail("the broker cancelled the consumer"))

    @classmethod
    async def on(cls, connection: AbstractConnection, where: str, nodes: Sequence[str]) -> Self:
        """Open a channel on `connection`, and return the session. `where`: `host:port/vhost` of the node, for messages. `nodes`: the
        same of all nodes of its cluster."""
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        # Uses the channel below aio-pika, which does not report that the broker cancelled a consumer or blocks the connection,
        # and never calls close callbacks that are registered after the close.
        return cls(connection, channel, await channel.get_underlay_channel(), where, nodes)

    def fail(self, reason: str) -> None:
        """End the session; every call in flight ends with BrokerLostError."""
        if not self.lost.done():
            self.lost.set_result(reason)
            for gate in self._gates:
                _open_gate(gate)

    async def call(self, operation: Coroutine[Any, Any, T], *, answer_s: float = ANSWER_S) -> T:
        """Run `operation` and return its result; while the broker's alarm blocks it, wait and log that.

        Raises BrokerLostError if the session ends first, another BrokerError if the broker refuses. A message that is returned
        or rejected raises the driver's DeliveryError and leaves the session open.
        """
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(operation)
        task.add_done_callback(lambda _: _open_gate(gate))
        self._gates.add(gate)
        try:
            if not self.lost.done():
                await self._answer(gate, answer_s)
            if task.done() and not task.cancelled():
                return task.result()
            self.fail("the call was cut off")
            raise self.lost_error()
        except (DeliveryError, BrokerLostError):
            raise
        except Exception as error:
            refusal = map_error(error, self.where)
            self.fail(str(refusal))
            raise refusal from error
        finally:
            self._gates.discard(gate)
            _abandon(task)

    def lost_error(self) -> BrokerLostError:
        return BrokerLostError(f"the session with RabbitMQ at {self.where} has ended: {self.lost.result()}")

    @property
    def server(self) -> Mapping[str, Any]:
        """Server properties from the handshake, e.g. the version."""
        properties: Mapping[str, Any] = self.underlay.connection.server_properties
        return properties

    async def is_blocked(self) -> bool:
        """Return whether the broker's memory or disk alarm blocks this connection."""
        try:
            async with asyncio.timeout(0):  # `ready` returns without waiting unless it is blocked
                await self.underlay.connection.ready()
        except TimeoutError:
            return True
        return False

    async def _answer(self, gate: asyncio.Future[None], answer_s: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + answer_s
        while not gate.done():
            await asyncio.wait({gate}, timeout=min(NOTICE_S, answer_s))
            if gate.done():
                return
            if await self.is_blocked():
                await self._sit_out_alarm()
                deadline = clock() + answer_s
            elif clock() >= deadline:
                hint = f"; {self.majority_hint}" if self.is_in_cluster else ""
                self.fail(f"no answer within {answer_s:g} s{hint}")

    @property
    def is_in_cluster(self) -> bool:
        """Whether the broker's URL lists several nodes."""
        return len(self._nodes) > 1

    @property
    def majority_hint(self) -> str:
        """Advice that ends messages about a queue of a cluster that does not work."""
        return f"a queue works only while most of its nodes are up: check {', '.join(self._nodes)}"

    async def _sit_out_alarm(self) -> None:
        if not self._blocked:
            self._blocked = True
            log.warning("publisher_blocked", broker=self.where, reason="the broker has a memory or disk alarm")
        unblocked = asyncio.create_task(self.underlay.connection.ready())
        try:
            await asyncio.wait({unblocked, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unblocked.cancel()
        if self._blocked and not self.lost.done():
            self._blocked = False
            log.info("publisher_unblocked", broker=self.where)


async def _await_open(opening: Coroutine[Any, Any, T], where: str) -> T:
    """Await `opening` and return its result. Raises BrokerLostError or BrokerError instead of the driver's stray
    CancelledError."""
    task = asyncio.create_task(opening)
    try:
        await asyncio.wait({task}, timeout=CONNECT_S)
        if not task.done():
            raise TimeoutError(f"no answer within {CONNECT_S:g} s")
        if task.cancelled():
            raise ConnectionError("cut off while connecting")
        return task.result()
    except Exception as error:
        raise map_error(error, where) from error
    finally:
        _abandon(task)


async def _disconnect(session: Session) -> None:
    """Close the channel, then the connection, so that queued acknowledgements are sent first."""
    if not session.lost.done():
        session.fail("closed by us")
        await _close_quietly(session.channel.close())
    await session.connection.close()


async def _close_quietly(operation: Awaitable[Any]) -> None:
    """Await a close for at most `CLOSE_S`, and ignore its failure: the connection is gone either way."""
    task = asyncio.ensure_future(operation)
    try:
        await asyncio.wait({task}, timeout=CLOSE_S)
    finally:
        _abandon(task)


def _open_gate(gate: asyncio.Future[None]) -> None:
    if not gate.done():
        gate.set_result(None)


def _abandon(task: asyncio.Future[Any]) -> None:
    """Cancel the task if it still runs, and mark its exception as retrieved."""
    task.cancel()
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
