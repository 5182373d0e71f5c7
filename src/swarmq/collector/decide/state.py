"""The collector's records in memory, and the rules of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, Protocol

import msgspec

from swarmq.collector.decide.evals import Evals
from swarmq.config import Eval, SwarmJob
from swarmq.messages import Control, DeliveryReport, EpisodeBegin, EpisodeEnd, Turn
from swarmq.task_mix import Stretch, kinds_of, shares

HOLD_S = 30.0
"""Seconds that an end waits for its begin and for the turns that it names, before the episode counts as incomplete. It waits
equally long for delivery reports; then answers without a report count as not received."""

MAX_SILENCE_S = 24 * 3600.0
"""Maximum idle timeout in seconds that a begin can set, so that nothing waits forever."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a job that the collector applies."""

    run: str
    trained: tuple[str, ...]
    """Policies whose episodes are forwarded to learners."""
    known: tuple[str, ...]
    """All policies of the job, including frozen ones."""
    mix: dict[str, float]
    """The mix at the beginning of the run, which holds unless there are `stretches`."""
    stretches: tuple[Stretch, ...] = ()
    group_size: int = 8
    group_sizes: dict[str, int] = {}
    """Kind -> group size, for kinds with their own."""
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
    """Policy -> step at which its learner stops, for policies with a last step."""

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
        """All kinds that are in the mix at any step."""
        return kinds_of(self._stretches)

    def shares(self, step: int, lent: Collection[str] = ()) -> dict[str, float]:
        """Return the mix (kind -> share) of the batch that makes the weights of `step`. `lent`: dry kinds, whose shares go to
        the other kinds."""
        return shares(self._stretches, step, lent)

    def size_of(self, kind: str) -> int:
        return self.group_sizes.get(kind, self.group_size)

    @property
    def _stretches(self) -> tuple[Stretch, ...]:
        return self.stretches or (Stretch(from_step=0, mix=self.mix),)


class TurnMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a turn, without its tokens, from which its fate is decided."""

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
    """Number of tokens of the whole prompt, including shared ones."""
    sampled: int
    size_bytes: int
    image_bytes: int
    token_bytes: int
    """Bytes of a token of the prompt: its id and its routed experts."""

    @classmethod
    def of(cls, turn: Turn, size_bytes: int) -> TurnMeta:
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
            image_bytes=sum(len(image.patches) for image in turn.images),
            token_bytes=4 + (len(turn.routed_experts) // turn.num_routed if turn.routed_experts else 0),
        )


TAINTS = ("", "two_clients", "refused_turn")
"""Reasons why the recorded turns of an episode may differ from the answers that its agent received: turns of two clients are
mixed, or a turn is missing. The store keeps the index of the reason. A taint has no effect if the end names its calls."""


class OpenEpisode(msgspec.Struct, kw_only=True):
    """An episode whose fate is not decided yet. The tokens of its turns are in the store."""

    episode_id: str
    began_at: float
    last_message_at: float
    begin: EpisodeBegin | None = None
    end: EpisodeEnd | None = None
    end_body: bytes = b""
    held_since: float = 0.0
    calls: dict[str, TurnMeta] = {}
    sent: set[str] = set()
    """Call ids whose answers were sent to the last byte, according to delivery reports; their turns may arrive later."""
    withdrawn: set[str] = set()
    """Call ids whose answers were never sent, according to delivery reports; their turns may never arrive."""
    taint: str = ""
    """Why the recorded turns may be wrong, one of `TAINTS`; empty if they are not in doubt."""

    def take_report(self, report: DeliveryReport) -> tuple[list[str], list[str]]:
        """Record a delivery report on this episode, and return the newly sent and the newly withdrawn calls."""
        sent = [call for call in report.sent.get(self.episode_id, ()) if call not in self.sent]
        withdrawn = [call for call in report.withdrawn.get(self.episode_id, ()) if call not in self.withdrawn]
        self.sent.update(sent)
        self.withdrawn.update(withdrawn)
        return sent, withdrawn


class EndedEpisode(msgspec.Struct, frozen=True):
    """Facts that are kept about an episode after its end was decided, to recognise duplicates."""

    state: str
    reason: str
    digest: bytes
    calls: frozenset[str]


class WaitingMember(msgspec.Struct, frozen=True):
    """A finished episode, winner of its slot, whose group is not complete."""

    episode_id: str
    slot_id: str
    policies: tuple[str, ...]
    """The trained policies with turns in the episode."""


class PastEpisodes(Protocol):
    """Lookups of the core about episodes that have left its memory."""

    def ended(self, episode_id: str) -> EndedEpisode | None: ...
    def winner(self, slot_id: str) -> str | None: ...
    def group_closed(self, group_id: str) -> bool: ...
    def reply(self, command_id: str) -> dict[str, Any] | None: ...


class RunState(msgspec.Struct, kw_only=True):
    """State that all aggregates of a core share."""

    rules: Rules
    """Rules in effect; commands change them."""
    past: PastEpisodes
    counts: Counter[str]
    """Counters of the `state` event, and those that continue after a restart."""
    versions: dict[str, int]
    """Policy -> newest weight version that its learner reported."""

    def trained_versions(self) -> dict[str, int]:
        return {policy: self.versions[policy] for policy in self.rules.trained}

    def learning(self) -> tuple[str, ...]:
        """Return the trained policies with steps to go. Groups that wait for other policies stay published and block nothing."""
        last = self.rules.last_steps
        return tuple(policy for policy in self.rules.trained if not 0 < last.get(policy, 0) <= self.versions[policy])


class KindWindow(msgspec.Struct, kw_only=True):
    """Credit granted to one kind. How much of it is used follows from groups and tickets."""

    allocated: int = 0
    """Number of groups granted to this kind since the run began."""
    trained: int = 0
    """Number of groups of this kind that were trained."""
    debt: float = 0.0
    """Fraction of a group that rounding still owes this kind after the batch that is being granted."""
    due: int = 0
    """Number of groups of the batch being granted that this kind has yet to get."""


class PublishedGroup(msgspec.Struct, kw_only=True):
    """A group that learners work on."""

    kind: str
    size: int
    pending: dict[str, set[str]]
    """Policy -> ids of the episodes on which its learner has yet to report."""
    members: dict[str, int] = {}
    """Policy -> number of episodes that its learner was sent."""
    trained: set[str] = set()
    """Ids of the episodes that at least one learner has trained."""


class Usage(msgspec.Struct, kw_only=True):
    """Slots of one kind in use. Tickets that are out are not included."""

    running: int = 0
    waiting: int = 0
    """Number of finished slots in groups that are not published yet."""
    published: int = 0
    """Number of slots of the groups that learners work on, including missing members."""


class Snapshot(msgspec.Struct, kw_only=True):
    """Everything that a core needs to continue where another stopped."""

    episodes: list[OpenEpisode] = []
    groups: dict[str, tuple[str, int, float]] = {}
    """Open groups with a finished member: id -> (kind, size, time when the first finished)."""
    waiting: dict[str, list[WaitingMember]] = {}
    given_up: list[tuple[str, str, str, int, float]] = []
    """Slots of open groups without further attempts: (group, slot, kind, size, time)."""
    published: dict[str, PublishedGroup] = {}
    tickets: dict[str, str] = {}
    """Tickets that are out: id -> kind."""
    credit: dict[str, KindWindow] = {}
    versions: dict[str, int] = {}
    counts: dict[str, int] = {}
    control: Control | None = None
    evals: Evals | None = None
