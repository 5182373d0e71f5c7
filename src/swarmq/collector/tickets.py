"""Credit: how many episodes of each kind may be under way, so that rollouts stay near the weights and keep the mix.

The window holds `(max_staleness + 1) * groups_per_batch` groups beyond those that were trained. It is granted to the
kinds group by group, always to the kind that is owed most (largest remainder, carried over), so a batch of 8 groups
at 0.5 / 0.25 / 0.25 is 4 / 2 / 2. Within a kind, a slot of credit is always in exactly one place:

    ticket out -> running -> waiting in its group -> published (the whole group at once) -> trained
         ^___________|_______________|____________________________|   dropped: back to the same kind

A group that is published is charged as a whole one even if some members are missing, so the window counts groups as
the learner does. What is dropped, by us or by a learner, is granted to the same kind again.

The window can be full of what no learner can use: half-open groups whose siblings have no ticket, or groups that one
policy's learner still holds while another's has dropped them. So when every learner lacks groups for a batch, and a
kind has no ticket out and nothing running,

* the slots that its nearest half-open group lacks are ticketed beyond the window;
* if no kind has anything out or running, one group more is granted, to be paid back by the next that is trained.

A learner that has a batch waiting stops both, so staleness grows only while learners starve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmq.collector.effects import Effect, IssueTicket, SaveCredit, TicketUsed
from swarmq.collector.records import KindCredit, Rules, Usage

ROUNDING = 9
"""Decimals to which debts are compared: shares like 0.1 do not add up exactly."""


class Credit:
    """The credit of all kinds of a run."""

    def __init__(self, rules: Rules, kinds: Mapping[str, KindCredit], tickets: Mapping[str, str], serial: int) -> None:
        self.rules = rules
        self.kinds = {name: kinds.get(name, KindCredit()) for name in {**rules.mix, **kinds}}
        self.out: dict[str, set[str]] = {name: set() for name in self.kinds}
        self.serial = serial
        """Number of tickets ever issued; names the next one."""
        self._stored = {name: self._row(name) for name in kinds}
        for ticket_id, kind in tickets.items():
            self.out.setdefault(kind, set()).add(ticket_id)
        self._reclaim()

    def of(self, kind: str) -> KindCredit:
        """The credit of a kind; one outside the mix is counted, but no tickets are issued for it."""
        return self.kinds.setdefault(kind, KindCredit())

    def use(self, kind: str, ticket_id: str) -> list[Effect]:
        """A begin carries this ticket. Empty if it is not out: used before, or issued by a store that is gone."""
        if ticket_id not in self.out.get(kind, ()):
            return []
        self.out[kind].remove(ticket_id)
        return [TicketUsed(ticket_id)]

    def window(self, kind: str) -> int:
        """Slots that may be under way."""
        credit = self.of(kind)
        return (credit.allocated - credit.trained) * self.rules.group_size

    def settle(self, usage: Mapping[str, Usage], *, starved: bool, lacking: Mapping[str, int]) -> list[Effect]:
        """Grant what was freed and issue tickets. `lacking`: per kind, slots its nearest half-open group lacks;
        `starved`: no learner has the groups of a batch waiting."""
        self._grant((self.rules.max_staleness + 1) * self.rules.groups_per_batch - self._granted())
        effects = self._issue(usage, lacking if starved else {})
        if starved and not any(self.out.values()) and not any(used.running for used in usage.values()):
            self._grant(1)
            effects += self._issue(usage, {})
        return [*effects, *self._changed()]

    def _issue(self, usage: Mapping[str, Usage], lacking: Mapping[str, int]) -> list[Effect]:
        """Tickets for what is left of each kind's window, or for what its nearest group lacks."""
        effects: list[Effect] = []
        for kind in self.rules.mix:
            used = usage.get(kind, Usage())
            num = self.window(kind) - len(self.out[kind]) - used.running - used.waiting - used.published
            if num <= 0 and not self.out[kind] and not used.running:
                num = min(lacking.get(kind, 0), self.rules.group_size)
            for _ in range(num):
                self.serial += 1
                ticket_id = f"{kind}.{self.serial}"
                self.out[kind].add(ticket_id)
                effects.append(IssueTicket(ticket_id, kind))
        return effects

    def _granted(self) -> int:
        """Groups that the kinds of the mix were granted and have not trained."""
        return sum(self.kinds[kind].allocated - self.kinds[kind].trained for kind in self.rules.mix)

    def _grant(self, groups: int) -> None:
        """Grant groups, each to the kind that is owed most."""
        for _ in range(groups):
            for kind, share in self.rules.mix.items():
                self.kinds[kind].debt = round(self.kinds[kind].debt + share, ROUNDING)
            kind = max(self.rules.mix, key=lambda name: self.kinds[name].debt)
            self.kinds[kind].debt = round(self.kinds[kind].debt - 1, ROUNDING)
            self.kinds[kind].allocated += 1

    def _reclaim(self) -> None:
        """A kind that has left the mix gives back what it was granted and did not train."""
        for kind in self.kinds.keys() - self.rules.mix.keys():
            self.kinds[kind].allocated = self.kinds[kind].trained
            self.kinds[kind].debt = 0.0

    def _changed(self) -> Iterable[Effect]:
        for kind in self.kinds:
            row = self._row(kind)
            if self._stored.get(kind) != row:
                self._stored[kind] = row
                yield row

    def _row(self, kind: str) -> SaveCredit:
        credit = self.kinds[kind]
        return SaveCredit(kind, credit.allocated, credit.trained, credit.debt)
