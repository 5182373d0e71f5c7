"""Transport of the begins and ends of episodes to the broker: by AMQP, or through the proxy for clients with HTTP only.

    BrokerTransport   ticket ──> EpisodeBegin confirmed ──> ticket acked
    HttpTransport     the proxy does the same and answers after the confirmation (http_transport.py)

Both return when the broker has confirmed the message, and retry after transient errors. Repeated messages change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol, Self

import msgspec

from swarmq.broker import Broker, TicketSource, topology
from swarmq.errors import SwarmqError
from swarmq.keys import Invite
from swarmq.messages import EpisodeBegin, EpisodeEnd
from swarmq.runtime.slow_waits import warn_if_slow


class Transport(Protocol):
    """Sender of begins and ends, over RabbitMQ or HTTP."""

    async def begin(self, begin: EpisodeBegin) -> None:
        """Publish the begin, with a ticket if one is needed, and wait for its confirmation. Raises BrokerError, EpisodeError."""

    async def end(self, end: EpisodeEnd) -> None:
        """Publish the end and wait for its confirmation. Raises BrokerError, EpisodeError."""

    def refuse(self, error: SwarmqError) -> None:
        """Raise `error` in all calls that wait for a ticket."""

    def group_size_of(self, kind: str) -> int | None:
        """Return the number of attempts in a group according to the newest ticket, or None before the first ticket."""

    def base_url_of(self, episode_id: str) -> str:
        """Return the URL of the proxy that serves the episode, which must have begun."""


class BrokerTransport:
    """Transport over AMQP."""

    def __init__(self, broker: Broker, invite: Invite, tasks: asyncio.TaskGroup) -> None:
        self._broker = broker
        self._invite = invite
        self._tasks = tasks
        self._inbox = topology.inbox(invite.run)
        self._ticket_sources: dict[str, TicketSource] = {}
        self._proxies: tuple[str, ...] = ()
        self._serving: list[asyncio.Task[None]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, broker: Broker, invite: Invite) -> AsyncIterator[Self]:
        async with asyncio.TaskGroup() as tasks:
            transport = cls(broker, invite, tasks)
            try:
                yield transport
            finally:
                for serving in transport._serving:
                    serving.cancel()

    async def begin(self, begin: EpisodeBegin) -> None:
        if begin.mode == "eval" or not self._invite.ticketed:
            await self._publish(begin)
            return
        async with self._ticket_source(begin.kind).ticket(
            first=begin.attempt > 0
        ) as ticket:  # retries first: groups wait for them
            self._proxies = ticket.proxies
            await self._publish(msgspec.structs.replace(begin, ticket_id=ticket.ticket_id))

    async def end(self, end: EpisodeEnd) -> None:
        await self._publish(end)

    def refuse(self, error: SwarmqError) -> None:
        for source in self._ticket_sources.values():
            source.refuse(error)

    def group_size_of(self, kind: str) -> int | None:
        source = self._ticket_sources.get(kind)
        return source.group_size if source else None

    def base_url_of(self, episode_id: str) -> str:
        return self._invite.base_url_of(episode_id, now=self._proxies)

    def _ticket_source(self, kind: str) -> TicketSource:
        source = self._ticket_sources.get(kind)
        if source is None:
            source = self._ticket_sources[kind] = TicketSource(
                self._broker, topology.tickets(self._invite.run, kind), kind
            )
            self._serving.append(self._tasks.create_task(source.serve()))
        return source

    async def _publish(self, message: EpisodeBegin | EpisodeEnd) -> None:
        with warn_if_slow("waiting_for_broker", piece=type(message).__name__, episode=message.episode_id):
            await self._broker.publish(self._inbox, message)
