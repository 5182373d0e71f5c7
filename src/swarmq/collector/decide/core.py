"""The collector's decisions: a message or a tick in, effects out. No clock, no I/O.

  begin, turn, end ──take──> open episode ──decided──> dropped (a reason, counted; credit back) ──last attempt──┐
                                  │                └─> eval    (recorded, never forwarded)                      │
                                  └──accepted: winner of its slot──> open group <──the slot is given up─────────┘
                                                                         │ nothing more to come, or deadline; and enough
  step report ──take──> ledger, credit  <──learners──  published: one rollout per policy

All effects of a batch of calls belong to one transaction, those of `settle()` last. Memory and stored rows agree: a
core built from the store's snapshot continues where this one stands.

Faults and oddities, with the names under which they are counted:

duplicates         the same begin, turn, end or report again: ignored
conflicting_begin  another begin with this id: ignored; unless the end names its calls, the episode is dropped (`two_clients`),
                   because it is unknown which turns belong to which client
conflicting_turn   another turn with this call id: ignored
conflicting_end    another end: ignored, the first one counts
refused turn       a turn that its reader dead-lettered: unless the end names its calls, the episode is dropped (`refused_turn`),
                   because it would be trained without an answer that its agent received
slot_given_up      no further attempt at a slot will come: its group does not wait for it; a later winner still counts
eval_given_up      the same for a slot of an evaluation round
late_turn          a turn after the end: ignored
late_end           an end after the episode expired: ignored
unseen_turns       turns whose delivery no proxy reported in time: not trained, and counted among the orphan_turns
ticket_unknown     a ticket that is not out (used twice): the episode is accepted, and the credit adjusts
orphan_turns       answers that no agent received: never trained (`assemble.py`)
rewards_uncredited rewards by call for a missing or untrained call: stored with the episode, with a warning
consumed_unknown   a report on an episode that this learner was not given, or has reported before: ignored
sent_again         a queue was deleted or emptied: all that it may have held is sent again, and receivers drop duplicates by id
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from swarmq.broker import topology
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.control import RunControl, refusal
from swarmq.collector.decide.episodes import OpenEpisodes
from swarmq.collector.decide.evals import Evals
from swarmq.collector.decide.groups import Groups
from swarmq.collector.decide.state import PastEpisodes, Rules, RunState, Snapshot
from swarmq.collector.decide.tickets import LOST_S, TicketWindow
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import (
    Command,
    Control,
    DeliveryReport,
    EpisodeBegin,
    EpisodeEnd,
    Message,
    RefusedTurn,
    StepReport,
    Task,
    Turn,
)

TICKETS_ISSUED = "tickets_issued"
"""Name of the counter of all tickets ever issued."""

AWAKE_S = 10.0
"""Maximum seconds between two ticks. After a longer gap the collector counts as stopped meanwhile, and the messages that an
end waits for may still be in the inbox."""


class Core:
    """The state of one run's collector: hands messages to the aggregates that decide them, and joins their effects."""

    def __init__(
        self, rules: Rules, past: PastEpisodes, snapshot: Snapshot, *, now: float, job: SwarmJob | None = None
    ) -> None:
        """With a `job`, commands can change the settings during the run, and `rules` are the initial rules."""
        state = snapshot.control or Control(run=rules.run, number=0)
        self.control = RunControl(job, state) if job else None
        rules = self.control.rules if self.control else rules
        versions = {**dict.fromkeys(rules.trained, 0), **snapshot.versions}
        self.run = RunState(rules=rules, past=past, counts=Counter(snapshot.counts), versions=versions)
        self.tickets = TicketWindow(rules, snapshot.credit, snapshot.tickets, self.counts[TICKETS_ISSUED])
        self.tickets.lent, self.tickets.is_open = frozenset(state.lent), state.pace == "running"
        self.groups = Groups(self.run, self.tickets)
        self.evals = snapshot.evals or Evals()
        self.episodes = OpenEpisodes(self.run, self.groups, self.tickets, self.evals, self.control)
        self.is_drained = False
        """Whether a draining run has trained everything that had begun."""
        self._stored_counts = dict(self.counts)
        self._ticked_at = now
        self.groups.restore(snapshot, now)
        self.episodes.restore(snapshot.episodes, now)

    @property
    def rules(self) -> Rules:
        """Rules in effect."""
        return self.run.rules

    @property
    def counts(self) -> Counter[str]:
        """Counters by name."""
        return self.run.counts

    def take(self, message: Message, body: bytes, now: float) -> list[do.Effect]:
        """Return the effects of one message from the inbox."""
        if message.run != self.rules.run:
            return [do.SendDeadLetter(f"a message of run {message.run!r} in the inbox of {self.rules.run!r}")]
        match message:
            case EpisodeBegin():
                return self.episodes.begin(message, body, now)
            case Turn():
                return self.episodes.add_turn(message, body, now)
            case RefusedTurn():
                return [*self.episodes.refuse_turn(message, now), do.SendDeadLetter(message.reason)]
            case DeliveryReport():
                return self.episodes.take_delivery_report(message, now)
            case EpisodeEnd():
                return self.episodes.end(message, body, now)
            case StepReport():
                return self._take_report(message)
            case Command():
                return self._execute(message)
            case Task():
                return self.evals.add_task(message)
            case _:
                return [do.SendDeadLetter(f"the collector takes no message of type {type(message).__name__}")]

    def tick(self, now: float) -> list[do.Effect]:
        """Advance time: expire silent episodes, give up incomplete ones, and send overdue groups on."""
        asleep_s = max(now - self._ticked_at - AWAKE_S, 0.0)
        self._ticked_at = now
        effects = [*self.episodes.expire(now, asleep_s=asleep_s), *self.groups.expire(now), *self._watch_kinds(now)]
        return effects + self.evals.advance(
            now,
            self.rules.eval,
            running=self.episodes.eval_slots(),
            version=max(self.run.trained_versions().values(), default=0),
            counts=self.counts,
            can_begin=self.tickets.is_open,
            run=self.rules.run,
            policies=self.rules.trained,
        )

    def confirm_eval(self, slot_id: str) -> list[do.Effect]:
        """Record that the broker confirmed an attempt of an evaluation round."""
        return [do.EvalSent(slot_id)]

    def confirm_evaluation(self, policy: str, began_at: float) -> list[do.Effect]:
        """Record that the broker confirmed the results of a round for a learner."""
        return [do.EvaluationSent(policy, began_at)]

    def confirm_control(self, policy: str, number: int) -> list[do.Effect]:
        """Record that the broker confirmed control state `number` for a learner."""
        return [do.ControlSent(policy, number)]

    def confirm_forward(self, episode_id: str, policy: str) -> list[do.Effect]:
        """Record that the broker confirmed a rollout."""
        return [do.ForwardSent(episode_id, policy)]

    def confirm_ticket(self, ticket_id: str) -> list[do.Effect]:
        """Record that the broker confirmed a ticket."""
        return [do.TicketSent(ticket_id)]

    def resend_lost(self, queues: Collection[str]) -> list[do.Effect]:
        """Schedule sending again of everything that deleted or emptied queues may have held. If the inbox is among them,
        begins with tickets are lost; learners repeat their own reports."""
        run, is_inbox_lost = self.rules.run, topology.inbox(self.rules.run) in queues
        effects: list[do.Effect] = []
        for kind in self.tickets.out:
            if is_inbox_lost or topology.tickets(run, kind) in queues:
                effects += self.tickets.reissue(kind)
        for policy in self.rules.trained:
            if self.control and topology.control(run, policy) in queues and self.control.state.number:
                effects.append(do.SendControl(policy, self.control.state.number))
            if topology.ready(run, policy) in queues:
                effects += self.groups.resend(policy)
        for kind in dict.fromkeys(one.kind for one in self.evals.slots.values()):
            if topology.evals(run, kind) in queues:
                effects += self.evals.reissue(kind)
        self.counts["sent_again"] += len(effects)
        return effects

    def check_tickets(self, waiting: Mapping[str, int], now: float, *, lost_s: float = LOST_S) -> list[do.Effect]:
        """Compare the issued tickets with the depths of their queues, and issue again those that have been missing for `lost_s`
        seconds. Call it while no message is in flight. `waiting`: kind -> tickets in its queue. `now`: Unix time."""
        effects: list[do.Effect] = []
        for kind in self.tickets.find_lost(waiting, now, lost_s=lost_s):
            effects += self.resend_lost({topology.tickets(self.rules.run, kind)})
        return effects

    def settle(self) -> list[do.Effect]:
        """Close a batch: issue tickets for the freed credit, and write waiting ends, delivery reports and changed counters."""
        usage = self.groups.usage()
        starved, short = (
            (bool(self.groups.short_of()), self.groups.short_of(owed=1))
            if self.tickets.is_quiet(usage)
            else (False, set())
        )
        lacking = {kind: slots for kind, slots in self.groups.lacking().items() if kind in short} if short else {}
        learning = self.run.learning()
        idle = self.groups.held_by_others(learning) if 0 < len(learning) < len(self.rules.trained) else 0
        effects = self.tickets.settle(usage, starved=starved, lacking=lacking, idle=idle)
        effects += self.episodes.save_waiting()
        self.counts[TICKETS_ISSUED] = self.tickets.serial
        for name, value in self.counts.items():
            if self._stored_counts.get(name) != value:
                self._stored_counts[name] = value
                effects.append(do.SaveCount(name, value))
        return effects

    def _take_report(self, report: StepReport) -> list[do.Effect]:
        effects: list[do.Effect] = []
        if report.version > self.run.versions.get(report.policy, 0):
            self.run.versions[report.policy] = report.version
            effects.append(do.SaveVersion(report.policy, report.version))
        if not report.trained and not report.dropped:  # the learner starves: its queue may have lost rollouts
            return [*effects, *self.resend_lost({topology.ready(self.rules.run, report.policy)})]
        decided, taught, equal = self.groups.take_report(report)
        if self.control:
            self.control.count_report(report.policy, taught=taught, equal=equal)
        return effects + decided

    def _execute(self, command: Command) -> list[do.Effect]:
        """Carry out a command once; a repeated command gets the same reply."""
        reply = self.run.past.reply(command.command_id)
        effects: list[do.Effect] = []
        if reply is None:
            try:
                if self.control is None:
                    raise ConfigError("this collector runs without a job and takes no commands")
                state, reply = self.control.obey(
                    command, versions=self.run.trained_versions(), from_grant=self.tickets.next_batch
                )
                effects += self._adopt(state)
            except ConfigError as error:
                reply = refusal(error)
            reply |= {"command_id": command.command_id, "action": command.action, "sender": command.sender}
            effects.append(do.SaveReply(command.command_id, msgspec.msgpack.encode(reply)))
        return [*effects, do.Emit("control", reply)]

    def _watch_kinds(self, now: float) -> list[do.Effect]:
        """Detect kinds that ran dry or came back, and whether a draining run is drained."""
        if self.control is None:
            return []
        newest = self.rules.shares(self.tickets.next_batch)
        state, stalls, warnings = self.control.detect_dry_kinds(
            self.groups.usage(), self.tickets.out, newest, self.run.learning(), now
        )
        effects: list[do.Effect] = [do.Emit("warning", {"text": text, "kind": "stall"}) for text in stalls]
        effects += [do.Emit("warning", {"text": text}) for text in warnings]
        effects += self._adopt(state) if state else []
        is_drained = (
            self.control.state.pace == "draining"
            and not self.episodes.has_training()
            and self.groups.starved(self.run.learning())
        )
        if is_drained and not self.is_drained:
            effects.append(do.Emit("control", {"state": "drained", "versions": dict(self.run.versions)}))
        self.is_drained = is_drained
        return effects

    def _adopt(self, state: Control) -> list[do.Effect]:
        """Adopt another control state, and send it to the learners."""
        assert self.control is not None
        self.control.adopt(state)
        self.run.rules = self.control.rules
        self.tickets.adopt(self.rules)
        self.tickets.is_open = state.pace == "running"
        self.tickets.lend(state.lent)
        sends = [do.SendControl(policy, state.number) for policy in self.rules.trained]
        return [do.SaveControl(msgspec.msgpack.encode(state)), *sends]
