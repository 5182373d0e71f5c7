"""Begin, end and abort of episodes over HTTP, for clients in other languages, with the guarantees of the AMQP client.

begin   ticket ──> EpisodeBegin confirmed ──> ticket acked ──> API key minted ──> 201
end     checked ──> EpisodeEnd confirmed ──> 200

An answer is sent when the broker has confirmed the record. A request that is repeated because its answer was lost is answered
again and changes nothing: a begin is identified by its episode id, an end by its episode id and outcome id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmq import keys
from swarmq.broker import Broker, TicketSource, topology
from swarmq.broker.client_rules import NAME_SEPARATOR, is_foreign
from swarmq.config import SwarmJob
from swarmq.messages import EpisodeBegin, EpisodeEnd, Mode, Slot, new_id
from swarmq.outcome import EpisodeRef, Outcome, explain_untrainable, make_finished_end, make_unfinished_end
from swarmq.proxy.episodes.idempotency import EpisodeEntry, IdempotencyStore, RecordedEnd
from swarmq.proxy.http_errors import RefusedError, foreign_episode_error

OPERATORS = NAME_SEPARATOR + "http"
"""Client name in the keys of episodes that operators begin. No client can have this name."""
MAX_WAIT_S = 120.0

Name = Annotated[str, Meta(min_length=1, max_length=256)]
EpisodeId = Annotated[str, Meta(pattern=r"^[0-9A-Za-z._:-]{1,64}$")]
Limit = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class BeginRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Begin of one attempt at a slot (task, repeat, epoch)."""

    task_id: Name
    repeat: Limit = 0
    """Index of the attempt within its group, 0 to group_size - 1."""
    epoch: Limit = 0
    kind: str | None = None
    """Task kind; may be left out if the run has only one."""
    mode: Mode = "train"
    policies: tuple[str, ...] | None = None
    """Policies of the episode; all of the run by default."""
    group_size: Count | None = None
    """Attempts that form a group; the run's by default."""
    episode_id: EpisodeId | None = None
    """Episode id, given to make the request repeatable; a UUIDv7 is best."""
    attempt: Limit = 0
    client_id: Name | None = None
    """Client name; the operator's name by default."""
    code_version: Annotated[str, Meta(max_length=256)] = ""
    idle_timeout_s: Annotated[float, Meta(gt=0)] | None = msgspec.field(default=None, name="silence_s")
    """Seconds without a model call after which the collector gives the episode up; the run's by default."""
    lifetime_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds for which the API key is valid; the run's by default."""
    max_calls: Limit = 0
    """Maximum number of model calls; 0: no limit."""
    max_tokens: Limit = 0
    """Maximum number of sampled tokens; 0: no limit."""
    agent: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,64}$")] | None = None
    """Agent tag of all model calls with the episode's API key."""
    wait_s: Annotated[float, Meta(gt=0, le=MAX_WAIT_S)] = 30.0
    """Seconds to wait for a ticket."""


class BegunEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A begun episode: what its agent needs to call the model, and its client to end it."""

    episode_id: str
    slot_id: str
    group_id: str
    kind: str
    mode: Mode
    policies: tuple[str, ...]
    model: str
    """Name of the first policy."""
    base_url: str
    """Base URL of this proxy for any OpenAI client."""
    api_key: str
    """API key for the episode's model calls."""
    expires_at: float
    """Unix time at which the API key expires."""
    repeated: bool
    """Whether the episode had begun before."""
    group_size: int
    """Present group size of the kind, and so the number of `repeat`s of the next task."""
    proxies: tuple[str, ...]
    """Base URLs of all proxies of the run, as its host reaches them, usable if this one does not answer; empty if unknown."""


class EndRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End of an episode with a reward."""

    reward: float | None = None
    """Reward of every policy of the episode."""
    rewards: dict[str, float] | None = None
    """Policy -> reward, in place of `reward`."""
    success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, str] = {}
    agent_rewards: dict[str, dict[str, float]] = {}
    """Policy -> agent tag -> reward."""
    call_rewards: dict[str, float] = {}
    """Call id -> reward."""
    calls: tuple[str, ...] | None = None
    """Call ids whose answers the agent received, if it knows all of them; no other call is trained."""
    received: tuple[str, ...] | None = None
    """Call ids with the header `x-swarmq-observed` whose answers the agent received; no other call with this header is
    trained."""
    policies: tuple[str, ...] | None = None
    """Policies as `begin` returned them; needed beside `reward` if another proxy began the episode."""
    outcome_id: Annotated[str, Meta(max_length=128)] | None = None
    """Id of the outcome: two ends with the same id are the same end. By default a digest of the content."""


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End of an episode without a reward: it is never trained and never counts as a 0."""

    status: Literal["aborted", "failed"] = "aborted"
    """`aborted`: given up on purpose; `failed`: something broke."""
    reason: str = ""
    final: bool = False
    """Whether no further attempt at the slot will come, so that its group does not wait for one."""
    outcome_id: Annotated[str, Meta(max_length=128)] | None = None


class EndResponse(msgspec.Struct, frozen=True, kw_only=True):
    episode_id: str
    outcome_id: str
    status: str
    repeated: bool
    """Whether the episode had ended in this way before."""


class EpisodeControl:
    """Begins and ends episodes of one run. `serve` must be open."""

    def __init__(
        self, job: SwarmJob, broker: Broker, *, root: bytes, now: Callable[[], float], ticketed: bool = True
    ) -> None:
        self._job = job
        self._broker = broker
        self._root = root
        self._now = now
        self._ticketed = ticketed
        self._inbox = topology.inbox(job.run)
        self._ledger = IdempotencyStore()
        self._proxies: tuple[str, ...] = ()
        self._ticket_sources = {
            kind: TicketSource(broker, topology.tickets(job.run, kind), kind) for kind in job.task_kinds
        }

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Take tickets and hand them out while the context is open."""
        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(source.serve()) for source in self._ticket_sources.values()]
            try:
                yield
            finally:
                for task in serving:
                    task.cancel()

    async def begin(self, asked: BeginRequest, *, operator: str, by_client: bool, base_url: str) -> BegunEpisode:
        """Begin an episode. Raises RefusedError, BrokerError."""
        begin = self._begin_of(asked, operator)
        entry = self._ledger.of(begin.episode_id)
        async with entry.lock:
            if entry.begin is not None and not _are_equal(entry.begin, begin, sized=asked.group_size is not None):
                raise _conflict(f"episode {begin.episode_id} was already begun with other values: choose another id")
            repeated = entry.begin is not None
            if not repeated:
                entry.begin = await self._send(begin, asked.wait_s)
        expires_at = self._now() + (asked.lifetime_s or self._job.proxy.key_lifetime_s)
        claims = keys.Claims(
            run=begin.run,
            client=operator if by_client else OPERATORS,
            episode_id=begin.episode_id,
            policies=begin.policies,
            kind=begin.kind,
            mode=begin.mode,
            expires_at=expires_at,
            max_calls=asked.max_calls,
            max_tokens=asked.max_tokens,
            agent=asked.agent,
        )
        return BegunEpisode(
            episode_id=begin.episode_id,
            slot_id=begin.slot.id,
            group_id=begin.slot.group_id,
            kind=begin.kind,
            mode=begin.mode,
            policies=begin.policies,
            model=begin.policies[0],
            base_url=base_url,
            api_key=keys.mint(keys.derive_client_secret(self._root, claims.client), claims),
            expires_at=expires_at,
            repeated=repeated,
            group_size=self._size(begin.kind),
            proxies=self._proxies,
        )

    async def end(self, episode_id: str, asked: EndRequest, *, client_id: str) -> EndResponse:
        """End an episode. Raises OutcomeError for an invalid reward, RefusedError, BrokerError."""
        entry = self._get_owned(episode_id, client_id)
        outcome = Outcome(
            reward=asked.reward,
            rewards=asked.rewards,
            success=asked.success,
            metrics=asked.metrics,
            metadata=asked.metadata,
            agent_rewards=asked.agent_rewards,
            call_rewards=asked.call_rewards,
        )
        end = make_finished_end(
            self._find_ending(episode_id, entry, asked, client_id), outcome, frozen=self._job.frozen
        )
        return await self._end(
            entry, msgspec.structs.replace(end, calls=asked.calls, received=asked.received), asked.outcome_id
        )

    async def abort(self, episode_id: str, asked: AbortRequest, *, client_id: str) -> EndResponse:
        """Abort an episode. Raises RefusedError, BrokerError."""
        entry = self._get_owned(episode_id, client_id)
        who = EpisodeRef(run=self._job.run, episode_id=episode_id, client_id=client_id, policies=())
        return await self._end(
            entry, make_unfinished_end(who, asked.status, asked.reason, final=asked.final), asked.outcome_id
        )

    def _get_owned(self, episode_id: str, client_id: str) -> EpisodeEntry:
        """Return the entry of an episode. Raises RefusedError if another client began it; if another proxy began it, the
        collector checks."""
        entry = self._ledger.of(episode_id)
        if entry.begin and is_foreign(client_id, entry.begin.client_id):
            raise foreign_episode_error(episode_id)
        return entry

    async def _send(self, begin: EpisodeBegin, wait_s: float) -> EpisodeBegin:
        if begin.mode == "eval" or not self._ticketed:
            await self._publish(begin)
            return begin
        try:
            async with (
                asyncio.timeout(wait_s) as limit,
                self._ticket_sources[begin.kind].ticket(first=begin.attempt > 0) as ticket,
            ):
                limit.reschedule(None)  # the ticket is here: from now on the broker's own deadline holds
                self._proxies = ticket.proxies
                begin = msgspec.structs.replace(begin, ticket_id=ticket.ticket_id)
                await self._publish(begin)
        except TimeoutError as error:
            raise RefusedError(
                f"no ticket of kind {begin.kind!r} within {wait_s:g} s: the run is ahead of its learner, paused or drained; ask "
                "again with the same episode_id",
                status=429, code="no_ticket",
            ) from error  # fmt: skip
        return begin

    async def _end(self, entry: EpisodeEntry, end: EpisodeEnd, outcome_id: str | None) -> EndResponse:
        outcome_id = outcome_id or hashlib.sha256(msgspec.msgpack.encode(end)).hexdigest()[:32]
        async with entry.lock:
            known = entry.end_of(end.client_id)
            if known and known.outcome_id != outcome_id:
                raise _conflict(f"episode {end.episode_id} has ended otherwise ({known.end.status}): nothing was sent")
            if known is None:
                await self._publish(end)
                entry.ends.append(RecordedEnd(end, outcome_id))
        status = known.end.status if known else end.status
        return EndResponse(episode_id=end.episode_id, outcome_id=outcome_id, status=status, repeated=known is not None)

    async def _publish(self, piece: EpisodeBegin | EpisodeEnd) -> None:
        await self._broker.publish(self._inbox, piece, deadline_s=self._job.proxy.confirm_timeout_s)

    def _begin_of(self, asked: BeginRequest, operator: str) -> EpisodeBegin:
        job = self._job
        kind = asked.kind or (job.task_kinds[0] if len(job.task_kinds) == 1 else None)
        if kind not in job.task_kinds:
            raise RefusedError(f"kind {kind!r}: the kinds of the run are {', '.join(job.task_kinds)}", param="kind")
        policies = tuple(dict.fromkeys(job.policies if asked.policies is None else asked.policies))
        if not policies or set(policies) - set(job.policies):
            raise RefusedError(f"policies must name policies of the run: {', '.join(job.policies)}", param="policies")
        if asked.mode == "train" and (refusal := explain_untrainable(policies, tuple(job.policies), job.frozen)):
            raise RefusedError(refusal, param="policies")
        size = asked.group_size or (self._size(kind) if asked.mode == "train" else 1)
        if asked.mode == "train" and asked.repeat >= (most := max(size, self._ticket_sources[kind].group_size or 0)):
            raise RefusedError(
                f"repeat {asked.repeat}: the attempts of a group of {most} are numbered 0 to {most - 1}; the next group of the same task "
                "is the next epoch",
                param="repeat",
            )
        return EpisodeBegin(
            run=job.run,
            episode_id=asked.episode_id or new_id(),
            slot=Slot(task_id=asked.task_id, repeat=asked.repeat, epoch=asked.epoch),
            kind=kind,
            group_size=size,
            policies=policies,
            mode=asked.mode,
            client_id=asked.client_id or operator,
            code_version=asked.code_version,
            attempt=asked.attempt,
            idle_timeout_s=asked.idle_timeout_s,
        )

    def _size(self, kind: str) -> int:
        """Return the group size of a kind: the newest ticket's, else the job's."""
        return self._ticket_sources[kind].group_size or self._job.group_size(kind)

    def _find_ending(self, episode_id: str, entry: EpisodeEntry, asked: EndRequest, client_id: str) -> EpisodeRef:
        """Return the episode that a request ends. It must be the same at every proxy, or a repeated end would count as a
        different one."""
        policies = tuple(self._job.policies) if len(self._job.policies) == 1 else None
        policies = entry.begin.policies if entry.begin else asked.policies or policies
        if policies is None and asked.rewards is not None:
            policies = tuple(asked.rewards)
        if policies is None:
            raise RefusedError(
                "another proxy began this episode: give `policies` beside `reward`, or `rewards` for each",
                param="policies",
            )
        return EpisodeRef(run=self._job.run, episode_id=episode_id, client_id=client_id, policies=policies)


def _conflict(message: str) -> RefusedError:
    return RefusedError(message, status=409, code="episode_conflict")


def _are_equal(one: EpisodeBegin, other: EpisodeBegin, *, sized: bool) -> bool:
    """Return whether two begins are equal. `sized`: whether to compare their group sizes, too."""
    size = other.group_size if sized else one.group_size
    return msgspec.structs.replace(one, ticket_id=None) == msgspec.structs.replace(
        other, ticket_id=None, group_size=size
    )
