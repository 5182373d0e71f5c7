"""Groups: the finished slots of one task that wait for each other, and the groups that learners have in hand.

A group goes on when nothing more of it will come: each slot has a winner or is given up, with nobody at it any more; or
when its deadline has passed since the first of them finished. At least `min_group` must have. Below that its members
are dropped and their credit returns; siblings that finish later may still make a group among themselves. Once published a
group takes nobody in any more.

A slot is given up when its client says that no further attempt will come; and when one finished that cannot be trained, as
whoever ended it holds the slot for done. If it wins after all, it has won. Where nobody of their group is running or has
finished, slots given up are remembered for as long as a deadline.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from swarmq.collector.decide.state import PublishedGroup, Rules, Usage, Waiting


class OpenGroup(msgspec.Struct, kw_only=True):
    kind: str
    size: int
    since: float = 0.0
    """When the first member finished; 0 before that."""
    running: dict[str, str] = {}
    """Episode -> its slot."""
    winners: dict[str, Waiting] = {}
    """Slot -> the attempt that finished first."""
    given_up: dict[str, float] = {}
    """Slot -> when that was. It may have won after all."""

    @property
    def lacks(self) -> int:
        """Slots whose winner may still come."""
        gone = self.given_up.keys() - self.winners.keys() - set(self.running.values()) if self.given_up else ()
        return max(self.size - len(self.winners) - len(gone), 0)


class Groups:
    """All groups that are not done."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.open: dict[str, OpenGroup] = {}
        self.published: dict[str, PublishedGroup] = {}
        self.place: dict[str, str] = {}
        """Published episode -> its group."""
        self.ready: Counter[str] = Counter()
        """Policy -> groups it has been given and has not wholly reported on."""
        self.ready_of: dict[str, Counter[str]] = defaultdict(Counter)
        """The same by policy and kind."""

    def run(self, group_id: str, kind: str, size: int, slot_id: str, episode_id: str) -> None:
        """An episode of an open group has begun."""
        group = self.open.setdefault(group_id, OpenGroup(kind=kind, size=size))
        group.running[episode_id] = slot_id

    def leave(self, group_id: str, episode_id: str) -> None:
        """An episode is no longer running; a group of which nothing is known any more is forgotten."""
        if group := self.open.get(group_id):
            group.running.pop(episode_id, None)
            if not group.running and not group.winners and not group.given_up:
                del self.open[group_id]

    def give_up(self, group_id: str, slot_id: str, now: float) -> OpenGroup | None:
        """No further attempt at a slot will come. None where that changes nothing: it was known, or another one has won."""
        group = self.open.get(group_id)
        if group is None or slot_id in group.given_up or slot_id in group.winners:
            return None
        group.given_up[slot_id] = now
        return group

    def win(self, group_id: str, kind: str, size: int, member: Waiting, now: float) -> OpenGroup:
        """A slot has its winner."""
        group = self.open.setdefault(group_id, OpenGroup(kind=kind, size=size))
        group.running.pop(member.episode_id, None)
        group.since = group.since or now
        group.winners[member.slot_id] = member
        return group

    def overdue(self, now: float) -> list[str]:
        deadline_s = self.rules.deadline_s
        return [gid for gid, group in self.open.items() if group.winners and now - group.since >= deadline_s]

    def abandoned(self, now: float) -> list[str]:
        """Groups of which nothing but given-up slots is known, and nothing more was heard for as long as a deadline."""
        return [
            gid
            for gid, group in self.open.items()
            if group.given_up
            and not (group.running or group.winners)
            and now - max(group.given_up.values()) >= self.rules.deadline_s
        ]

    def need(self, group: OpenGroup) -> int:
        """Members it takes to go on without the others."""
        return min(self.rules.min_group, group.size)

    def shares(self, group: OpenGroup) -> dict[str, list[str]]:
        """Policy -> members with turns of it, for policies that have enough of them to be compared."""
        members: dict[str, list[str]] = {}
        for member in group.winners.values():
            for policy in member.policies:
                members.setdefault(policy, []).append(member.episode_id)
        return {policy: ids for policy, ids in members.items() if len(ids) >= self.need(group)}

    def publish(self, group_id: str, pending: dict[str, set[str]]) -> None:
        group = self.open.pop(group_id)
        members = {policy: len(ids) for policy, ids in pending.items()}
        self.restore(group_id, PublishedGroup(kind=group.kind, size=group.size, pending=pending, members=members))

    def restore(self, group_id: str, published: PublishedGroup) -> None:
        self.published[group_id] = published
        self.ready.update(published.pending.keys())
        for policy in published.pending:
            self.ready_of[policy][published.kind] += 1
        for episode_id in set().union(*published.pending.values()):
            self.place[episode_id] = group_id

    def report(self, episode_id: str, policy: str, *, trained: bool) -> bool:
        """A learner tells of an episode. False if it had told before or never was given it."""
        group = self.published.get(self.place.get(episode_id, ""))
        if group is None or episode_id not in group.pending.get(policy, ()):
            return False
        group.pending[policy].remove(episode_id)
        if trained:
            group.trained.add(episode_id)
        if not group.pending[policy]:
            del group.pending[policy]
            self.ready[policy] -= 1
            self.ready_of[policy][group.kind] -= 1
        return True

    def usage(self) -> dict[str, Usage]:
        """Kind -> slots under way."""
        kinds: dict[str, Usage] = {}
        for group in self.open.values():
            usage = kinds.setdefault(group.kind, Usage())
            usage.running += len(group.running)
            usage.waiting += len(group.winners)
        for published in self.published.values():
            kinds.setdefault(published.kind, Usage()).published += min(
                published.size, self.rules.size_of(published.kind)
            )
        return kinds

    def lacking(self) -> dict[str, int]:
        """Kind -> slots that its nearest group with a finished member lacks and may still get."""
        least: dict[str, int] = {}
        for group in self.open.values():
            if group.winners:
                least[group.kind] = min(least.get(group.kind, group.lacks), group.lacks)
        return least

    def held_by_others(self, policies: Collection[str]) -> int:
        """Published groups that nobody but learners of other policies is to report on."""
        return sum(group.pending.keys().isdisjoint(policies) for group in self.published.values())

    def starved(self, policies: Iterable[str]) -> bool:
        """Whether no learner has as many groups as a batch waiting."""
        return all(self.ready[policy] < self.rules.groups_per_batch for policy in policies)

    def short_of(self, wanted: Mapping[str, Mapping[str, float]], *, owed: int = 0) -> set[str]:
        """Kinds that keep learners waiting; empty when one has the groups of its batch. `wanted`: policy -> kind ->
        groups of the next batch, before rounding, which may owe it one more where there are several kinds. A learner that
        has many groups of one kind may lack another."""
        short = [
            {
                kind
                for kind, share in kinds.items()
                if self.ready_of[policy][kind] < math.ceil(round(share, 6)) + (owed if len(kinds) > 1 else 0)
            }
            for policy, kinds in wanted.items()
        ]
        return set().union(*short) if all(short) else set()
