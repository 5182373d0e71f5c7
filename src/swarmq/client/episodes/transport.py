"""How begins and ends of episodes reach the broker: by AMQP, or through the proxy where only HTTP gets out.

    BrokerTransport   ticket ──> EpisodeBegin confirmed ──> ticket acked
    HttpTransport     the proxy does the same and answers after the confirm (http_transport.py)

Both return when the broker has confirmed and wait out what passes. Sending the same again changes nothing.
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
    """See the module."""

    async def begin(self, begin: EpisodeBegin) -> None:
        """Returns when the begin is confirmed, with a ticket where one is needed. Raises BrokerError, EpisodeError."""

    async def end(self, end: EpisodeEnd) -> None:
        """Returns when the end is confirmed. Raises BrokerError, EpisodeError."""

    def refuse(self, error: SwarmqError) -> None:
        """Let those who wait for a ticket go."""

    def group_size_of(self, kind: str) -> int | None:
        """Attempts that make a group now, where tickets have said so."""

    def base_url_of(self, episode_id: str) -> str:
        """The proxy for the agent of an episode that has begun."""


class BrokerTransport:
    """By AMQP."""

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
        ) as ticket:  # its group may wait for it
            self._proxies = ticket.proxies
            await self._publish(msgspec.structs.replace(begin, ticket_id=ticket.ticket_id))

    async def end(self, end: EpisodeEnd) -> None:
        await self._publish(end)

    def refuse(self, error: SwarmqError) -> None:
        for desk in self._ticket_sources.values():
            desk.refuse(error)

    def group_size_of(self, kind: str) -> int | None:
        desk = self._ticket_sources.get(kind)
        return desk.group_size if desk else None

    def base_url_of(self, episode_id: str) -> str:
        return self._invite.base_url_of(episode_id, now=self._proxies)

    def _ticket_source(self, kind: str) -> TicketSource:
        desk = self._ticket_sources.get(kind)
        if desk is None:
            desk = self._ticket_sources[kind] = TicketSource(
                self._broker, topology.tickets(self._invite.run, kind), kind
            )
            self._serving.append(self._tasks.create_task(desk.serve()))
        return desk

    async def _publish(self, piece: EpisodeBegin | EpisodeEnd) -> None:
        with warn_if_slow("waiting_for_broker", piece=type(piece).__name__, episode=piece.episode_id):
            await self._broker.publish(self._inbox, piece)
