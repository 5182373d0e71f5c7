"""Groups: finished slots of one task that wait for each other, and the groups that learners work on.

A group is published when nothing more of it will come, because each slot has a winner or is given up and nobody works on it; or
when its deadline has passed since the first member finished. At least `min_group` members must have finished. Otherwise its
members are dropped and their credit returns; siblings that finish later may still form a group among themselves. A published
group takes no further members.

A slot is given up when its client says that no further attempt will come, and when a finished attempt cannot be trained,
because its client considers the slot done. If it wins after all, the win counts. Given-up slots of a group with no running or
finished member are remembered for one deadline.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from swarmq.collector.decide.state import PublishedGroup, Rules, Usage, WaitingMember


class OpenGroup(msgspec.Struct, kw_only=True):
    kind: str
    size: int
    since: float = 0.0
    """Time when the first member finished; 0 before."""
    running: dict[str, str] = {}
    """Running episode -> its slot."""
    winners: dict[str, WaitingMember] = {}
    """Slot -> the attempt that finished first."""
    given_up: dict[str, float] = {}
    """Given-up slot -> time. It may win after all."""

    @property
    def lacks(self) -> int:
        """Number of slots whose winner may still come."""
        gone = self.given_up.keys() - self.winners.keys() - set(self.running.values()) if self.given_up else ()
        return max(self.size - len(self.winners) - len(gone), 0)


class Groups:
    """All groups that are not settled."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.open: dict[str, OpenGroup] = {}
        self.published: dict[str, PublishedGroup] = {}
        self.place: dict[str, str] = {}
        """Published episode -> its group."""
        self.ready: Counter[str] = Counter()
        """Policy -> number of groups that it was given and has not completely reported on."""
        self.ready_of: dict[str, Counter[str]] = defaultdict(Counter)
        """Policy -> kind -> the same number."""

    def run(self, group_id: str, kind: str, size: int, slot_id: str, episode_id: str) -> None:
        """Add a running episode to an open group."""
        group = self.open.setdefault(group_id, OpenGroup(kind=kind, size=size))
        group.running[episode_id] = slot_id

    def leave(self, group_id: str, episode_id: str) -> None:
        """Remove a running episode; a group of which nothing else is known is forgotten."""
        if group := self.open.get(group_id):
            group.running.pop(episode_id, None)
            if not group.running and not group.winners and not group.given_up:
                del self.open[group_id]

    def give_up(self, group_id: str, slot_id: str, now: float) -> OpenGroup | None:
        """Give up a slot. Returns the group, or None if nothing changes because the slot was given up or won already."""
        group = self.open.get(group_id)
        if group is None or slot_id in group.given_up or slot_id in group.winners:
            return None
        group.given_up[slot_id] = now
        return group

    def win(self, group_id: str, kind: str, size: int, member: WaitingMember, now: float) -> OpenGroup:
        """Record the winner of a slot and return its group."""
        group = self.open.setdefault(group_id, OpenGroup(kind=kind, size=size))
        group.running.pop(member.episode_id, None)
        group.since = group.since or now
        group.winners[member.slot_id] = member
        return group

    def overdue(self, now: float) -> list[str]:
        deadline_s = self.rules.deadline_s
        return [gid for gid, group in self.open.items() if group.winners and now - group.since >= deadline_s]

    def abandoned(self, now: float) -> list[str]:
        """Return groups of given-up slots alone of which nothing was heard for one deadline."""
        return [
            gid
            for gid, group in self.open.items()
            if group.given_up
            and not (group.running or group.winners)
            and now - max(group.given_up.values()) >= self.rules.deadline_s
        ]

    def need(self, group: OpenGroup) -> int:
        """Return the number of members with which the group is published without the others."""
        return min(self.rules.min_group, group.size)

    def shares(self, group: OpenGroup) -> dict[str, list[str]]:
        """Return policy -> members with turns of it, for policies with enough of them to be compared."""
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
        """Take a learner's report on an episode. Returns False if it had reported before or was never given the episode."""
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
        """Return kind -> slots in use."""
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
        """Return kind -> slots that its most complete group with a finished member lacks and may still get."""
        least: dict[str, int] = {}
        for group in self.open.values():
            if group.winners:
                least[group.kind] = min(least.get(group.kind, group.lacks), group.lacks)
        return least

    def held_by_others(self, policies: Collection[str]) -> int:
        """Return the number of published groups that only learners of policies outside `policies` have yet to report on."""
        return sum(group.pending.keys().isdisjoint(policies) for group in self.published.values())

    def starved(self, policies: Iterable[str]) -> bool:
        """Return whether no learner has the groups of a batch waiting."""
        return all(self.ready[policy] < self.rules.groups_per_batch for policy in policies)

    def short_of(self, wanted: Mapping[str, Mapping[str, float]], *, owed: int = 0) -> set[str]:
        """Return the kinds that keep learners waiting, or an empty set if one has the groups of its batch.

        `wanted`: policy -> kind -> groups of the next batch before rounding, which may owe one more if there are several kinds.
        A learner with many groups of one kind may lack another.
        """
        short = [
            {
                kind
                for kind, share in kinds.items()
                if self.ready_of[policy][kind] < math.ceil(round(share, 6)) + (owed if len(kinds) > 1 else 0)
            }
            for policy, kinds in wanted.items()
        ]
        return set().union(*short) if all(short) else set()
