"""Tickets: how many episodes of each kind may be in progress, so that rollouts stay close to the weights and keep the mix.

The window holds `(max_staleness + 1) * groups_per_batch` groups beyond those that were trained. It is granted batch by batch in
the shares that hold at the batch's step (largest remainder, carried over), as the learner will take them, so a batch of 8
groups at 0.5 / 0.25 / 0.25 is 4 / 2 / 2. A dry kind whose share is lent is granted nothing; it keeps its groups, which do not
count in the window. Within a kind, a slot of credit is always in exactly one place:

  ticket out -> running -> waiting in its group -> published (the whole group at once) -> trained
       ^___________|_______________|____________________________|   dropped: back to the same kind

A published group is charged as a whole even if members are missing, so the window counts groups as the learner does. Dropped
slots are granted to the same kind again.

The window can be full of groups that no learner can use: half-open groups whose siblings have no ticket, or groups that one
policy's learner still holds while another's has dropped them. So if every learner lacks groups of some kind for its batch, and
that kind has no ticket out and nothing running,

* the slots that its most complete half-open group lacks get tickets beyond the window, also if a learner only may lack one group of
  the kind more than its share, because only the learner knows what rounding owes its batch;
* if no kind has anything out or running, one more group is granted, to be paid back by the next that is trained.

A learner that certainly has a batch waiting stops both, so staleness grows only while learners starve. A policy that has
made its last step trains nothing more, so the window grows by the groups that wait only for such policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmq.collector.decide.effects import Effect, IssueTicket, SaveCredit, TicketUsed
from swarmq.collector.decide.state import KindWindow, Rules, Usage
from swarmq.task_mix import deal

LOST_S = 15.0


class TicketWindow:
    """The ticket window of a run: credit of all kinds."""

    def __init__(self, rules: Rules, kinds: Mapping[str, KindWindow], tickets: Mapping[str, str], serial: int) -> None:
        self.kinds = dict(kinds)
        self.out: dict[str, set[str]] = {name: set() for name in kinds}
        self.adopt(rules)
        self.serial = serial
        """Number of tickets ever issued, from which the next ticket's id is made."""
        self.lent: frozenset[str] = frozenset()
        """Dry kinds whose share goes to the other kinds at present."""
        self.is_open = True
        """Whether tickets are issued; False while the run is paused or drained."""
        self._unaccounted: dict[str, tuple[frozenset[str], float]] = {}
        """Kind with an empty tickets queue -> (ids of its unused tickets, Unix time since when these have been the same)."""
        self._stored = {name: self._row(name) for name in kinds}
        for ticket_id, kind in tickets.items():
            self.out.setdefault(kind, set()).add(ticket_id)
        self._reclaim()

    def adopt(self, rules: Rules) -> None:
        """Adopt other rules; tickets that were issued already stay valid."""
        self.rules = rules
        self._kinds = rules.kinds
        for kind in self._kinds:
            self.of(kind)
            self.out.setdefault(kind, set())

    def of(self, kind: str) -> KindWindow:
        """Return the credit of a kind. A kind outside the mix is counted, but gets no tickets."""
        return self.kinds.setdefault(kind, KindWindow())

    def use(self, kind: str, ticket_id: str) -> list[Effect]:
        """Use the ticket that a begin carries. Return no effects if the ticket is not out, because it was used before or was
        issued by a store that is gone."""
        if ticket_id not in self.out.get(kind, ()):
            return []
        self.out[kind].remove(ticket_id)
        return [TicketUsed(ticket_id)]

    def reissue(self, kind: str) -> list[Effect]:
        """Return all tickets of a kind that are out, to be published again."""
        return [IssueTicket(ticket_id, kind) for ticket_id in sorted(self.out.get(kind, ()))]

    def find_lost(self, waiting: Mapping[str, int], now: float, *, lost_s: float = LOST_S) -> list[str]:
        """Return the kinds of which tickets are lost: issued, in no queue, and unused for `lost_s` seconds, although a client uses
        a ticket at once. `waiting`: kind -> tickets in its queue."""
        before, self._unaccounted = self._unaccounted, {}
        lost = []
        for kind, num in waiting.items():
            out = frozenset(self.out.get(kind, ()))
            if num or not out:
                continue
            known, since = before.get(kind, (out, now))
            if known != out:
                since = now
            elif now - since >= lost_s:
                lost.append(kind)
                since = now
            self._unaccounted[kind] = (out, since)
        return lost

    def train(self, kind: str) -> None:
        """Record that a group was trained. A kind whose share is lent is not granted another group in return."""
        self.of(kind).trained += 1
        self.of(kind).allocated += kind in self.lent

    def window(self, kind: str) -> int:
        """Return the maximum number of slots of a kind that may be in progress."""
        credit = self.of(kind)
        return (credit.allocated - credit.trained) * self.rules.size_of(kind)

    def is_quiet(self, usage: Mapping[str, Usage]) -> bool:
        """Return whether the share of some kind is lent, or some kind has neither tickets out nor running episodes. Only then does the collector
        check whether learners starve."""
        return any(
            kind in self.lent or not (self.out[kind] or (kind in usage and usage[kind].running)) for kind in self._kinds
        )

    @property
    def next_batch(self) -> int:
        """Step of the first batch for which nothing is granted yet."""
        return -(-self._ever() // self.rules.groups_per_batch) + 1

    def settle(
        self, usage: Mapping[str, Usage], *, starved: bool, lacking: Mapping[str, int], idle: int = 0
    ) -> list[Effect]:
        """Grant the freed credit and issue tickets.

        `lacking`: kind that a learner may wait for -> slots that its most complete half-open group lacks. `starved`: whether no
        learner has the groups of a batch waiting. `idle`: number of groups that wait only for policies that have made their last
        step.
        """
        if not self.is_open:
            return [*self._list_changed()]
        self._grant((self.rules.max_staleness + 1) * self.rules.groups_per_batch + idle - self._count_granted())
        effects = self._issue(usage, lacking)
        idle = not any(tickets for kind, tickets in self.out.items() if kind not in self.lent)
        if starved and idle and not any(used.running for used in usage.values()):
            self._grant(1)
            effects += self._issue(usage, {})
        return [*effects, *self._list_changed()]

    def _issue(self, usage: Mapping[str, Usage], lacking: Mapping[str, int]) -> list[Effect]:
        """Issue tickets for the rest of each kind's window, or for the slots that its most complete group lacks."""
        effects: list[Effect] = []
        for kind in self._kinds:
            used = usage.get(kind, Usage())
            num = self.window(kind) - len(self.out[kind]) - used.running - used.waiting - used.published
            if num <= 0 and not self.out[kind] and not used.running:
                num = min(lacking.get(kind, 0), self.rules.size_of(kind))
            for _ in range(num):
                self.serial += 1
                ticket_id = f"{kind}.{self.serial}"
                self.out[kind].add(ticket_id)
                effects.append(IssueTicket(ticket_id, kind))
        return effects

    def _count_granted(self) -> int:
        """Return the number of groups granted and not yet trained; groups held by a lent kind do not count."""
        held = [self.of(kind) for kind in self._kinds if kind not in self.lent]
        return sum(credit.allocated - credit.trained for credit in held)

    def _ever(self) -> int:
        return sum(self.of(kind).allocated for kind in self._kinds)

    def _grant(self, groups: int) -> None:
        """Grant this number of groups, to kinds in the order of batches."""
        for _ in range(groups):
            if not any(credit.due for credit in self.kinds.values()):
                self._plan_batch()
            kind = max(self.kinds, key=lambda name: self.kinds[name].due)
            self.kinds[kind].due -= 1
            self.kinds[kind].allocated += 1

    def _plan_batch(self) -> None:
        mix = self.rules.shares(self._ever() // self.rules.groups_per_batch + 1, self.lent)
        dealt = deal(mix, {kind: self.of(kind).debt for kind in mix}, self.rules.groups_per_batch)
        for kind, credit in self.kinds.items():
            credit.due, credit.debt = dealt.counts.get(kind, 0), dealt.carry.get(kind, 0.0)

    def lend(self, kinds: Iterable[str]) -> None:
        """Give the shares of dry kinds to the other kinds. Groups of the present batch that are still due to dry kinds go to
        the others in the next batches."""
        self.lent = frozenset(kinds)
        for kind in self.lent:
            self.of(kind).due = 0

    def _reclaim(self) -> None:
        """Take back untrained credit from kinds that are no longer in any mix."""
        for kind in self.kinds.keys() - set(self._kinds):
            self.kinds[kind].allocated = self.kinds[kind].trained
            self.kinds[kind].debt, self.kinds[kind].due = 0.0, 0

    def _list_changed(self) -> Iterable[Effect]:
        for kind in self.kinds:
            row = self._row(kind)
            if self._stored.get(kind) != row:
                self._stored[kind] = row
                yield row

    def _row(self, kind: str) -> SaveCredit:
        credit = self.kinds[kind]
        return SaveCredit(kind, credit.allocated, credit.trained, credit.debt, credit.due)
