"""A link keeps one session open: connect, prepare, wait for its loss, discard it, connect again.

    run() ──> open_session ──> prepare(session) ──> up ──> session.lost ──> forget ──> backoff ──┐
      ^──────────────────────────────────────────────────────────────────────────────────────────┘

An outage is logged once per process: a warning when the first link goes down, a second one if no node of a cluster can be reached,
and a line when all links are up again. A refusal (wrong password, no such queue) at a link's first connection ends the link,
because a person has to act. Once a link has worked, refusals are retried: a broker that restarts or is being repaired refuses
too, and the collector declares a deleted queue again. An invited client's user is deleted when the client is removed, so its link
ends once its login has been refused for a while.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from swarmq.broker.session import RECYCLED_PREFIX, Session, open_session
from swarmq.errors import BrokerError, BrokerLostError, LoginRefusedError
from swarmq.runtime.amqp_urls import redact_url, split_nodes
from swarmq.runtime.logs import log

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
UNREACHABLE_EVENT = "broker_unreachable"


async def _nothing(_: Session) -> None:
    return


class BrokerOutage:
    """The shared log lines of all links of this process to one broker."""

    def __init__(self, url: str) -> None:
        self._where = redact_url(url)
        self._is_cluster = len(split_nodes(url)) > 1
        self._logged: set[str] = set()
        self._down: set[BrokerLink] = set()
        self._most = 0
        self._since = 0.0

    def begin(self, link: BrokerLink, event: str, *, connection: str, reason: str) -> None:
        """Record that a link is down. Log the first `event` of an outage; for a cluster, the first of each name."""
        if not self._down:
            self._logged.clear()
            self._since, self._most = time.monotonic(), 0
        if not self._logged or (self._is_cluster and event not in self._logged):
            log.warning(event, connection=connection, reason=reason)
        self._logged.add(event)
        self._down.add(link)
        self._most = max(self._most, len(self._down))

    def end(self, link: BrokerLink) -> None:
        """Record that a link is up, and log it if it was the last one down."""
        if link in self._down:
            self.leave(link)
            if not self._down:
                away_s = round(time.monotonic() - self._since, 1)
                log.info("broker_reachable", broker=self._where, connections=self._most, away_s=away_s)

    def leave(self, link: BrokerLink) -> None:
        """Forget a link that is closed."""
        self._down.discard(link)


_outages: dict[str, BrokerOutage] = {}
"""Address of a broker -> its outage, shared by all links of this process."""


class BrokerLink:
    """One connection of a process, e.g. for publishing, reconnected while the context of `keep` is open."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        prepare: Callable[[Session], Awaitable[None]] = _nothing,
        forget: Callable[[], None] = lambda: None,
        refused: Callable[[BrokerError], None] = lambda _: None,
        login_patience_s: float = math.inf,
    ) -> None:
        """`prepare` is called with each new session before the link counts as up, `forget` after each lost session, `refused`
        with the error that ends the link. `login_patience_s`: seconds that the broker may refuse the login of a link that has
        worked."""
        self._url = url
        self._name = name
        self._prepare = prepare
        self._forget = forget
        self._refused = refused
        self._login_patience_s = login_patience_s
        self._up = asyncio.Event()
        self._session: Session | None = None
        self._refusal: BrokerError | None = None
        self._refused_before = False
        self._outage = _outages.setdefault(redact_url(url), BrokerOutage(url))
        self.trouble: str | None = f"RabbitMQ at {redact_url(url)} has not answered yet"
        """Why there is no session now, for error messages; None while there is one."""

    @asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._outage.leave(self)
        if not task.cancelled():
            task.result()

    @property
    def current(self) -> Session | None:
        """The open session, or None."""
        session = self._session
        return None if session is None or session.lost.done() else session

    async def session(self) -> Session:
        """Wait for a session and return it. Raises the BrokerError that ended the link."""
        while True:
            if self._refusal is not None:
                raise self._refusal
            if (session := self.current) is not None:
                return session
            self._up.clear()
            await self._up.wait()

    async def _run(self) -> None:
        delay_s, worked, login_refused_at = FIRST_DELAY_S, False, math.inf
        while True:
            try:
                async with open_session(self._url, name=self._name) as session:
                    await self._prepare(session)
                    self._connected(session)
                    delay_s, worked, login_refused_at = FIRST_DELAY_S, True, math.inf
                    await asyncio.wait({session.lost})
                    self._disconnected(session.lost.result())
            except BrokerError as error:
                if not (worked or isinstance(error, BrokerLostError)):
                    self._refuse(error)
                    return
                now = time.monotonic()
                login_refused_at = min(login_refused_at, now) if isinstance(error, LoginRefusedError) else math.inf
                if now - login_refused_at >= self._login_patience_s:
                    self._refuse(
                        BrokerError(
                            f"{error}; the login worked before, so the client was removed from the run: ask for a new invite"
                        )
                    )
                    return
                self._wait(error)
            except Exception as error:
                self._refuse(BrokerError(f"the connection {self._name} has failed: {error!r}"))
                raise
            finally:
                self._session = None
                self._forget()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _connected(self, session: Session) -> None:
        if self._refused_before:
            log.info("broker_connection_accepted", connection=self._name, broker=session.where)
        self._outage.end(self)
        self.trouble, self._refused_before = None, False
        self._session = session
        self._up.set()

    def _disconnected(self, reason: str) -> None:
        if reason.startswith(RECYCLED_PREFIX):
            log.info("broker_session_renewed", connection=self._name, reason=reason)
        else:
            self._outage.begin(self, "broker_session_lost", connection=self._name, reason=reason)
        self.trouble = reason
        self._session = None
        self._forget()

    def _wait(self, error: BrokerError) -> None:
        if isinstance(error, BrokerLostError):
            self._outage.begin(self, UNREACHABLE_EVENT, connection=self._name, reason=str(error))
        elif not self._refused_before:  # concerns only this link, not the shared outage
            log.warning(UNREACHABLE_EVENT, connection=self._name, reason=str(error))
            self._refused_before = True
        self.trouble = str(error)

    def _refuse(self, error: BrokerError) -> None:
        self.trouble, self._refusal = str(error), error
        self._up.set()
        self._refused(error)
