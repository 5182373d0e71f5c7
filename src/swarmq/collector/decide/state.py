"""What the collector remembers, and the rules it obeys."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from swarmq.collector.decide.evals import Evals
from swarmq.config import Eval, SwarmJob
from swarmq.messages import Control, DeliveryReport, EpisodeBegin, EpisodeEnd, Turn
from swarmq.task_mix import Stretch, kinds_of, shares

HOLD_S = 30.0
"""How long an end waits for its begin or for turns it names, before the episode counts as incomplete; and for proxies to say
whether answers were sent, before they count as not received."""

MAX_SILENCE_S = 24 * 3600.0
"""The longest silence a begin can ask for: nothing waits for ever."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a job that the collector obeys."""

    run: str
    trained: tuple[str, ...]
    """Policies whose episodes are forwarded."""
    known: tuple[str, ...]
    """All policies of the job, frozen ones included."""
    mix: dict[str, float]
    """What it is when the run begins, and stays unless there are `stretches`."""
    stretches: tuple[Stretch, ...] = ()
    group_size: int = 8
    group_sizes: dict[str, int] = {}
    """Kind -> its own, where it has one."""
    groups_per_batch: int = 8
    min_group: int = 2
    deadline_s: float = 600.0
    max_staleness: int = 4
    idle_timeout_s: float = 600.0
    when_dry: str = "wait"
    dry_after_s: float = 120.0
    uninformative_groups: int = 16
    eval: Eval = Eval()
    last_steps: dict[str, int] = {}
    """Policy -> the step at which its learner stops, where there is one."""

    @classmethod
    def of(cls, job: SwarmJob) -> Rules:
        groups = job.groups
        return cls(
            run=job.run,
            trained=tuple(name for name, policy in job.policies.items() if policy.trained),
            known=tuple(job.policies),
            mix=dict(job.mix),
            stretches=(Stretch(from_step=0, mix=job.mix, schedule=job.mix_schedule),),
            group_size=groups.group_size,
            group_sizes={kind: job.group_size(kind) for kind in job.kinds},
            groups_per_batch=groups.groups_per_batch,
            min_group=groups.min_group,
            deadline_s=groups.deadline_s,
            max_staleness=groups.max_staleness,
            idle_timeout_s=groups.idle_timeout_s,
            when_dry=groups.when_dry,
            dry_after_s=groups.dry_after_s,
            uninformative_groups=groups.uninformative_groups,
            eval=job.eval,
            last_steps={
                name: policy.train.max_steps for name, policy in job.policies.items() if policy.train.max_steps
            },
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that is or will be in the mix."""
        return kinds_of(self._stretches)

    def shares(self, step: int, lent: Collection[str] = ()) -> dict[str, float]:
        """The mix of the batch that makes the weights of `step`."""
        return shares(self._stretches, step, lent)

    def size_of(self, kind: str) -> int:
        return self.group_sizes.get(kind, self.group_size)

    @property
    def _stretches(self) -> tuple[Stretch, ...]:
        return self.stretches or (Stretch(from_step=0, mix=self.mix),)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a turn to judge it, without its tokens."""

    call_id: str
    policy: str
    request_id: str
    request_digest: str
    retry: int
    counts_retries: bool
    receipt: bool
    observed: bool
    agent: str | None
    parent: str | None
    shared: int
    prompt: int
    """Tokens of the whole prompt, the shared ones included."""
    sampled: int
    size_bytes: int

    @classmethod
    def of(cls, turn: Turn, size_bytes: int) -> Call:
        return cls(
            call_id=turn.call_id,
            policy=turn.policy,
            request_id=turn.request_id,
            request_digest=turn.request_digest,
            retry=turn.retry,
            counts_retries=turn.counts_retries,
            receipt=turn.receipt,
            observed=turn.observed,
            agent=turn.agent,
            parent=turn.parent,
            shared=turn.shared,
            prompt=turn.num_prompt,
            sampled=turn.num_sampled,
            size_bytes=size_bytes,
        )


TAINTS = ("", "two_clients", "refused_turn")
"""Why the turns of an episode are not what its agent was answered, by the number that the store keeps: nobody can tell whose
are whose, or one is missing. Where the end names its calls, those that are here decide."""


class OpenEpisode(msgspec.Struct, kw_only=True):
    """An episode whose fate is not decided yet. Its turns' tokens lie in the store."""

    episode_id: str
    began_at: float
    heard_at: float
    begin: EpisodeBegin | None = None
    end: EpisodeEnd | None = None
    end_body: bytes = b""
    held_since: float = 0.0
    calls: dict[str, Call] = {}
    sent: set[str] = set()
    """Calls whose answers were sent to the last byte, as their proxies say; their turns need not be here yet."""
    withdrawn: set[str] = set()
    """Calls that were never answered, as their proxies say; their turns need not be here, or ever come."""
    taint: str = ""
    """Of `TAINTS`."""

    def hear(self, served: DeliveryReport) -> tuple[list[str], list[str]]:
        """Remember what a proxy said of the answers of this episode; the calls sent, and withdrawn, that are new."""
        sent = [call for call in served.sent.get(self.episode_id, ()) if call not in self.sent]
        withdrawn = [call for call in served.withdrawn.get(self.episode_id, ()) if call not in self.withdrawn]
        self.sent.update(sent)
        self.withdrawn.update(withdrawn)
        return sent, withdrawn


class EndedEpisode(msgspec.Struct, frozen=True):
    """What stays of an episode after its end was decided."""

    state: str
    reason: str
    digest: bytes
    calls: frozenset[str]


class Waiting(msgspec.Struct, frozen=True):
    """A finished episode, winner of its slot, whose group is not complete."""

    episode_id: str
    slot_id: str
    policies: tuple[str, ...]
    """The trained policies that have turns in it."""


class Past(Protocol):
    """What the core asks about things that have left its memory."""

    def ended(self, episode_id: str) -> EndedEpisode | None: ...
    def winner(self, slot_id: str) -> str | None: ...
    def group_closed(self, group_id: str) -> bool: ...
    def reply(self, command_id: str) -> dict[str, Any] | None: ...


class KindCredit(msgspec.Struct, kw_only=True):
    """What was granted to one kind; what of it is in use follows from the groups and tickets."""

    allocated: int = 0
    """Groups granted to this kind since the run began."""
    trained: int = 0
    """Groups of this kind that were trained."""
    debt: float = 0.0
    """Share of a group that rounding still owes this kind after the batch that is being granted."""
    due: int = 0
    """Groups of the batch that is being granted which this kind has not been granted yet."""


class PublishedGroup(msgspec.Struct, kw_only=True):
    """A group in the hands of the learners."""

    kind: str
    size: int
    pending: dict[str, set[str]]
    """Policy -> episodes it has not reported on."""
    members: dict[str, int] = {}
    """Policy -> episodes it was sent."""
    trained: set[str] = set()
    """Episodes that some policy trained."""


class Usage(msgspec.Struct, kw_only=True):
    """Slots of one kind that are under way, tickets aside."""

    running: int = 0
    waiting: int = 0
    """Finished, in groups that are not complete."""
    published: int = 0
    """Of the groups that learners have in hand, members that are missing included."""


class Snapshot(msgspec.Struct, kw_only=True):
    """All that a core needs to go on where another stopped."""

    episodes: list[OpenEpisode] = []
    groups: dict[str, tuple[str, int, float]] = {}
    """Open groups with a finished member: id -> kind, size, when the first finished."""
    waiting: dict[str, list[Waiting]] = {}
    given_up: list[tuple[str, str, str, int, float]] = []
    """Slots of open groups to which no further attempt will come: group, slot, kind, size, since when."""
    published: dict[str, PublishedGroup] = {}
    tickets: dict[str, str] = {}
    """Tickets that are out: id -> kind."""
    credit: dict[str, KindCredit] = {}
    versions: dict[str, int] = {}
    counts: dict[str, int] = {}
    control: Control | None = None
    evals: Evals | None = None
