"""A link keeps one session open: connect, prepare, wait for its loss, throw it away, connect again.

    run() ──> open_session ──> prepare(session) ──> up ──> session.lost ──> forget ──> backoff ──┐
      ^──────────────────────────────────────────────────────────────────────────────────────────┘

Waiting is visible: one warning when the broker goes away, one line when it is back. A refusal (wrong password, no
such queue) ends the link at its first connection, because a person has to act; once a link has worked, refusals are
waited out, since a broker that restarts or is being repaired refuses too, and the collector makes a deleted queue again.
The user of an invited client is deleted when the client is removed: its link ends once its login was refused for a while.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from swarmq.broker.faults import address
from swarmq.broker.session import Session, open_session
from swarmq.errors import BrokerError, BrokerLostError, LoginRefusedError
from swarmq.logs import log

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0


async def _nothing(_: Session) -> None:
    return


class Link:
    """One role's connection to the broker, e.g. publishing. Use `keep` to run it."""

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
        """`login_patience_s`: how long the broker may refuse the login of a link that has worked."""
        self._url = url
        self._name = name
        self._prepare = prepare
        self._forget = forget
        self._refused = refused
        self._login_patience_s = login_patience_s
        self._up = asyncio.Event()
        self._session: Session | None = None
        self._refusal: BrokerError | None = None
        self._waiting = False
        self.trouble: str | None = f"RabbitMQ at {address(url)} has not answered yet"
        """Why there is no session now, for error messages."""

    @asynccontextmanager
    async def keep(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    @property
    def current(self) -> Session | None:
        """The open session, if there is one right now."""
        session = self._session
        return None if session is None or session.lost.done() else session

    async def session(self) -> Session:
        """The open session; waits for one. Raises the BrokerError that ended the link."""
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
                            f"{error}; it worked before: the client was removed from the run, ask for an invite"
                        )
                    )
                    return
                self._wait(str(error))
            except Exception as error:
                self._refuse(BrokerError(f"the connection {self._name} has failed: {error!r}"))
                raise
            finally:
                self._session = None
                self._forget()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _connected(self, session: Session) -> None:
        if self._waiting:
            log.info("broker reachable again", connection=self._name, broker=session.where)
        self.trouble, self._waiting = None, False
        self._session = session
        self._up.set()

    def _disconnected(self, reason: str) -> None:
        log.info("broker session lost, connecting again", connection=self._name, reason=reason)
        self.trouble = reason
        self._session = None
        self._forget()

    def _wait(self, reason: str) -> None:
        if not self._waiting:
            log.warning("broker or queue unreachable, waiting", connection=self._name, reason=reason)
        self.trouble, self._waiting = reason, True

    def _refuse(self, error: BrokerError) -> None:
        self.trouble, self._refusal = str(error), error
        self._up.set()
        self._refused(error)
