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

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.state import PublishedGroup, Rules, RunState, Snapshot, Usage, WaitingMember
from swarmq.collector.decide.tickets import TicketWindow
from swarmq.messages import EQUAL_REWARDS, EpisodeBegin, EpisodeEnd, StepReport


class OpenGroup(msgspec.Struct, kw_only=True):
    """A group that is not published yet."""

    kind: str
    size: int
    since: float = 0.0
    """Time when the first member finished; 0 before."""
    running: dict[str, str] = {}
    """Id of a running episode -> id of its slot."""
    winners: dict[str, WaitingMember] = {}
    """Slot -> its attempt that finished first."""
    given_up: dict[str, float] = {}
    """Given-up slot -> time when it was given up. It may get a winner after all."""

    @property
    def lacks(self) -> int:
        """Number of slots without a winner that may still get one."""
        gone = self.given_up.keys() - self.winners.keys() - set(self.running.values()) if self.given_up else ()
        return max(self.size - len(self.winners) - len(gone), 0)


class Groups:
    """All groups that are not settled."""

    def __init__(self, run: RunState, tickets: TicketWindow) -> None:
        self.run = run
        self.tickets = tickets
        self.open: dict[str, OpenGroup] = {}
        self.published: dict[str, PublishedGroup] = {}
        self.place: dict[str, str] = {}
        """Episode id of a published group -> id of the group."""
        self.ready: Counter[str] = Counter()
        """Policy -> number of groups that were sent to its learner, of which some episodes are neither trained nor dropped yet."""
        self.ready_of: dict[str, Counter[str]] = defaultdict(Counter)
        """Policy -> kind -> number of the groups in `ready`."""
        self._wanted_for: tuple[Rules, frozenset[str], dict[str, int]] | None = None
        self._wanted: dict[str, dict[str, float]] = {}
        """Policy -> kind -> groups of the next batch before rounding, computed for the rules, lent kinds and steps in
        `_wanted_for`."""

    def join(self, begin: EpisodeBegin) -> None:
        """Count a running episode in its group, unless the group is published: then all of its episodes are charged already."""
        group_id = begin.slot.group_id
        if group_id in self.open or not self.run.past.group_closed(group_id):
            group = self.open.setdefault(group_id, OpenGroup(kind=begin.kind, size=begin.group_size))
            group.running[begin.episode_id] = begin.slot.id

    def drop(self, begin: EpisodeBegin, end: EpisodeEnd | None, now: float) -> list[do.Effect]:
        """Remove a dropped episode from its group. Its slot is given up if the episode was finished or its client sends no
        further attempt."""
        slot = begin.slot
        is_last = end is not None and (end.final or end.status == "finished")
        effects = self._give_up(slot.group_id, slot.id, now) if is_last else []
        self._leave(slot.group_id, begin.episode_id)
        return effects + self.advance(slot.group_id)

    def advance(self, group_id: str) -> list[do.Effect]:
        """Publish a group, or forget it, if no more members will come."""
        group = self.open.get(group_id)
        if group is None or group.lacks:
            return []
        if group.winners:
            return self._publish(group_id)
        return [] if group.running else self._forget(group_id)

    def expire(self, now: float) -> list[do.Effect]:
        """Publish or drop overdue groups, and forget abandoned ones."""
        effects: list[do.Effect] = []
        for group_id in self._overdue(now):
            effects += self._publish(group_id)
        for group_id in self._find_abandoned(now):
            effects += self._forget(group_id)
        return effects

    def _leave(self, group_id: str, episode_id: str) -> None:
        """Remove a running episode from its group. A group that is left without episodes and given-up slots is forgotten."""
        if group := self.open.get(group_id):
            group.running.pop(episode_id, None)
            if not group.running and not group.winners and not group.given_up:
                del self.open[group_id]

    def _give_up(self, group_id: str, slot_id: str, now: float) -> list[do.Effect]:
        """Give up a slot, unless it was given up or won already."""
        group = self.open.get(group_id)
        if group is None or slot_id in group.given_up or slot_id in group.winners:
            return []
        group.given_up[slot_id] = now
        self.run.counts["slot_given_up"] += 1
        return [do.GiveUpSlot(group_id, slot_id, group.kind, group.size, now)]

    def _forget(self, group_id: str) -> list[do.Effect]:
        self.open.pop(group_id, None)
        return [do.ForgetGivenUp(group_id)]

    def _publish(self, group_id: str) -> list[do.Effect]:
        """Publish a group, or drop it if too few members can be compared."""
        group = self.open[group_id]
        shares = self._shares(group)
        chosen = {episode_id for members in shares.values() for episode_id in members}
        effects: list[do.Effect] = []
        for member in group.winners.values():
            if member.episode_id in chosen:
                effects.append(do.Release(member.episode_id))
            else:
                effects += self._drop_small(member)
        if not chosen:
            is_spent = not group.lacks and not group.running
            group.winners.clear()
            group.since = 0.0
            self._leave(group_id, "")
            return [*effects, do.FreeGroup(group_id), *(self._forget(group_id) if is_spent else [])]
        self.run.counts["forwarded"] += len(chosen)
        self.run.counts["groups"] += 1
        effects.append(do.SaveGroup(group_id, group.kind, group.size, "published", group.since))
        if group.given_up:
            effects.append(do.ForgetGivenUp(group_id))
        for policy, members in shares.items():
            effects += [do.SaveOutcome(member, policy, group_id, "pending", 0, "") for member in members]
            effects += [do.Forward(member, policy, len(members)) for member in members]
        del self.open[group_id]
        pending = {policy: set(members) for policy, members in shares.items()}
        member_counts = {policy: len(ids) for policy, ids in pending.items()}
        self._add_published(
            group_id, PublishedGroup(kind=group.kind, size=group.size, pending=pending, members=member_counts)
        )
        return effects

    def _drop_small(self, member: WaitingMember) -> list[do.Effect]:
        self.run.counts["dropped.group_too_small"] += 1
        return [
            do.FreeSlot(member.slot_id),
            do.Close("dropped", "group_too_small", member.episode_id),
            do.ForgetTurns(member.episode_id),
        ]

    def win(self, group_id: str, kind: str, size: int, member: WaitingMember, now: float) -> OpenGroup:
        """Record the winner of a slot and return its group."""
        group = self.open.setdefault(group_id, OpenGroup(kind=kind, size=size))
        group.running.pop(member.episode_id, None)
        group.since = group.since or now
        group.winners[member.slot_id] = member
        return group

    def _overdue(self, now: float) -> list[str]:
        """Return the ids of groups with a finished member whose deadline has passed."""
        deadline_s = self.run.rules.deadline_s
        return [gid for gid, group in self.open.items() if group.winners and now - group.since >= deadline_s]

    def _find_abandoned(self, now: float) -> list[str]:
        """Return the ids of groups in which every begun slot was given up, the last one at least `deadline_s` ago."""
        return [
            gid
            for gid, group in self.open.items()
            if group.given_up
            and not (group.running or group.winners)
            and now - max(group.given_up.values()) >= self.run.rules.deadline_s
        ]

    def need(self, group: OpenGroup) -> int:
        """Return the number of finished members that the group needs to be published."""
        return min(self.run.rules.min_group, group.size)

    def _shares(self, group: OpenGroup) -> dict[str, list[str]]:
        """Return policy -> episodes of the group with turns of that policy, for policies with enough episodes to compare."""
        members: dict[str, list[str]] = {}
        for member in group.winners.values():
            for policy in member.policies:
                members.setdefault(policy, []).append(member.episode_id)
        return {policy: ids for policy, ids in members.items() if len(ids) >= self.need(group)}

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Restore stored groups with their members and given-up slots."""
        for group_id, (kind, size, since) in snapshot.groups.items():
            for member in snapshot.waiting.get(group_id, ()):
                self.win(group_id, kind, size, member, min(since, now))
        for group_id, slot_id, kind, size, at in snapshot.given_up:
            self.open.setdefault(group_id, OpenGroup(kind=kind, size=size)).given_up[slot_id] = min(at, now)
        for group_id, published in snapshot.published.items():
            self._add_published(group_id, published)

    def _add_published(self, group_id: str, published: PublishedGroup) -> None:
        self.published[group_id] = published
        self.ready.update(published.pending.keys())
        for policy in published.pending:
            self.ready_of[policy][published.kind] += 1
        for episode_id in set().union(*published.pending.values()):
            self.place[episode_id] = group_id

    def take_report(self, report: StepReport) -> tuple[list[do.Effect], Counter[str], Counter[str]]:
        """Take a learner's report. Return effects, kind -> trained groups, and kind -> groups dropped for equal rewards."""
        fates = [(episode_id, "trained", "") for episode_id in report.trained]
        fates += [(episode_id, "dropped", reason) for episode_id, reason in report.dropped.items()]
        effects: list[do.Effect] = []
        taught, equal = dict[str, str](), dict[str, str]()
        for episode_id, state, reason in fates:
            group_id = self.place.get(episode_id, "")
            if not self._mark_reported(episode_id, report.policy, is_trained=state == "trained"):
                self.run.counts["consumed_unknown"] += 1
                continue
            if state == "trained":
                taught[group_id] = self.published[group_id].kind
            elif reason == EQUAL_REWARDS:
                equal[group_id] = self.published[group_id].kind
            effects.append(do.SaveOutcome(episode_id, report.policy, group_id, state, report.version, reason))
            effects.append(do.ForwardSent(episode_id, report.policy))
            outcome = (report.policy, state, report.version, reason)
            effects += self._settle(episode_id, group_id, outcome)
        return effects, Counter(taught.values()), Counter(equal.values())

    def resend(self, policy: str) -> list[do.Effect]:
        """Return all rollouts on which a learner has yet to report, to be published again."""
        return [
            do.Forward(episode_id, policy, group.members[policy])
            for group in self.published.values()
            for episode_id in sorted(group.pending.get(policy, ()))
        ]

    def _mark_reported(self, episode_id: str, policy: str, *, is_trained: bool) -> bool:
        """Record a learner's report on an episode. Return False if the learner had reported on it before or was never given
        it."""
        group = self.published.get(self.place.get(episode_id, ""))
        if group is None or episode_id not in group.pending.get(policy, ()):
            return False
        group.pending[policy].remove(episode_id)
        if is_trained:
            group.trained.add(episode_id)
        if not group.pending[policy]:
            del group.pending[policy]
            self.ready[policy] -= 1
            self.ready_of[policy][group.kind] -= 1
        return True

    def _settle(self, episode_id: str, group_id: str, outcome: tuple[str, str, int, str]) -> list[do.Effect]:
        """Settle an episode after a learner's report, if no other report on it is missing, and forget its messages. The
        group's last member frees the group's credit. `outcome`: (policy, state, version, reason) of the report."""
        group = self.published[group_id]
        _, state, _, reason = outcome
        effects: list[do.Effect] = []
        if not any(episode_id in pending for pending in group.pending.values()):
            del self.place[episode_id]
            if episode_id in group.trained:
                state, reason = "trained", ""
            self.run.counts["trained" if state == "trained" else f"dropped.{reason}"] += 1
            known = (outcome,) if len(group.members) == 1 else ()
            effects += [do.Close(state, reason, episode_id, b"", known), do.ForgetTurns(episode_id)]
        if not group.pending:
            del self.published[group_id]
            if group.trained:
                self.tickets.train(group.kind)
            effects.append(do.SaveGroup(group_id, group.kind, group.size, "done", 0.0))
        return effects

    def usage(self) -> dict[str, Usage]:
        """Return kind -> number of its slots that are running, waiting in open groups, or published."""
        kinds: dict[str, Usage] = {}
        for group in self.open.values():
            usage = kinds.setdefault(group.kind, Usage())
            usage.running += len(group.running)
            usage.waiting += len(group.winners)
        for published in self.published.values():
            kinds.setdefault(published.kind, Usage()).published += min(
                published.size, self.run.rules.size_of(published.kind)
            )
        return kinds

    def lacking(self) -> dict[str, int]:
        """Return kind -> number of slots that may still get a winner in the kind's most complete group with a finished
        member."""
        least: dict[str, int] = {}
        for group in self.open.values():
            if group.winners:
                least[group.kind] = min(least.get(group.kind, group.lacks), group.lacks)
        return least

    def held_by_others(self, policies: Collection[str]) -> int:
        """Return the number of published groups that only learners of policies outside `policies` have yet to report on."""
        return sum(group.pending.keys().isdisjoint(policies) for group in self.published.values())

    def starved(self, policies: Iterable[str]) -> bool:
        """Return whether every learner lacks a batch: none has `groups_per_batch` groups waiting."""
        return all(self.ready[policy] < self.run.rules.groups_per_batch for policy in policies)

    def short_of(self, *, owed: int = 0) -> set[str]:
        """Return the kinds of which learners lack groups for their next batch, or an empty set if some learner lacks none.
        `owed`: groups that rounding may add to each kind, if there are several kinds."""
        rules, lent = self.run.rules, self.tickets.lent
        steps = {policy: self.run.versions[policy] + 1 for policy in self.run.learning()}
        if self._wanted_for != (rules, lent, steps):
            self._wanted_for = (rules, lent, steps)
            self._wanted = {
                policy: {kind: share * rules.groups_per_batch for kind, share in rules.shares(step, lent).items()}
                for policy, step in steps.items()
            }
        return self._short_of(self._wanted, owed=owed)

    def _short_of(self, wanted: Mapping[str, Mapping[str, float]], *, owed: int = 0) -> set[str]:
        """Return the kinds of which learners lack groups for their next batch, or an empty set if some learner lacks none. A learner
        with many groups of one kind may lack another kind.

        `wanted`: policy -> kind -> groups of the next batch before rounding. `owed`: groups that rounding may add to each kind, if
        there are several kinds.
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
