"""A copy of a run's membership on another host, from the events of the run's collector.

  ask ──`members_wanted`──> collector ──`state`, `members`──> current
   ^                                                            │
   └── subscription lost, or no event for SILENT_S ── stale <───┘

The collector repeats its events, so a lost event is replaced within seconds. While the membership is stale, a client may have been
removed without this host knowing, so proxies let calls wait until the collector has answered. A stopped collector alone does not
make the membership stale, because nobody is removed before it runs again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import structlog

from swarmq import keys
from swarmq.broker import Broker
from swarmq.broker.amqp import AmqpBroker
from swarmq.errors import ConfigError, SwarmqError
from swarmq.hosts.addresses import ListenAddress, find_own_address, format_url, is_loopback, resolve, split_address
from swarmq.hosts.members import Members
from swarmq.messages import Event, new_id
from swarmq.registries.engines import Urls
from swarmq.runtime.amqp_urls import redact_url, split_nodes
from swarmq.version import __version__

ASK_EVERY_S = 1.0
SILENT_S = 10.0
"""Seconds without any event of the run after which the membership is stale. A proxy receives its own events every two seconds, even
while the collector is stopped."""
PATIENCE_S = 30.0
log = structlog.get_logger()

EventHandler = Callable[[Event], None]


class FollowedMembership:
    """The membership of a run, from the collector's `members` events."""

    def __init__(
        self,
        run: str,
        broker: Broker,
        *,
        source: str,
        is_run_on_this_host: bool = False,
        ask_every_s: float = ASK_EVERY_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source`: this process in the events that it emits. `is_run_on_this_host`: whether this host reaches engines at loopback
        addresses. `ask_every_s`: seconds between two requests for the membership. `silent_s`: see SILENT_S."""
        self._run, self._broker, self._source = run, broker, source
        self._is_run_on_this_host = is_run_on_this_host
        self._ask_every_s, self._silent_s, self._clock = ask_every_s, silent_s, clock
        self._ask = new_id()
        self._last_event_at = clock()
        self._current, self._stale = asyncio.Event(), asyncio.Event()
        self._stale.set()
        self.latest: Members | None = None
        self.revoked: set[str] = set()
        self.clock_lead_s = 0.0
        """Seconds by which this host's clock is ahead of the collector's, plus the delay of the collector's newest answer."""
        self.handlers: list[EventHandler] = []

    @property
    def members(self) -> Members:
        """The newest members. A first `members` event must have arrived."""
        assert self.latest is not None
        return self.latest

    @property
    def roster(self) -> FollowedMembership:
        return self

    @property
    def resumed_at(self) -> dict[str, int]:
        return self.members.resumed_at

    def proxies(self) -> tuple[str, ...]:
        return self.members.proxies

    def urls(self) -> Urls:
        """Return policy -> URLs of its engines that this host can reach."""
        return {
            name: tuple(url for url in urls if self._is_run_on_this_host or not is_loopback(url))
            for name, urls in self.members.engines.items()
        }

    def add(self, policy: str, url: str) -> Urls:
        raise ConfigError(
            f"{url}: the engines of {policy} are changed on the run's own host (`swarmq engine`), or at a proxy there"
        )

    remove = add

    async def wait_current(self, patience_s: float | None) -> bool:
        """Wait until the collector has answered the newest request, and return whether it did within `patience_s` seconds; None: no limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._current.wait()
        return self._current.is_set()

    def ask(self) -> None:
        """Mark the membership as stale, and request it, until the collector answers."""
        self._ask = new_id()
        self._last_event_at = self._clock()
        self._current.clear()
        self._stale.set()

    def handle_event(self, event: Event) -> None:
        self._last_event_at = self._clock()
        if event.source == "collector" and event.name == "members":
            self.latest = msgspec.convert(event.fields, Members)
            self.revoked.update(self.latest.revoked)  # a removed name stays removed
            if self._ask in event.fields["answers"]:
                self.clock_lead_s = time.time() - event.at
                self._stale.clear()
                self._current.set()

    async def pass_on(self, handlers: Sequence[EventHandler]) -> None:
        """Pass the run's events on to `handlers`, too. The membership is stale until they have received the run's state."""
        self.handlers += handlers
        self.ask()

    async def follow(self) -> None:
        """Handle the run's events until cancelled."""
        async with self._broker.events(self._run, on_gap=self.ask) as events, asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._keep_asking())
            watching = tasks.create_task(self._watch_silence())
            async for event in events:
                self.handle_event(event)
                for handle in self.handlers:
                    handle(event)
            asking.cancel()
            watching.cancel()

    async def _keep_asking(self) -> None:
        while True:
            await self._stale.wait()
            fields = {"ask": self._ask}
            await self._broker.emit(
                Event(run=self._run, source=self._source, name="members_wanted", at=time.time(), fields=fields)
            )
            await self.wait_current(self._ask_every_s)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._ask_every_s)
            if self._clock() - self._last_event_at > self._silent_s:
                self.ask()


@asynccontextmanager
async def join_run(
    invite: keys.HostInvite, *, name: str, patience_s: float = PATIENCE_S
) -> AsyncIterator[tuple[Broker, FollowedMembership]]:
    """Connect to the run of an invite, and provide its broker and its membership, which is current and followed in the block.

    `name`: name of the connection in RabbitMQ's management UI. `patience_s`: seconds to wait for the collector. Raises SwarmqError if
    the invite has expired, RabbitMQ or the collector does not answer, or versions or clocks differ.
    """
    invite.check_current(time.time())
    is_local = is_run_on_this_host(invite)
    async with AmqpBroker.open(invite.broker_url, name=name, user=invite.user) as broker:
        membership = FollowedMembership(invite.run, broker, source=f"host.{invite.host}", is_run_on_this_host=is_local)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(membership.follow())
            try:
                if not await membership.wait_current(patience_s):
                    raise SwarmqError(
                        f"the collector of run {invite.run!r} has not answered within {patience_s:g} s over RabbitMQ at "
                        f"{redact_url(invite.amqp_url)}: check that the run is up"
                    )
                check_same_run(membership)
                yield broker, membership
            finally:
                following.cancel()


def choose_address(invite: keys.HostInvite, place: ListenAddress) -> str:
    """Return the address to listen on: `place.host`, or the address from which this host reaches RabbitMQ. Raises ConfigError if
    there is no route to RabbitMQ."""
    return place.host or find_own_address(*split_address(split_nodes(invite.amqp_url)[0]))


def is_run_on_this_host(invite: keys.HostInvite) -> bool:
    """Return whether this host reaches the invite's RabbitMQ, and so the run, at a loopback address. Raises ConfigError if the
    name of its host cannot be resolved."""
    host, port = split_address(split_nodes(invite.amqp_url)[0])
    return is_loopback(format_url("amqp", resolve(host, port), port))


def check_same_run(membership: FollowedMembership) -> None:
    """Raise ConfigError if this host's version of swarmq or its clock differs from the collector's."""
    theirs = membership.members.swarmq
    if theirs != __version__:
        raise ConfigError(
            f"the host of the run's collector has swarmq {theirs}, this host {__version__}: install the same version"
        )
    if abs(lead_s := membership.clock_lead_s) > keys.CLOCK_LEEWAY_S:
        way = "ahead of" if lead_s > 0 else "behind"
        raise ConfigError(
            f"this host's clock is {abs(lead_s):.0f} s {way} the clock of the collector's host; api keys and the run's time limits allow "
            f"{keys.CLOCK_LEEWAY_S:g} s: set both clocks, e.g. by NTP"
        )
