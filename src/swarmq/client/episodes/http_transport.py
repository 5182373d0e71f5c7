"""Episodes through the proxy's control routes, for clients whose network permits only HTTP (docs/reference/control.md).

    begin   POST <proxy>/v1/control/episodes            repeated with the same episode id until there is a ticket
    end     POST <proxy>/v1/control/episodes/ID/end     repeated until it is answered; deduplicated by its outcome id

If a proxy does not answer, the next one is tried; an episode stays with the proxy that accepted its begin. Answers to begins
contain the present group size and list of proxies.

Imported only for invites without RabbitMQ, because most clients need no HTTP code.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.client.episodes.http import HttpError, post_json
from swarmq.errors import BrokerError, EpisodeError, KeyRefusedError, SwarmqError
from swarmq.keys import Invite, Operator, mint_operator
from swarmq.messages import EpisodeBegin, EpisodeEnd, encode
from swarmq.runtime.logs import log
from swarmq.runtime.slow_waits import if_first_waiter, warn_if_slow

TOKEN_LIFETIME_S = 3600.0
TICKET_WAIT_S = 20.0
"""Seconds that one request waits for a ticket, after which it is repeated."""
ANSWER_TIMEOUT_S = 60.0
TICKET_REASON = "the proxy grants tickets as the learner trains, and none while the run is paused or drained; `swarmq status` shows the run's state"
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0


class HttpTransport:
    """Transport through the proxy's control routes; implements `swarmq.client.episodes.transport.Transport`."""

    def __init__(self, invite: Invite, *, now: Callable[[], float] = time.time) -> None:
        self._invite = invite
        self._now = now
        self._closed: asyncio.Future[SwarmqError] = asyncio.get_running_loop().create_future()
        self._aborts: set[asyncio.Task[None]] = set()
        self._waiting: defaultdict[str, list[asyncio.Future[Any]]] = defaultdict(list)
        """Kind -> begins that wait for a ticket, oldest first."""
        self._outage = ""
        """Why no proxy answers at present; "" while one does."""
        self._proxies: tuple[str, ...] = ()
        self._group_sizes: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        """Open episode -> the proxy that accepted its begin."""

    async def begin(self, begin: EpisodeBegin) -> None:
        body = {
            "task_id": begin.slot.task_id,
            "repeat": begin.slot.repeat,
            "epoch": begin.slot.epoch,
            "kind": begin.kind,
            "mode": begin.mode,
            "policies": begin.policies,
            "group_size": begin.group_size,
            "episode_id": begin.episode_id,
            "attempt": begin.attempt,
            "client_id": begin.client_id,
            "code_version": begin.code_version,
            "silence_s": begin.idle_timeout_s,
            "wait_s": TICKET_WAIT_S,
        }
        request = asyncio.ensure_future(self._send_until_confirmed("", begin.episode_id, body))
        waiting = self._waiting[begin.kind]
        waiting.append(request)
        count = if_first_waiter(request, waiting)
        try:
            with warn_if_slow(
                "waiting_for_ticket",
                kind=begin.kind,
                now=lambda: {**found, "reason": self._outage or TICKET_REASON} if (found := count()) else None,
            ):
                done: set[asyncio.Future[Any]] = {request, self._closed}
                await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise self._closed.result()
            self._homes[begin.episode_id], answer = request.result()
            self._read_answer(begin.kind, answer)
        except asyncio.CancelledError:
            self._abandon_begin(begin)
            raise
        finally:
            waiting.remove(request)
            request.cancel()

    async def end(self, end: EpisodeEnd) -> None:
        outcome_id = hashlib.sha256(encode(end)).hexdigest()[:32]
        if end.status != "finished":
            await self._abort(end, {"outcome_id": outcome_id, "status": end.status, "reason": end.reason})
            self._homes.pop(end.episode_id, None)
            return
        body = {
            "outcome_id": outcome_id,
            "rewards": end.rewards,
            "policies": tuple(end.rewards),
            "success": end.success,
            "metrics": end.metrics,
            "metadata": end.metadata,
            "agent_rewards": end.agent_rewards,
            "call_rewards": end.call_rewards,
            "calls": end.calls,
        }
        with warn_if_slow("waiting_for_broker", piece="EpisodeEnd", episode=end.episode_id):
            await self._finish(end, body)
        self._homes.pop(end.episode_id, None)

    async def _finish(self, end: EpisodeEnd, body: dict[str, Any]) -> None:
        path = f"/{end.episode_id}/end"
        if end.received is not None:
            with contextlib.suppress(EpisodeError):  # an older proxy refuses unknown fields
                await self._send_until_confirmed(path, end.episode_id, {**body, "received": end.received})
                return
        await self._send_until_confirmed(path, end.episode_id, body)

    async def _abort(self, end: EpisodeEnd, body: dict[str, Any]) -> None:
        path = f"/{end.episode_id}/abort"
        if end.final:
            with contextlib.suppress(EpisodeError):  # an older proxy refuses unknown fields
                await self._send_until_confirmed(path, end.episode_id, {**body, "final": True})
                return
        await self._send_until_confirmed(path, end.episode_id, body)

    def refuse(self, error: SwarmqError) -> None:
        if not self._closed.done():
            self._closed.set_result(error)

    def group_size_of(self, kind: str) -> int | None:
        return self._group_sizes.get(kind)

    def base_url_of(self, episode_id: str) -> str:
        return self._urls(episode_id)[0]

    def _urls(self, episode_id: str) -> tuple[str, ...]:
        """Return the URLs to try for an episode: its own proxy's first, then the others'."""
        urls = self._invite.base_urls_of(episode_id, now=self._proxies)
        home = self._homes.get(episode_id, urls[0])
        return (home, *(url for url in urls if url != home))

    def _read_answer(self, kind: str, answer: Any) -> None:
        """Store the proxies and the group size that the answer to a begin contains; answers of older proxies have fewer
        fields."""
        self._proxies = tuple(answer.get("proxies", ())) or self._proxies
        if size := answer.get("group_size"):
            self._group_sizes[kind] = size

    async def _send_until_confirmed(self, path: str, episode_id: str, body: dict[str, Any]) -> tuple[str, Any]:
        """Repeat a request until a proxy answers it; return that proxy's URL and its answer.

        Tries one proxy after the other. A lost answer does no harm, because repeated requests change nothing.
        """
        pause_s, passed_over = FIRST_PAUSE_S, 0
        while True:
            urls = self._urls(episode_id)
            url = urls[passed_over % len(urls)]
            try:
                answer = await run_in_thread(self._post, f"{url}/control/episodes{path}", body)
                self._outage = ""
                return url, answer
            except HttpError as error:
                if not error.is_transient:
                    raise _map_error(error) from error
                has_no_ticket = error.status == 429  # other proxies have none either
                passed_over += not has_no_ticket
                if not has_no_ticket and passed_over % len(urls):
                    log.info("proxy_skipped", url=url, reason=str(error))
                    continue
                if not has_no_ticket and not self._outage:
                    log.warning("no_proxy_answers", reason=str(error), action="it is tried again until one does")
                self._outage = "" if has_no_ticket else str(error)
                wait_s = pause_s if error.retry_after_s is None else min(error.retry_after_s, pause_s)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                pause_s = FIRST_PAUSE_S if has_no_ticket else min(2 * pause_s, MAX_PAUSE_S)

    def _post(self, url: str, body: dict[str, Any]) -> Any:
        return post_json(url, body, token=self._token(), timeout_s=TICKET_WAIT_S + ANSWER_TIMEOUT_S, ca=self._invite.ca)

    def _token(self) -> str:
        operator = Operator(
            run=self._invite.run,
            name=self._invite.client,
            roles=("rollout",),
            by_client=True,
            expires_at=self._now() + TOKEN_LIFETIME_S,
        )
        return mint_operator(self._invite.secret, operator)

    def _abandon_begin(self, begin: EpisodeBegin) -> None:
        """Abort, once and in the background, a begin whose caller is gone: the proxy may still confirm it."""
        url = f"{self.base_url_of(begin.episode_id)}/control/episodes/{begin.episode_id}/abort"
        body = {"status": "aborted", "reason": "the client gave up before the episode had begun"}

        async def abort() -> None:
            with contextlib.suppress(SwarmqError):
                await run_in_thread(self._post, url, body)

        task = asyncio.ensure_future(abort())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _map_error(error: HttpError) -> SwarmqError:
    if error.status in (401, 403):
        return KeyRefusedError(str(error))
    if error.status == 404:
        return BrokerError(f"{error}: check that the proxy's address in the invite ends in /v1")
    return EpisodeError(str(error))
