"""Formation of batches: which rollouts make the next batch, and which are dropped and why. No clock, no I/O.

  accept --> group incomplete --> group complete --> groups of its kind --take--> batch record
     |                    |
     +---- drops ---------+--------------------> next record, batch or not

A batch holds whole groups in the shares of the task mix; the fraction of a group that rounding withholds from a kind is carried
over to the next batch. Within a kind, groups with the oldest tokens come first. In the order of completion, slow episodes would
wait behind quick ones that began later, and be dropped as stale more often; fewer episodes, and especially fewer long ones, would
be trained.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import compress
from operator import not_

import msgspec

from swarmq.config import TEACHER_TEMPERATURE, Train
from swarmq.errors import TimelineError
from swarmq.estimates import MetricNames
from swarmq.learner.batching.sampling_checks import find_altered_sampling
from swarmq.learner.feed.batch_summary import add_sums, newest_version, oldest_version, sum_episodes
from swarmq.learner.methods.credit import group_by_slot, has_signal, update_baselines
from swarmq.learner.store.records import BatchIndex, BatchRecord, EpisodeSums
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.messages import EQUAL_REWARDS, Rollout
from swarmq.task_mix import Dealt, Stretch, deal, kinds_of, shares
from swarmq.timeline import ImageTable, resolve

SMALLEST_GROUP = 2
"""Minimum number of members of a group that has a baseline."""

MIN_KNOWN = 20_000
WINDOWS_KNOWN = 4
"""Number of ids of logged episodes to keep, as a multiple of the collector's window, if that is more than
`BatchLimits.min_known`. Until the collector has processed the report on a rollout, it may send the rollout again, and at most one
window of other episodes finishes."""


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Composition and limits of batches."""

    groups_per_batch: int
    mix: dict[str, float]
    max_staleness: int
    group_size: int = 8
    """Largest group size of all kinds."""
    min_group: int = SMALLEST_GROUP
    vocab_size: int | None = None
    max_length: int | None = None
    routing: RoutingShape | None = None
    """Size of the routed experts that turns must have; None if they need none."""
    train: Train = Train()
    stretches: tuple[Stretch, ...] = ()
    """The mix from step to step, in order of steps; empty if the mix is constant."""
    lent: tuple[str, ...] = ()
    """Dry kinds; their shares go to the other kinds for the time being."""
    control: int = 0
    """Sequence number of the control state from which these limits follow."""
    min_known: int = MIN_KNOWN
    """Minimum number of ids of logged episodes to keep."""

    def shares(self, step: int, *, lent: Collection[str] | None = None) -> dict[str, float]:
        """Return kind -> share of the batch of `step`. `lent`: kinds that get no share, by default those in `self.lent`."""
        return shares(self._stretches, step, self.lent if lent is None else lent)

    @property
    def num_known(self) -> int:
        """Number of the newest logged episodes whose ids are kept, because they may be delivered again."""
        return max(self.min_known, WINDOWS_KNOWN * self.window)

    @property
    def window(self) -> int:
        """Maximum number of episodes that the collector allows in progress."""
        return (self.max_staleness + 1) * self.groups_per_batch * self.group_size

    @property
    def kinds(self) -> tuple[str, ...]:
        return kinds_of(self._stretches)

    @property
    def _stretches(self) -> tuple[Stretch, ...]:
        return self.stretches or (Stretch(from_step=0, mix=self.mix),)


class PendingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A complete group. Its dropped members are recorded only with its batch: if they were acknowledged earlier, a redelivered
    group could not be complete again."""

    usable: list[Rollout]
    dropped: dict[str, str]
    oldest: int
    """Weight version of the group's oldest sampled token."""
    newest: int


class Batcher:
    """Forms batches; holds all rollouts that are in memory and not yet in the log."""

    def __init__(self, limits: BatchLimits, logged: Iterable[BatchIndex] = ()) -> None:
        """Start without rollouts. `logged`: indices of the batch log, whose episodes are not accepted again."""
        self._ready: dict[str, list[PendingGroup]] = {}
        self.change(limits)
        self.record, self.carry, self.baselines = 0, dict[str, float](), dict[str, float]()
        self.known: OrderedDict[str, None] = OrderedDict()
        self.term = 0
        """Newest term of a rollout; see `Rollout.term`."""
        self._metric_names = MetricNames()
        for index in logged:
            self.note(index)
        self._incomplete: dict[str, dict[str, Rollout]] = {}
        self._waiting: set[str] = set()
        self._dropped: dict[str, str] = {}
        self._tally: dict[str, EpisodeSums] = {}
        self._groups_equal = 0
        self._reasons: set[str] = set()
        self._news: list[str] = []
        self._warnings: list[str] = []

    def change(self, limits: BatchLimits) -> None:
        """Use new limits from the next batch on, also for groups that already wait."""
        self.limits, ready = limits, self._ready
        self._ready = {kind: [] for kind in (*ready, *limits.kinds)}
        for kind, groups in ready.items():
            for group in groups:
                self._queue_usable(kind, group.usable, group.dropped)

    def note(self, index: BatchIndex) -> None:
        """Take over number, carry, baselines and episode ids of a record that is in the log."""
        self.record, self.carry, self.baselines = index.record, dict(index.carry), dict(index.baselines)
        self.term = max(self.term, index.term)
        for episode_id in (*index.trained, *index.dropped):
            self.known[episode_id] = None
        while len(self.known) > self.limits.num_known:
            self.known.popitem(last=False)
        for kind, sums in index.tally.items():
            self._metric_names.admit(kind, sums.metrics)

    def accept(self, episode: Rollout) -> bool:
        """Accept a rollout. Returns False if the log already has it; a rollout that already waits changes nothing.

        A rollout of an older term is refused, because its id may be forgotten already. The leading collector sends all unreported
        rollouts again. Raises SetUpError for a rollout whose routing should be replayed and cannot be.
        """
        if episode.term < self.term or episode.episode_id in self.known:
            return False
        if self.limits.routing:
            self.limits.routing.check(episode)
        self.term = episode.term
        if episode.episode_id in self._waiting or episode.episode_id in self._dropped:
            return True
        self._waiting.add(episode.episode_id)
        members = self._incomplete.setdefault(episode.group_id, {})
        members[episode.episode_id] = episode
        if len(members) >= episode.group_members:
            self._finish_group(list(self._incomplete.pop(episode.group_id).values()))
        return True

    def take(self, *, version: int, at: float, settings: Train) -> BatchRecord | None:
        """Return the batch that trains the weights of `version` to the next version, with all drops since the last record, or
        None if too few groups are ready."""
        self._drop_stale(version)
        wanted, carry = self.next_batch(version + 1)
        if any(len(self._ready[kind]) < count for kind, count in wanted.items()):
            return None
        groups = [group for kind, count in wanted.items() for group in self._take_oldest(kind, count)]
        for group in groups:
            self._drop(group.dropped)
        episodes = tuple(episode for group in groups for episode in group.usable)
        self._waiting.difference_update(episode.episode_id for episode in episodes)
        return self._record(version + 1, at, carry, episodes, settings)

    def next_batch(self, step: int) -> Dealt:
        """Return the number of groups of each kind in the batch of `step`, and the fractions that rounding carries over. Kinds
        that lend their share contribute the groups that are ready."""
        limits, groups = self.limits, self.limits.groups_per_batch
        own = deal(limits.shares(step, lent=()), {}, groups).counts if limits.lent else {}
        there = {kind: min(len(self._ready[kind]), own.get(kind, 0)) for kind in limits.lent}
        dealt = deal(limits.shares(step), self.carry, groups - sum(there.values()))
        return Dealt(dealt.counts | there, dealt.carry)

    def drops(self, *, version: int, at: float) -> BatchRecord | None:
        """Return a record of the drops since the last record, or None if there are none."""
        return self._record(version, at, self.carry) if self._dropped else None

    def news(self) -> list[str]:
        """Return one explanation for each drop reason that occurred for the first time since the last call."""
        news, self._news = self._news, []
        return news

    def warnings(self) -> list[str]:
        """Return the warnings about the agents' metrics since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    @property
    def groups_ready(self) -> dict[str, int]:
        return {kind: len(groups) for kind, groups in self._ready.items()}

    @property
    def groups_incomplete(self) -> int:
        return len(self._incomplete)

    def _finish_group(self, members: list[Rollout]) -> None:
        """Drop members that cannot be trained, and queue the others."""
        kind = members[0].kind
        if kind not in self._ready:
            self._drop(_with_reason(members, "kind_not_in_mix"))
            return
        members.sort(key=lambda episode: (episode.slot, episode.episode_id))
        self._queue_usable(kind, members, {})

    def _queue_usable(self, kind: str, members: list[Rollout], dropped: Mapping[str, str]) -> None:
        """Queue a group if enough members are left. `dropped`: members already dropped."""
        out = dict(dropped)
        for episode in members:
            reason, why = self._find_fault(episode)
            if reason:
                out[episode.episode_id] = reason
                self._add_news(reason, why)
        self._make_ready(kind, [episode for episode in members if episode.episode_id not in out], out)

    def _make_ready(self, kind: str, usable: list[Rollout], dropped: dict[str, str]) -> None:
        train = self.limits.train.of_kind(kind)
        if not usable or (len(usable) < self._min_members(usable) and train.compares_slots):
            self._drop(dropped | _with_reason(usable, "group_too_small"))
            if not dropped:
                why = (
                    f"{usable[0].episode_id} is alone in its group, and advantage {train.advantage!r} compares attempts"
                )
                self._add_news("group_too_small", f"{why}: use larger groups, or advantage = 'ema'")
        elif not has_signal(usable, train):
            self._groups_equal += 1
            self._tally = add_sums([self._tally, self._sum_shown(usable)])
            self._drop(dropped | _with_reason(usable, EQUAL_REWARDS))
        else:
            oldest, newest = min(map(oldest_version, usable)), max(map(newest_version, usable))
            self._ready[kind].append(PendingGroup(usable=usable, dropped=dropped, oldest=oldest, newest=newest))

    def _min_members(self, usable: list[Rollout]) -> int:
        """Return the minimum number of members for this group to be trained: `min_group`, or less if the collector formed the
        group with fewer."""
        return max(SMALLEST_GROUP, min(self.limits.min_group, usable[0].group_members))

    def _find_fault(self, episode: Rollout) -> tuple[str, str]:
        """Return why an episode cannot be trained, as a reason to count and a sentence; two empty strings if it can."""
        try:
            vocab_size, max_length = self.limits.vocab_size, self.limits.max_length
            resolve(episode.turns, vocab_size=vocab_size, max_length=max_length, images=ImageTable())
        except TimelineError as error:
            return error.reason, str(error)
        for turn in episode.turns:
            if settings := find_altered_sampling(turn.sampling):
                why = f"was sampled with {', '.join(settings)}, which no importance ratio corrects"
                return "truncated_sampling", f"turn {turn.call_id} of {episode.episode_id} {why}"
            if self.limits.train.teacher_url and turn.sampling.temperature != TEACHER_TEMPERATURE:
                why = f"was sampled at temperature {turn.sampling.temperature:g}, which a served teacher cannot score"
                return "no_teacher", f"turn {turn.call_id} of {episode.episode_id} {why} (train.teacher)"
            if turn.finish_reason == "length" and self.limits.train.overlong == "drop":
                why = "was cut off by a token limit, and train.overlong is 'drop'"
                return "overlong", f"turn {turn.call_id} of {episode.episode_id} {why}"
        return ("", "") if episode.turns else ("no_turns", f"{episode.episode_id} made no model call")

    def _add_news(self, reason: str, sentence: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            self._news.append(f"dropped as {reason}: {sentence}")

    def _sum_shown(self, episodes: Iterable[Rollout]) -> dict[str, EpisodeSums]:
        """Return kind -> sums over the kind's episodes, with a bounded number of metrics."""
        shown = {}
        for kind, sums in sum_episodes(episodes).items():
            metrics, warning = self._metric_names.admit(kind, sums.metrics)
            shown[kind] = msgspec.structs.replace(sums, metrics=metrics)
            if warning:
                self._warnings.append(warning)
        return shown

    def _drop_stale(self, version: int) -> None:
        """Drop episodes with a token that is too old for the next step or from a version that this learner has not made, and
        groups that are then too small."""
        oldest = version - self.limits.max_staleness
        for kind, groups in self._ready.items():
            fresh_enough = [oldest <= group.oldest and group.newest <= version for group in groups]
            self._ready[kind] = list(compress(groups, fresh_enough))
            for group in compress(groups, map(not_, fresh_enough)):
                ahead = [episode for episode in group.usable if newest_version(episode) > version]
                stale = [episode for episode in group.usable if oldest_version(episode) < oldest]
                for episode in ahead[:1]:
                    self._add_news("version_unknown", _describe_unknown_version(episode, version))
                fresh = [episode for episode in group.usable if episode not in (*ahead, *stale)]
                self._make_ready(
                    kind, fresh, group.dropped | _with_reason(stale, "stale") | _with_reason(ahead, "version_unknown")
                )

    def _take_oldest(self, kind: str, count: int) -> list[PendingGroup]:
        """Remove the `count` oldest groups of a kind from those that are ready, and return them."""
        groups = sorted(self._ready[kind], key=lambda group: group.oldest)
        self._ready[kind] = groups[count:]
        return groups[:count]

    def _drop(self, dropped: Mapping[str, str]) -> None:
        self._waiting.difference_update(dropped)
        self._dropped.update(dropped)

    def _record(
        self,
        version: int,
        at: float,
        carry: Mapping[str, float],
        episodes: tuple[Rollout, ...] = (),
        settings: Train | None = None,
    ) -> BatchRecord:
        before = self.baselines
        index = BatchIndex(
            record=self.record + 1,
            version=version,
            trained=tuple(episode.episode_id for episode in episodes),
            dropped=self._dropped,
            carry=dict(carry),
            baselines=_baselines(before, episodes, settings) if settings else dict(before),
            tally=add_sums([self._tally, self._sum_shown(episodes)]),
            groups_equal=self._groups_equal,
            at=at,
            control=self.limits.control,
            mix=self.limits.shares(version) if episodes else {},
            term=self.term,
        )
        self.note(index)
        self._dropped, self._tally, self._groups_equal = {}, {}, 0
        return BatchRecord(index=index, episodes=episodes, settings=settings, baselines=dict(before))


def _baselines(before: Mapping[str, float], episodes: tuple[Rollout, ...], train: Train) -> dict[str, float]:
    """Return the `ema` baselines after a batch, for the kinds that use them."""
    groups = group_by_slot(episodes)
    return update_baselines(
        before, [group for group in groups if train.of_kind(group[0].kind).advantage == "ema"], train
    )


def _describe_unknown_version(episode: Rollout, version: int) -> str:
    return (
        f"{episode.episode_id} has tokens of version {newest_version(episode)}, and the learner has made {version}: "
        "their engine served another run's weights, or this run's log was removed"
    )


def _with_reason(episodes: Iterable[Rollout], reason: str) -> dict[str, str]:
    return {episode.episode_id: reason for episode in episodes}
