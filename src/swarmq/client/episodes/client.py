"""The client: begins episodes, mints their keys, and sends their ends until they are confirmed.

    begin   ticket ──> EpisodeBegin confirmed ──> ticket acked ──> key minted
    end     checked ──> spooled to disk ──> EpisodeEnd confirmed ──> unspooled         (transport.py: AMQP or HTTP)

Everything here runs on one event loop. `SwarmClient` (sync_client.py) drives it from a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from swarmq.broker import Broker, topology
from swarmq.client.data.tasks import SlotNumbering, SwarmTask, as_task
from swarmq.client.episodes import received_answers
from swarmq.client.episodes.episode import AsyncEpisode, EpisodeRecord, Handle
from swarmq.client.episodes.event_loops import LoopThread, run_in_thread
from swarmq.client.episodes.identity import hash_main_script, hash_source, make_client_id
from swarmq.client.episodes.invite_lookup import find_invite
from swarmq.client.episodes.proxy_clock import ProxyClock
from swarmq.client.episodes.spool import Orphan, Spool, spool_root
from swarmq.client.episodes.tracebacks import format_agent_traceback
from swarmq.client.episodes.transport import BrokerTransport, Transport
from swarmq.config import ProxySettings
from swarmq.errors import ClientError, EpisodeError, SwarmqError, drop_traceback
from swarmq.keys import Claims, Invite, mint
from swarmq.messages import EpisodeBegin, EpisodeEnd, Mode, Slot, encode, new_id
from swarmq.outcome import Outcome, combine_end_arguments, explain_untrainable, make_finished_end, make_unfinished_end
from swarmq.runtime.logs import log

ORPHAN_INTERVAL_S = 30.0
WARNING_INTERVAL_S = 60.0
"""Minimum seconds between two warnings of the same kind, e.g. about episodes without a model call."""
KEY_LIFETIME_S = ProxySettings().key_lifetime_s

OpenBroker = Callable[[Invite, str], contextlib.AbstractAsyncContextManager[Broker]]


def open_amqp(invite: Invite, name: str) -> contextlib.AbstractAsyncContextManager[Broker]:
    from swarmq.broker.amqp import AmqpBroker, initial_connect_timeout_s  # noqa: PLC0415 - slow to load, and HTTP needs none

    user = topology.client_user(invite.run, invite.client) if invite.invited else ""
    return AmqpBroker.open(invite.broker_url, name=name, deadline_s=initial_connect_timeout_s(), user=user)


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times and limits of a client that have no reason to differ outside of tests."""

    drain_s: float = 10.0
    """Seconds that closing waits for ends that the broker has not confirmed; after that, they stay in the spool."""
    remembered_ends: int = 1024
    """Maximum number of ended episodes that are remembered, so that a repeated end by id is recognised."""
    abort_timeout_s: float = 5.0
    """Seconds for which an interrupted attempt tries to report to the collector that its episode is aborted."""
    slow_attempt_s: float = 600.0
    """Seconds after which a long attempt is logged; it is also logged once it has used half of its time."""
    progress_interval_s: float = 30.0
    """Seconds between two log lines of progress where there is no terminal."""


LIMITS = ClientLimits()


class EpisodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `EpisodeClient.begin_episode`, with its names and defaults."""

    policies: Sequence[str] | None = None
    mode: Mode = "train"
    kind: str | None = None
    slot: Slot | None = None
    group_size: int | None = None
    attempt: int = 0
    last_attempt: bool = False
    code_version: str | None = None
    idle_timeout_s: float | None = None
    """Seconds without a model call after which the collector gives the episode up (`silence_s` of `begin_episode`)."""
    lifetime_s: float = KEY_LIFETIME_S
    max_calls: int = 0
    max_tokens: int = 0
    deadline_s: float | None = None


class EpisodeClient:
    """Connection to a run: `async with EpisodeClient(invite) as client`.

    `invite` is the invite's text, a file that holds it, a run folder or an Invite; the default is `$SWARMQ_INVITE`. Raises
    KeyRefusedError for an invalid invite, and BrokerError on entering when RabbitMQ cannot be reached or refuses the
    connection.
    """

    def __init__(
        self,
        invite: Invite | str | os.PathLike[str] | None = None,
        *,
        code_version: str | None = None,
        spool: Path | None = None,
        open_broker: OpenBroker = open_amqp,
        now: Callable[[], float] = time.time,
        limits: ClientLimits = LIMITS,
    ) -> None:
        self.invite = find_invite(invite)
        self.client_id = make_client_id(self.invite.client)
        self.limits = limits
        self._clock = ProxyClock(self.invite, now=now)
        self._is_proxy_away = False
        self.numbering = SlotNumbering()
        self.agent_loop: LoopThread | None = None
        """Event loop of coroutine agents; None: the caller's."""
        self._code_version = code_version
        self._spool_root = spool or spool_root(self.invite)
        self._open_broker = open_broker
        self._warn_of_no_calls_at: dict[str, float] = {}
        """Kind -> earliest time of the next warning about an episode without a model call."""
        self._warn_of_rewards_at = 0.0
        self._state = "not open: use `async with`"
        self._pid = os.getpid()
        self._broker: Broker | None = None
        self._open: dict[str, EpisodeRecord] = {}
        self._ended: OrderedDict[str, EpisodeRecord] = OrderedDict()
        self._sending: set[asyncio.Task[SwarmqError | None]] = set()

    async def __aenter__(self) -> Self:
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._transport = await self._connect(stack)
                self._disk = stack.enter_context(ThreadPoolExecutor(8, thread_name_prefix="swarmq-spool"))
                self._spool = Spool(self._spool_root, self.client_id)
                self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
                self._stack = stack.pop_all()
        except SwarmqError as error:
            raise drop_traceback(error) from None
        self.loop = asyncio.get_running_loop()
        self._state = "open"
        self._clock_sync = self._tasks.create_task(self._clock.synchronize())
        self._first_delivery = self._tasks.create_task(self._deliver_orphans())
        self._orphan_loop = self._tasks.create_task(self._keep_delivering_orphans())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort open episodes, wait up to `limits.drain_s` for the ends being sent, and leave the rest in the spool."""
        for record in list(self._open.values()):
            if record.end is None:
                self._start_sending(record, make_unfinished_end(record.begin, "aborted", "the client was closed"))
        self._state = "closed"
        self._orphan_loop.cancel()
        self._transport.refuse(ClientError("the client was closed while this episode waited for its ticket"))
        try:
            await asyncio.wait((self._first_delivery, *self._sending), timeout=self.limits.drain_s)
        finally:
            for task in (self._clock_sync, self._first_delivery, *self._sending):
                task.cancel()
            await self._stack.aclose()
            if left := self._spool.close():
                log.warning(
                    "ends_left_in_spool", ends=left, folder=str(self._spool.folder), delivered="by the next client"
                )

    @property
    def broker(self) -> Broker:
        """The broker. Raises ClientError if the invite allows HTTP only."""
        if self._broker is None:
            raise ClientError(
                f"client {self.invite.client!r} was invited for HTTP only (--http), and task queues need RabbitMQ: use an "
                "invite with RabbitMQ, or attempt your own list of tasks with run_episodes_until_all_complete"
            )
        return self._broker

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Transport:
        if self.invite.over_http:
            from swarmq.client.episodes.http_transport import HttpTransport  # noqa: PLC0415 - most clients need no HTTP of their own

            return HttpTransport(self.invite, now=self._clock.time)
        self._broker = await stack.enter_async_context(self._open_broker(self.invite, self.client_id))
        return await stack.enter_async_context(BrokerTransport.open(self._broker, self.invite))

    async def begin_episode(
        self,
        task: Any,
        *,
        policies: Sequence[str] | None = None,
        mode: Mode = "train",
        kind: str | None = None,
        slot: Slot | None = None,
        group_size: int | None = None,
        attempt: int = 0,
        last_attempt: bool = False,
        code_version: str | None = None,
        silence_s: float | None = None,
        lifetime_s: float = KEY_LIFETIME_S,
        max_calls: int = 0,
        max_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncEpisode:
        """Begin an attempt at `task`: a SwarmTask, a dict, or any value that has an `id` or can be encoded.

        Training episodes wait for a ticket of their kind. Without `slot`, repeated attempts at one task fill a group of
        `group_size` (default: the run's), then the next group. To retry, pass `slot=failed.slot, attempt=failed.attempt + 1`;
        if a `last_attempt` fails, the group is completed without the slot. The collector gives the episode up after `silence_s`
        (default: the run's) without a model call; its key is refused after `lifetime_s`, `max_calls` calls or `max_tokens`
        sampled tokens (0: no limit).

        Raises EpisodeError for an unknown kind or policy, if none of the policies is trained, or when `deadline_s` passes;
        BrokerError if the broker refuses.
        """
        options = EpisodeOptions(
            policies=policies,
            mode=mode,
            kind=kind,
            slot=slot,
            group_size=group_size,
            attempt=attempt,
            last_attempt=last_attempt,
            code_version=code_version,
            idle_timeout_s=silence_s,
            lifetime_s=lifetime_s,
            max_calls=max_calls,
            max_tokens=max_tokens,
            deadline_s=deadline_s,
        )
        return await self.begin(task, options)

    async def begin(self, task: Any, options: EpisodeOptions) -> AsyncEpisode:
        """Begin an episode as `begin_episode` does, with its arguments in one record."""
        self.check_usable()
        swarm_task = as_task(task)
        kind = self.resolve_kind(options.kind or swarm_task.kind)
        group_size = options.group_size or (self.group_size_of(kind) if options.mode == "train" else 1)
        begin = EpisodeBegin(
            run=self.invite.run,
            episode_id=new_id(),
            slot=options.slot or self.numbering.next_slot(swarm_task.id, group_size),
            kind=kind,
            group_size=group_size,
            policies=self._resolve_policies(options.policies, options.mode),
            mode=options.mode,
            client_id=self.client_id,
            code_version=options.code_version or self._code_version or hash_main_script(),
            attempt=options.attempt,
            idle_timeout_s=options.idle_timeout_s,
        )
        try:
            async with self._spool_begin(begin), asyncio.timeout(options.deadline_s):
                await asyncio.wait({self._clock_sync})
                await self._transport.begin(begin)
        except TimeoutError as error:
            raise EpisodeError(
                f"no episode of kind {kind!r} could begin within {options.deadline_s} s: the run is ahead of its learner, "
                "paused or drained, or its collector or broker does not answer; run `swarmq status` to see which"
            ) from error
        key = self._mint_key(begin, options)
        base_url = self._transport.base_url_of(begin.episode_id)
        record = EpisodeRecord(
            begin=begin, task=swarm_task, base_url=base_url, api_key=key, last_attempt=options.last_attempt
        )
        received_answers.watch(key, record.received)
        self._open[begin.episode_id] = record
        return AsyncEpisode(self, record)

    async def end_episode(
        self,
        episode: Handle | str,
        reward: float | Outcome | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        agent_rewards: Mapping[str, Mapping[str, float]] | None = None,
        call_rewards: Mapping[str, float] | None = None,
    ) -> None:
        """End an episode as `AsyncEpisode.end` does; `episode` may also be an episode id."""
        outcome = combine_end_arguments(reward, rewards, success, metrics, metadata, agent_rewards, call_rewards)
        await self.end_with(episode, outcome)

    async def end_with(self, episode: Handle | str, outcome: Outcome) -> None:
        """End an episode as `end_episode` does, with its arguments in one Outcome."""
        record = self._find(episode)
        self._warn_without_calls(record)
        await self._finish(record, make_finished_end(record.begin, outcome, frozen=self.invite.frozen))

    async def abort_episode(self, episode: Handle | str, reason: str = "aborted by the client") -> None:
        """Abort an episode on purpose: it is never trained, and its slot can be attempted again unless this was the last
        attempt."""
        record = self._find(episode)
        await self._finish(record, make_unfinished_end(record.begin, "aborted", reason, final=record.last_attempt))

    async def fail_episode(self, episode: Handle | str, reason: str) -> None:
        """Report that something broke: the episode is never trained, and has no reward (which is not a reward of 0)."""
        record = self._find(episode)
        if record.received.other_host:
            self._warn_without_calls(record)
        await self._finish(record, make_unfinished_end(record.begin, "failed", reason, final=record.last_attempt))

    @contextlib.asynccontextmanager
    async def episode(self, task: Any, **options: Any) -> AsyncIterator[AsyncEpisode]:
        """Begin an episode and end it inside the block: `async with client.episode(task) as ep:` with `await ep.end(reward)`.

        `options` are those of `begin_episode`. An exception fails the episode with the traceback as its reason, an interrupt
        aborts it; both propagate.
        """
        ep = await self.begin_episode(task, **options)
        try:
            yield ep
        except BaseException as error:
            await self.end_after_error(ep, error)
            raise
        await self.require_end(ep)

    def code_version_of(self, function: Callable[..., Any]) -> str:
        """Return the code version given to this client, or else a hash of the user's code."""
        return self._code_version or hash_source(function)

    async def end_after_error(self, ep: Handle, error: BaseException) -> None:
        """Fail the episode for an exception, abort it for an interrupt. If the episode has already ended, wait for the
        confirmation."""
        with contextlib.suppress(SwarmqError):  # the episode is then open again
            await self.wait_for_confirmation(ep)
        if ep.ended:
            return
        if isinstance(error, Exception | SystemExit):
            await self.fail_episode(ep, format_agent_traceback(error))
        else:
            record = self._find(ep)  # not final even if it was the last attempt: its slot may be attempted again
            await self._finish(
                record, make_unfinished_end(record.begin, "aborted", f"interrupted by {type(error).__name__}")
            )

    def _warn_without_calls(self, record: EpisodeRecord) -> None:
        """Warn, for each kind at most once per interval, of a training episode that did not call the proxy as far as the client
        can tell. The collector warns of all such episodes."""
        begin, received = record.begin, record.received
        if record.end or begin.mode == "eval" or received.calls() is not None:
            return
        if received.other_host:
            seen = f"the agent sent ep.api_key to {received.other_host} instead of ep.base_url"
        elif unread := [f"ep.{name}" for name in ("base_url", "api_key") if not record.was_read[name]]:
            seen = f"the agent did not read {' and '.join(unread)}"
        else:
            return
        now = self.loop.time()
        if now < self._warn_of_no_calls_at.get(begin.kind, 0.0):
            return
        self._warn_of_no_calls_at[begin.kind] = now + WARNING_INTERVAL_S
        log.warning(
            "episode_without_a_model_call",
            episode=begin.episode_id,
            task=record.task.id,
            kind=begin.kind,
            seen=seen,
            reason="an episode without a model call is not trained (no_turns)",
            action=f"give the agent's model client base_url=ep.base_url ({record.base_url}) and api_key=ep.api_key",
        )

    def _warn_of_unreceived_rewards(self, end: EpisodeEnd) -> None:
        """Warn of rewards for calls whose answers this process did not receive. Another process may have received them."""
        now = self.loop.time()
        lost = sorted(end.call_rewards.keys() - set(end.received or ()))
        if end.received is None or not lost or now < self._warn_of_rewards_at:
            return
        self._warn_of_rewards_at = now + WARNING_INTERVAL_S
        log.warning(
            "reward_for_a_call_without_an_answer",
            episode=end.episode_id,
            calls=lost,
            reason="this process did not receive these calls' answers; unless another process did, the calls are not trained",
        )

    async def wait_for_confirmation(self, ep: Handle) -> None:
        """Wait until no end of this episode is being sent. Raises the error that prevented its confirmation."""
        sending = ep._record.sending  # noqa: SLF001 - handles belong to this package
        if sending is not None and (error := await asyncio.shield(sending)):
            raise error

    async def require_end(self, ep: Handle) -> None:
        """Fail the episode, with a warning, if its block was left without an end."""
        if not ep.ended:
            log.warning("episode_left_open", episode=ep.episode_id, action="call ep.end(reward) inside the block")
            await self.fail_episode(ep, "the block was left without end(reward)")

    async def proxy_serves(self) -> bool:
        """Return whether the run's proxy and its engines answer."""
        from swarmq.client.episodes.http import is_reachable  # noqa: PLC0415 - most clients need no HTTP of their own

        url = f"{self.invite.base_url.removesuffix('/v1')}/health"
        serves = await run_in_thread(is_reachable, url, self.invite.ca)
        if not serves and not self._is_proxy_away:
            log.warning(
                "proxy_away",
                proxy=url,
                reason="it does not answer, so model calls fail",
                action="check that the run is up and that no firewall blocks this port",
            )
        self._is_proxy_away = not serves
        return serves

    def check_usable(self) -> None:
        """Raise ClientError if this client is not open, or belongs to another process."""
        if self._pid != os.getpid():
            raise ClientError("this client belongs to the process that created it: create a new client after a fork")
        if self._state != "open":
            raise ClientError(f"the client is {self._state}")

    def resolve_kind(self, kind: str | None) -> str:
        """Return `kind`, or the run's only kind if None. Raises EpisodeError for a kind that the run does not have."""
        known = self.invite.kinds
        if kind is None and len(known) == 1:
            return known[0]
        if kind not in known:
            problem = "the task has no kind" if kind is None else f"kind {kind!r} is not part of the run"
            raise EpisodeError(f"{problem}: the run's kinds are {', '.join(known)}")
        return kind

    def group_size_of(self, kind: str) -> int:
        """Return the number of attempts in a group: from the kind's newest ticket, or else from the invite."""
        return self._transport.group_size_of(kind) or self.invite.group_sizes.get(kind, self.invite.group_size)

    def _resolve_policies(self, policies: Sequence[str] | None, mode: Mode) -> tuple[str, ...]:
        known = self.invite.policies
        if isinstance(policies, str):
            policies = (policies,)
        chosen = tuple(dict.fromkeys(known if policies is None else policies))
        if not chosen or (unknown := set(chosen) - set(known)):
            given = ", ".join(sorted(unknown)) if chosen else "none"
            raise EpisodeError(f"policies: {given} given; the run's policies are {', '.join(known)}")
        if mode == "train" and (refusal := explain_untrainable(chosen, known, self.invite.frozen)):
            raise EpisodeError(refusal)
        return chosen

    @contextlib.asynccontextmanager
    async def _spool_begin(self, begin: EpisodeBegin) -> AsyncIterator[None]:
        """Spool the begin, so that a later process can abort the episode after a crash; unspool it if the block raises."""
        try:
            await self._run_on_disk(self._spool.begin, begin)
        except ClientError as error:
            log.warning(
                "spool_unusable", reason=str(error), action="if this process dies, the episode ends after its silence"
            )
        try:
            yield
        except BaseException:
            self._spool.remove(begin.episode_id)
            raise

    def _mint_key(self, begin: EpisodeBegin, options: EpisodeOptions) -> str:
        claims = Claims(
            run=begin.run,
            client=self.invite.client,
            episode_id=begin.episode_id,
            policies=begin.policies,
            kind=begin.kind,
            mode=begin.mode,
            made_at=self._clock.time(),
            expires_at=self._clock.time() + options.lifetime_s,
            max_calls=options.max_calls,
            max_tokens=options.max_tokens,
        )
        return mint(self.invite.secret, claims)

    def _find(self, episode: Handle | str) -> EpisodeRecord:
        self.check_usable()
        if isinstance(episode, Handle):
            return episode._record  # noqa: SLF001 - handles belong to this package
        if record := self._open.get(episode) or self._ended.get(episode):
            return record
        raise EpisodeError(f"episode {episode!r} was not begun by this client: end it with the client that began it")

    async def _finish(self, record: EpisodeRecord, end: EpisodeEnd) -> None:
        self.check_usable()
        if record.end is None:
            if end.status == "finished":
                end = msgspec.structs.replace(end, received=record.received.calls())
                self._warn_of_unreceived_rewards(end)
            encode(end)  # raises if it is too large, while the episode can still be ended in another way
            self._start_sending(record, end)
        elif record.end != msgspec.structs.replace(end, received=record.end.received):
            raise EpisodeError(
                f"episode {end.episode_id} has already ended: {_describe_end(record.end)}; the new end is "
                f"{_describe_end(end)}: the first end counts, nothing was sent"
            )
        await self.wait_for_confirmation(AsyncEpisode(self, record))

    def _start_sending(self, record: EpisodeRecord, end: EpisodeEnd) -> None:
        record.end = end
        record.sending = self._tasks.create_task(self._deliver(record, end))
        self._sending.add(record.sending)
        record.sending.add_done_callback(self._sending.discard)

    async def _deliver(self, record: EpisodeRecord, end: EpisodeEnd) -> SwarmqError | None:
        """Spool and send the end. Returns an error instead of raising it, because it concerns the callers that wait, not the
        task group."""
        try:
            await self._spool_and_publish(end)
        except SwarmqError as error:
            record.end = record.sending = None  # open again; the next client sends the spooled end
            return error
        except asyncio.CancelledError:
            return ClientError("the client was closed before the broker confirmed the end; the end is in the spool")
        self._open.pop(end.episode_id, None)
        received_answers.unwatch(record.api_key)
        self._remember(record)
        return None

    async def _spool_and_publish(self, end: EpisodeEnd) -> None:
        try:
            await self._run_on_disk(self._spool.put, end)
        except ClientError as error:
            log.warning("spool_unusable", reason=str(error), action="the end is lost if this process dies now")
        await self._transport.end(end)
        await self._run_on_disk(self._spool.remove, end.episode_id)

    def _remember(self, record: EpisodeRecord) -> None:
        """Remember the end, without the task's data and the key, so that a repeated end by id is recognised."""
        slim = EpisodeRecord(begin=record.begin, task=SwarmTask(record.task.id), base_url=record.base_url, api_key="")
        slim.end, slim.sending = record.end, record.sending
        self._ended[record.begin.episode_id] = slim
        if len(self._ended) > self.limits.remembered_ends:
            self._ended.popitem(last=False)

    async def _keep_delivering_orphans(self) -> None:
        """Deliver orphans at intervals: processes of one machine end the episodes of those that died."""
        while True:
            await asyncio.sleep(ORPHAN_INTERVAL_S)
            await self._deliver_orphans()

    async def _deliver_orphans(self) -> None:
        """Deliver the ends left by processes that have died, and abort the episodes that they left open."""
        await asyncio.wait({self._clock_sync})
        for folder in self._spool.others():
            with Orphan.claim(folder) as orphan:
                if orphan is None:
                    continue
                try:
                    delivered = await self._deliver_orphan(orphan)
                except (SwarmqError, OSError) as error:
                    log.warning("spool_not_delivered", folder=str(orphan.folder), reason=str(error))
                else:
                    if delivered:
                        log.info("spool_delivered", ends=delivered, folder=str(orphan.folder))

    async def _deliver_orphan(self, orphan: Orphan) -> int:
        delivered = 0
        for end in orphan.ends():
            await self._transport.end(end)
            orphan.remove(end)
            delivered += 1
        return delivered

    async def _run_on_disk(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            await self.loop.run_in_executor(self._disk, function, *arguments)
        except RuntimeError:  # the interpreter is ending and its executors take no more work
            function(*arguments)


def _describe_end(end: EpisodeEnd) -> str:
    if end.status != "finished":
        return f"{end.status} ({end.reason.strip().splitlines()[-1] if end.reason.strip() else 'no reason'})"
    return f"finished with {', '.join(f'{policy} {reward:g}' for policy, reward in end.rewards.items())}"
