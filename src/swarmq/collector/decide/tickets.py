"""Credit: how many episodes of each kind may be under way, so that rollouts stay near the weights and keep the mix.

The window holds `(max_staleness + 1) * groups_per_batch` groups beyond those that were trained. It is granted batch by
batch in the shares that hold at the batch's step (largest remainder, carried over), as the learner will take them, so
a batch of 8 groups at 0.5 / 0.25 / 0.25 is 4 / 2 / 2. A kind that has run dry and lends its share is granted nothing, keeps
what it holds, and that does not count. Within a kind, a slot of credit is always in exactly one place:

    ticket out -> running -> waiting in its group -> published (the whole group at once) -> trained
         ^___________|_______________|____________________________|   dropped: back to the same kind

A group that is published is charged as a whole one even if some members are missing, so the window counts groups as
the learner does. What is dropped, by us or by a learner, is granted to the same kind again.

The window can be full of what no learner can use: half-open groups whose siblings have no ticket, or groups that one
policy's learner still holds while another's has dropped them. So when every learner lacks groups of some kind for its
batch, and that kind has no ticket out and nothing running,

* the slots that its nearest half-open group lacks are ticketed beyond the window, also where a learner only may lack one group
  of the kind more than its share: what rounding owes a batch is the learner's to know;
* if no kind has anything out or running, one group more is granted, to be paid back by the next that is trained.

A learner that surely has a batch waiting stops both, so staleness grows only while learners starve.

A policy that has reached its last step trains no more: the window is wider by the groups that wait for such learners alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmq.collector.decide.effects import Effect, IssueTicket, SaveCredit, TicketUsed
from swarmq.collector.decide.state import KindCredit, Rules, Usage
from swarmq.task_mix import deal


class Credit:
    """The credit of all kinds of a run."""

    def __init__(self, rules: Rules, kinds: Mapping[str, KindCredit], tickets: Mapping[str, str], serial: int) -> None:
        self.kinds = dict(kinds)
        self.out: dict[str, set[str]] = {name: set() for name in kinds}
        self.adopt(rules)
        self.serial = serial
        """Number of tickets ever issued; names the next one."""
        self.lent: frozenset[str] = frozenset()
        """Kinds that have run dry and whose share the others have."""
        self.is_open = True
        """False while the run is paused or drained: no tickets."""
        self._stored = {name: self._row(name) for name in kinds}
        for ticket_id, kind in tickets.items():
            self.out.setdefault(kind, set()).add(ticket_id)
        self._reclaim()

    def adopt(self, rules: Rules) -> None:
        """Go on under other rules; what is out stays out."""
        self.rules = rules
        self._kinds = rules.kinds
        for kind in self._kinds:
            self.of(kind)
            self.out.setdefault(kind, set())

    def of(self, kind: str) -> KindCredit:
        """The credit of a kind; one outside the mix is counted, but no tickets are issued for it."""
        return self.kinds.setdefault(kind, KindCredit())

    def use(self, kind: str, ticket_id: str) -> list[Effect]:
        """A begin carries this ticket. Empty if it is not out: used before, or issued by a store that is gone."""
        if ticket_id not in self.out.get(kind, ()):
            return []
        self.out[kind].remove(ticket_id)
        return [TicketUsed(ticket_id)]

    def train(self, kind: str) -> None:
        """A group was trained. A kind whose share is lent may have another one: it is not granted any in its turn."""
        self.of(kind).trained += 1
        self.of(kind).allocated += kind in self.lent

    def window(self, kind: str) -> int:
        """Slots that may be under way."""
        credit = self.of(kind)
        return (credit.allocated - credit.trained) * self.rules.size_of(kind)

    def is_quiet(self, usage: Mapping[str, Usage]) -> bool:
        """Whether some kind has nobody at work for it, so that learners may starve; else it need not be asked."""
        return any(
            kind in self.lent or not (self.out[kind] or (kind in usage and usage[kind].running)) for kind in self._kinds
        )

    @property
    def next_batch(self) -> int:
        """The step of the first batch of which nothing is granted yet."""
        return -(-self._ever() // self.rules.groups_per_batch) + 1

    def settle(
        self, usage: Mapping[str, Usage], *, starved: bool, lacking: Mapping[str, int], idle: int = 0
    ) -> list[Effect]:
        """Grant what was freed and issue tickets. `lacking`: per kind that a learner may wait for, slots its nearest
        half-open group lacks; `starved`: no learner has the groups of a batch waiting; `idle`: groups that wait for
        learners at their last step."""
        if not self.is_open:
            return [*self._changed()]
        self._grant((self.rules.max_staleness + 1) * self.rules.groups_per_batch + idle - self._granted())
        effects = self._issue(usage, lacking)
        idle = not any(tickets for kind, tickets in self.out.items() if kind not in self.lent)
        if starved and idle and not any(used.running for used in usage.values()):
            self._grant(1)
            effects += self._issue(usage, {})
        return [*effects, *self._changed()]

    def _issue(self, usage: Mapping[str, Usage], lacking: Mapping[str, int]) -> list[Effect]:
        """Tickets for what is left of each kind's window, or for what its nearest group lacks."""
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

    def _granted(self) -> int:
        """Groups that kinds were granted and have not trained; what a dry kind holds is nobody's."""
        held = [self.of(kind) for kind in self._kinds if kind not in self.lent]
        return sum(credit.allocated - credit.trained for credit in held)

    def _ever(self) -> int:
        return sum(self.of(kind).allocated for kind in self._kinds)

    def _grant(self, groups: int) -> None:
        """Grant groups in the order of batches."""
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
        """These kinds have run dry; what they were due goes to the others of the next batches."""
        self.lent = frozenset(kinds)
        for kind in self.lent:
            self.of(kind).due = 0

    def _reclaim(self) -> None:
        """A kind that is in no mix gives back what it was granted and did not train."""
        for kind in self.kinds.keys() - set(self._kinds):
            self.kinds[kind].allocated = self.kinds[kind].trained
            self.kinds[kind].debt, self.kinds[kind].due = 0.0, 0

    def _changed(self) -> Iterable[Effect]:
        for kind in self.kinds:
            row = self._row(kind)
            if self._stored.get(kind) != row:
                self._stored[kind] = row
                yield row

    def _row(self, kind: str) -> SaveCredit:
        credit = self.kinds[kind]
        return SaveCredit(kind, credit.allocated, credit.trained, credit.debt, credit.due)
