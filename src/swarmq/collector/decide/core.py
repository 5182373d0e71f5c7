"""The collector's decisions: a message or a tick in, effects out. No clock, no I/O.

  begin, turn, end ──take──> open episode ──decided──> dropped (a reason, counted; credit back) ──last attempt──┐
                                  │                └─> eval    (recorded, never forwarded)                      │
                                  └──accepted: winner of its slot──> open group <──the slot is given up─────────┘
                                                                         │ nothing more to come, or deadline; and enough
  step report ──take──> ledger, credit  <──learners──  published: one rollout per policy

All effects of a call belong to one transaction with the others of its batch, `settle()`'s last. Memory and stored rows agree: a
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
sent_again         a queue was deleted or emptied: its possible content is sent again, and receivers recognise duplicates by id
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from swarmq.broker import topology
from swarmq.broker.client_rules import is_foreign
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.assemble import decide_received, find_flaw, find_uncredited_rewards, fits_message
from swarmq.collector.decide.control import RunControl, refusal
from swarmq.collector.decide.evals import Evals, EvalTask
from swarmq.collector.decide.groups import Groups, OpenGroup
from swarmq.collector.decide.state import (
    HOLD_S,
    MAX_SILENCE_S,
    TAINTS,
    OpenEpisode,
    PastEpisodes,
    Rules,
    Snapshot,
    TurnMeta,
    WaitingMember,
)
from swarmq.collector.decide.tickets import TicketWindow
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import (
    EQUAL_REWARDS,
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
    encode,
)

TICKETS_ISSUED = "tickets_issued"
EVAL_ROUND = "eval_round"
"""Name of the counter that holds the weight version of the newest evaluation round plus one; 0 before the first round."""

MAX_MISNAMED_TOLD = 100
"""Most uncredited rewards that are warned of, in case every episode has others."""

AWAKE_S = 10.0
"""Longest time between two ticks. After a longer gap the collector was stopped, and the messages that an end waits for may
still be in the inbox."""

LOST_S = 15.0
"""Seconds after which tickets that are out, in no queue and unused, count as lost: a client uses a ticket within a moment."""


class Core:
    """The state of one run's collector."""

    def __init__(
        self, rules: Rules, past: PastEpisodes, snapshot: Snapshot, *, now: float, job: SwarmJob | None = None
    ) -> None:
        """With a `job`, commands can change it during the run, and `rules` are the initial rules."""
        state = snapshot.control or Control(run=rules.run, number=0)
        self.steering = RunControl(job, state) if job else None
        self.rules = rules = self.steering.rules if self.steering else rules
        self.past = past
        self.counts: Counter[str] = Counter(snapshot.counts)
        self.versions: dict[str, int] = {**dict.fromkeys(rules.trained, 0), **snapshot.versions}
        self.open: dict[str, OpenEpisode] = {}
        self.groups = Groups(rules)
        self.credit = TicketWindow(rules, snapshot.credit, snapshot.tickets, self.counts[TICKETS_ISSUED])
        self.credit.lent, self.credit.is_open = frozenset(state.lent), state.pace == "running"
        self._stored_counts = dict(self.counts)
        self.evals = snapshot.evals or Evals()
        self._ticked_at = now
        self.is_drained = False
        """Whether a draining run has trained everything that had begun."""
        self._heard: dict[str, tuple[list[str], list[str]]] = {}
        """Episode id -> (sent calls, withdrawn calls) that are not stored yet."""
        self._misnamed_told: set[tuple[str, str]] = set()
        self._wanted_for: tuple[Rules, frozenset[str], dict[str, int]] | None = None
        self._wanted: dict[str, dict[str, float]] = {}
        """Policy -> kind -> groups of the next batch, under the rules for which they were computed."""
        self._astray: dict[str, tuple[frozenset[str], float]] = {}
        """Kind -> (tickets that are out while its queue is empty, time since when they are the same)."""
        self._restore(snapshot, now)

    # ------------------------------------------------------------------------------------------- events

    def take(self, message: Message, body: bytes, now: float) -> list[do.Effect]:
        """Decide one message from the inbox."""
        if message.run != self.rules.run:
            return [do.SendDeadLetter(f"a message of run {message.run!r} in the inbox of {self.rules.run!r}")]
        match message:
            case EpisodeBegin():
                return self._begin(message, body, now)
            case Turn():
                return self._turn(message, body, now)
            case RefusedTurn():
                return [*self._refused_turn(message, now), do.SendDeadLetter(message.reason)]
            case DeliveryReport():
                return self._served(message, now)
            case EpisodeEnd():
                return self._end(message, body, now)
            case StepReport():
                return self._consumed(message)
            case Command():
                return self._command(message)
            case Task():
                return self._eval_task(message)
            case _:
                return [do.SendDeadLetter(f"the collector has no use for {type(message).__name__}")]

    def tick(self, now: float) -> list[do.Effect]:
        """Advance time: expire silent episodes, give up incomplete ones, and send overdue groups on."""
        effects: list[do.Effect] = []
        asleep_s = max(now - self._ticked_at - AWAKE_S, 0.0)
        self._ticked_at = now
        for episode in list(self.open.values()):
            if episode.end is not None:
                episode.held_since = min(episode.held_since + asleep_s, now)
                if now - episode.held_since >= HOLD_S:
                    decided = self._resume(episode, now, waited=True)
                    effects += decided or self._drop(episode, "incomplete" if episode.begin else "no_begin", now)
            elif now - episode.heard_at >= self._patience_s(episode):
                effects += self._drop(episode, "silent", now)
        for group_id in self.groups.overdue(now):
            effects += self._publish(group_id)
        for group_id in self.groups.abandoned(now):
            effects += self._forget(group_id)
        return [*effects, *self._look(now), *self._round(now)]

    def eval_sent(self, slot_id: str) -> list[do.Effect]:
        """Record that the broker confirmed an attempt of an evaluation round."""
        return [do.EvalSent(slot_id)]

    def told(self, policy: str, number: int) -> list[do.Effect]:
        """Record that the broker confirmed control state `number` for a learner."""
        return [do.ControlSent(policy, number)]

    def forwarded(self, episode_id: str, policy: str) -> list[do.Effect]:
        """Record that the broker confirmed a rollout."""
        return [do.ForwardSent(episode_id, policy)]

    def ticket_sent(self, ticket_id: str) -> list[do.Effect]:
        """Record that the broker confirmed a ticket."""
        return [do.TicketSent(ticket_id)]

    def lost(self, queues: Collection[str]) -> list[do.Effect]:
        """Schedule again what deleted or emptied queues may have held. With the inbox, begins of tickets are lost; learners
        repeat the reports that were in it."""
        run, inbox = self.rules.run, topology.inbox(self.rules.run) in queues
        effects: list[do.Effect] = []
        for kind, out in self.credit.out.items():
            if inbox or topology.tickets(run, kind) in queues:
                effects += [do.IssueTicket(ticket_id, kind) for ticket_id in sorted(out)]
        for policy in self.rules.trained:
            if self.steering and topology.control(run, policy) in queues and self.steering.state.number:
                effects.append(do.SendControl(policy, self.steering.state.number))
            if topology.ready(run, policy) in queues:
                effects += [
                    do.Forward(episode_id, policy, group.members[policy])
                    for group in self.groups.published.values()
                    for episode_id in sorted(group.pending.get(policy, ()))
                ]
        effects += [
            do.IssueEval(one.slot.id, msgspec.msgpack.encode(one.slot), one.kind, one.version, one.began_at)
            for one in self.evals.slots.values()
            if topology.evals(run, one.kind) in queues and one.lacks
        ]
        self.counts["sent_again"] += len(effects)
        return effects

    def tickets_seen(self, waiting: Mapping[str, int], now: float) -> list[do.Effect]:
        """Compare issued tickets with the queues' depths (kind -> tickets), while nothing is in flight, and issue lost ones
        again."""
        before, self._astray = self._astray, {}
        effects: list[do.Effect] = []
        for kind, num in waiting.items():
            out = frozenset(self.credit.out.get(kind, ()))
            if num or not out:
                continue
            known, since = before.get(kind, (out, now))
            if known != out:
                since = now
            elif now - since >= LOST_S:
                effects += self.lost({topology.tickets(self.rules.run, kind)})
                since = now
            self._astray[kind] = (out, since)
        return effects

    def settle(self) -> list[do.Effect]:
        """Close a batch: issue tickets for the freed credit, and write delivery reports and changed counters."""
        usage = self.groups.usage()
        starved, short = (
            (bool(self.short_of()), self.short_of(owed=1)) if self.credit.is_quiet(usage) else (False, set())
        )
        lacking = {kind: slots for kind, slots in self.groups.lacking().items() if kind in short} if short else {}
        learning = self.learning()
        idle = self.groups.held_by_others(learning) if 0 < len(learning) < len(self.rules.trained) else 0
        effects = self.credit.settle(usage, starved=starved, lacking=lacking, idle=idle)
        effects += [
            do.SaveTurn(
                name,
                encode(
                    DeliveryReport(
                        run=self.rules.run, served_id=name, sent={name: tuple(sent)}, withdrawn={name: tuple(gone)}
                    )
                ),
            )
            for name, (sent, gone) in self._heard.items()
            if name in self.open  # a decision stands without them
        ]
        self._heard.clear()
        self.counts[TICKETS_ISSUED] = self.credit.serial
        for name, value in self.counts.items():
            if self._stored_counts.get(name) != value:
                self._stored_counts[name] = value
                effects.append(do.SaveCount(name, value))
        return effects

    def learning(self) -> tuple[str, ...]:
        """Return the trained policies with steps to go. Groups held for other policies are kept and block nothing."""
        last = self.rules.last_steps
        return tuple(policy for policy in self.rules.trained if not 0 < last.get(policy, 0) <= self.versions[policy])

    def short_of(self, *, owed: int = 0) -> set[str]:
        """Return the kinds without which no learner can fill its next batch. `owed`: extra groups of each kind that rounding
        may owe, at most one."""
        rules, lent = self.rules, self.credit.lent
        steps = {policy: self.versions[policy] + 1 for policy in self.learning()}
        if self._wanted_for != (rules, lent, steps):
            self._wanted_for = (rules, lent, steps)
            self._wanted = {
                policy: {kind: share * rules.groups_per_batch for kind, share in rules.shares(step, lent).items()}
                for policy, step in steps.items()
            }
        return self.groups.short_of(self._wanted, owed=owed)

    # ------------------------------------------------------------------------------------------- pieces

    def _begin(self, begin: EpisodeBegin, body: bytes, now: float) -> list[do.Effect]:
        episode = self.open.get(begin.episode_id)
        if (episode is None and self.past.ended(begin.episode_id)) or (episode and _same(episode.begin, begin)):
            self.counts["duplicates"] += 1
            return self._use_ticket(begin)
        if episode and episode.begin:
            if self._foreign(begin, episode):
                return self._use_ticket(begin)
            self.counts["conflicting_begin"] += 1
            return [*_tainted(episode, "two_clients"), *self._use_ticket(begin)]
        effects: list[do.Effect] = []
        if episode is None:
            episode, effects = self._open(begin.episode_id, now)
        effects += [do.SaveBegin(body, begin.episode_id), *self._use_ticket(begin, wanted=True)]
        episode.begin, episode.heard_at = begin, now
        if begin.mode == "train":
            self.counts["begun"] += 1
            self._join(begin)
            if self.steering:
                self.steering.alive[begin.kind] = now
        else:
            self.counts["eval_begun"] += 1
        return effects + self._resume(episode, now)

    def _turn(self, turn: Turn, body: bytes, now: float) -> list[do.Effect]:
        episode = self.open.get(turn.episode_id)
        effects: list[do.Effect] = []
        if episode is None:
            if ended := self.past.ended(turn.episode_id):
                self.counts["duplicates" if turn.call_id in ended.calls else "late_turn"] += 1
                return []
            episode, effects = self._open(turn.episode_id, now)
        call = TurnMeta.of(turn, len(body))
        if known := episode.calls.get(turn.call_id):
            self.counts["duplicates" if known == call else "conflicting_turn"] += 1
            return []
        if self._foreign(turn, episode):
            return []
        if episode.end and not self._named(episode, call):
            self.counts["late_turn"] += 1
            return []
        episode.calls[turn.call_id] = call
        episode.heard_at = now
        self.counts["turns"] += 1
        return [*effects, do.SaveTurn(turn.episode_id, body), *self._resume(episode, now)]

    def _refused_turn(self, turn: RefusedTurn, now: float) -> list[do.Effect]:
        episode = self.open.get(turn.episode_id)
        effects: list[do.Effect] = []
        if episode is None:
            if self.past.ended(turn.episode_id):
                self.counts["late_turn"] += 1
                return []
            episode, effects = self._open(turn.episode_id, now)
        if turn.call_id in episode.calls:
            self.counts["duplicates"] += 1
            return []
        episode.heard_at = now
        return [*effects, *_tainted(episode, "refused_turn"), *self._resume(episode, now)]

    def _served(self, served: DeliveryReport, now: float) -> list[do.Effect]:
        effects: list[do.Effect] = []
        for episode_id in dict.fromkeys([*served.sent, *served.withdrawn]):
            episode = self.open.get(episode_id)
            if episode is None:
                if self.past.ended(episode_id):
                    continue
                episode, opened = self._open(episode_id, now)
                effects += opened
            sent, withdrawn = episode.hear(served)
            if not sent and not withdrawn:
                continue
            heard = self._heard.setdefault(episode_id, ([], []))
            heard[0].extend(sent)
            heard[1].extend(withdrawn)
            effects += self._resume(episode, now)
        return effects

    def _end(self, end: EpisodeEnd, body: bytes, now: float) -> list[do.Effect]:
        episode = self.open.get(end.episode_id)
        effects: list[do.Effect] = []
        if episode is None:
            if ended := self.past.ended(end.episode_id):
                self.counts[_kind_of_repeat(ended.reason, ended.digest, body)] += 1
                return []
            episode, effects = self._open(end.episode_id, now)
        if self._foreign(end, episode):
            return []
        if episode.end:
            self.counts["duplicates" if episode.end == end else "conflicting_end"] += 1
            return []
        episode.end, episode.end_body, episode.held_since = end, body, now
        decided = self._resume(episode, now)
        return [*effects, *(decided or [do.SaveEnd(body, end.episode_id)])]

    def _foreign(self, piece: EpisodeBegin | Turn | EpisodeEnd, episode: OpenEpisode) -> bool:
        """Return whether a client speaks for an episode that another client began."""
        if episode.begin is None or not is_foreign(piece.client_id, episode.begin.client_id):
            return False
        self.counts["foreign"] += 1
        return True

    def _consumed(self, report: StepReport) -> list[do.Effect]:
        effects: list[do.Effect] = []
        if report.version > self.versions.get(report.policy, 0):
            self.versions[report.policy] = report.version
            effects.append(do.SaveVersion(report.policy, report.version))
        if not report.trained and not report.dropped:  # it waits, and nothing comes
            return [*effects, *self.lost({topology.ready(self.rules.run, report.policy)})]
        fates = [(episode_id, "trained", "") for episode_id in report.trained]
        fates += [(episode_id, "dropped", reason) for episode_id, reason in report.dropped.items()]
        taught, equal = dict[str, str](), dict[str, str]()
        for episode_id, state, reason in fates:
            group_id = self.groups.place.get(episode_id, "")
            if not self.groups.report(episode_id, report.policy, trained=state == "trained"):
                self.counts["consumed_unknown"] += 1
                continue
            if state == "trained":
                taught[group_id] = self.groups.published[group_id].kind
            elif reason == EQUAL_REWARDS:
                equal[group_id] = self.groups.published[group_id].kind
            effects.append(do.SaveOutcome(episode_id, report.policy, group_id, state, report.version, reason))
            effects.append(do.ForwardSent(episode_id, report.policy))
            effects += self._reported(episode_id, group_id, state, reason)
        if self.steering:
            self.steering.heard(report.policy, taught=Counter(taught.values()), equal=Counter(equal.values()))
        return effects

    # ------------------------------------------------------------------------------------------- control

    def _command(self, command: Command) -> list[do.Effect]:
        """Obey a command once; a repeated command gets the same answer."""
        reply = self.past.reply(command.command_id)
        effects: list[do.Effect] = []
        if reply is None:
            try:
                if self.steering is None:
                    raise ConfigError("this collector runs without a job and takes no commands")
                state, reply = self.steering.obey(command, versions=self._present(), from_grant=self.credit.next_batch)
                effects += self._steer(state)
            except ConfigError as error:
                reply = refusal(error)
            reply |= {"command_id": command.command_id, "action": command.action, "sender": command.sender}
            effects.append(do.SaveReply(command.command_id, msgspec.msgpack.encode(reply)))
        return [*effects, do.Emit("control", reply)]

    def _look(self, now: float) -> list[do.Effect]:
        """Detect kinds that ran dry or came back, and whether a draining run is drained."""
        if self.steering is None:
            return []
        newest = self.rules.shares(self.credit.next_batch)
        state, warnings = self.steering.look(self.groups.usage(), self.credit.out, newest, self.learning(), now)
        effects: list[do.Effect] = [do.Emit("warning", {"text": text}) for text in warnings]
        effects += self._steer(state) if state else []
        pending = any(episode.begin and episode.begin.mode == "train" for episode in self.open.values())
        drained = self.steering.state.pace == "draining" and not pending and self.groups.starved(self.learning())
        if drained and not self.is_drained:
            effects.append(do.Emit("control", {"state": "drained", "versions": dict(self.versions)}))
        self.is_drained = drained
        return effects

    def _steer(self, state: Control) -> list[do.Effect]:
        """Adopt another control state, and send it to the learners."""
        assert self.steering is not None
        self.steering.adopt(state)
        self.rules = self.groups.rules = self.steering.rules
        self.credit.adopt(self.rules)
        self.credit.is_open = state.pace == "running"
        self.credit.lend(state.lent)
        tell = [do.SendControl(policy, state.number) for policy in self.rules.trained]
        return [do.SaveControl(msgspec.msgpack.encode(state)), *tell]

    def _eval_task(self, task: Task) -> list[do.Effect]:
        """Store a task for evaluation, used from the next round on."""
        if task.mode != "eval" or task.group_size < 1:
            return [
                do.SendDeadLetter(
                    f"task {task.slot.id}: only tasks of mode eval with at least one repeat are kept here"
                )
            ]
        kept = EvalTask(task_id=task.slot.task_id, kind=task.kind, repeats=task.group_size)
        self.evals.tasks[kept.task_id] = kept
        return [do.SaveEvalTask(kept.task_id, kept.kind, kept.repeats, bytes(task.payload))]

    def _round(self, now: float) -> list[do.Effect]:
        """Close an evaluation round that is over, and begin one that is due."""
        effects: list[do.Effect] = []
        begins = (episode.begin for episode in self.open.values())
        running = {begin.slot.id for begin in begins if begin and begin.mode == "eval"}
        if self.evals.is_over(now, self.rules.eval.deadline_s, running=running):
            effects += [do.Emit("evaluated", self.evals.close(now, self.rules.eval.k)), do.CloseRound()]
        every, version = self.rules.eval.every, max(self._present().values(), default=0)
        is_due = every and version // every > (self.counts[EVAL_ROUND] - 1) // every
        if is_due and self.evals.tasks and not self.evals.slots and self.credit.is_open:
            self.counts[EVAL_ROUND] = version + 1
            effects += [
                do.IssueEval(one.slot.id, msgspec.msgpack.encode(one.slot), one.kind, version, now)
                for one in self.evals.begin(version, now)
            ]
        return effects

    def _present(self) -> dict[str, int]:
        return {policy: self.versions[policy] for policy in self.rules.trained}

    # ------------------------------------------------------------------------------------------ deciding

    def _resume(self, episode: OpenEpisode, now: float, *, waited: bool = False) -> list[do.Effect]:
        """Decide an episode if everything needed is there; otherwise it stays open or held.

        `waited`: calls without any delivery report count as not received.
        """
        begin, end = episode.begin, episode.end
        if begin is None or end is None:
            return []
        if begin.mode == "eval":
            return self._evaluated(episode, begin, end, now)
        if end.status != "finished":
            return self._drop(episode, end.status, now)
        verdict = decide_received(
            episode.calls, end.calls, end.received, sent=episode.sent, withdrawn=episode.withdrawn
        )
        kept, defect = verdict.kept, None
        if episode.taint != "refused_turn" or end.calls is not None:
            needed = {*(end.received or ()), *episode.sent} if end.calls is None else set(end.calls)
            defect = find_flaw(episode.calls, kept)
            if defect == "incomplete" or needed - episode.calls.keys() or (verdict.awaited and not waited):
                return []
        reason = defect or self._objection(episode, begin, end, kept)
        if reason:
            return self._drop(episode, reason, now)
        self.counts["unseen_turns"] += len(verdict.awaited)
        return self._accept(episode, begin, kept, now)

    def _objection(self, episode: OpenEpisode, begin: EpisodeBegin, end: EpisodeEnd, kept: set[str]) -> str:
        """Return why a finished, complete episode is not trained, or "" if it is."""
        policies = self._policies(episode, begin, kept)
        if self.past.winner(begin.slot.id):
            return "superseded"
        if begin.slot.group_id not in self.groups.open and self.past.group_closed(begin.slot.group_id):
            return "late_sibling"
        called = {episode.calls[call_id].policy for call_id in kept}
        if not set(begin.policies) <= set(self.rules.known) or not called <= set(begin.policies):
            return "unknown_policy"
        if episode.taint and end.calls is None:
            return episode.taint
        if not policies:
            return "unseen" if self._policies(episode, begin, episode.calls) else "no_turns"
        if not set(policies) <= end.rewards.keys() or not end.rewards.keys() <= set(begin.policies):
            return "reward_missing"
        if not fits_message(episode.calls, kept, len(episode.end_body)):
            return "too_large"
        return ""

    def _policies(self, episode: OpenEpisode, begin: EpisodeBegin, kept: Iterable[str]) -> tuple[str, ...]:
        """Return the trained policies with sampled tokens in this episode."""
        present = {episode.calls[call_id].policy for call_id in kept if episode.calls[call_id].sampled}
        return tuple(policy for policy in self.rules.trained if policy in present and policy in begin.policies)

    def _accept(self, episode: OpenEpisode, begin: EpisodeBegin, kept: set[str], now: float) -> list[do.Effect]:
        self.counts["finished"] += 1
        self.counts["orphan_turns"] += len(episode.calls) - len(kept)
        assert episode.end is not None
        effects = self._seal(episode)
        slot, policies = begin.slot, self._policies(episode, begin, kept)
        named = tuple(call_id for call_id in episode.calls if call_id in kept)  # what is sent depends on nothing else
        end_body = encode(msgspec.structs.replace(episode.end, calls=named, received=None))
        member = WaitingMember(episode.episode_id, slot.id, policies)
        group = self.groups.win(slot.group_id, begin.kind, begin.group_size, member, now)
        effects += [
            do.SaveEnd(end_body, episode.episode_id),
            do.Accept(",".join(policies), episode.episode_id),
            do.WinSlot(slot.id, episode.episode_id),
            do.SaveGroup(slot.group_id, group.kind, group.size, "open", group.since),
            self._tell(episode, begin, "", now),
            *self._misnamed(episode, kept),
        ]
        return effects + self._go_on(slot.group_id)

    def _misnamed(self, episode: OpenEpisode, kept: set[str]) -> list[do.Effect]:
        """Return warnings for rewards of agent tags or calls that are missing or not trained, once for each."""
        assert episode.end is not None
        self.counts["rewards_uncredited"] += len(episode.end.call_rewards.keys() - kept)
        found = find_uncredited_rewards(episode.calls, episode.end, kept)
        fresh = list(found.keys() - self._misnamed_told)[: MAX_MISNAMED_TOLD - len(self._misnamed_told)]
        self._misnamed_told |= set(fresh)
        return [do.Emit("warning", {"text": found[tag]}) for tag in fresh]

    def _evaluated(self, episode: OpenEpisode, begin: EpisodeBegin, end: EpisodeEnd, now: float) -> list[do.Effect]:
        self.counts[f"eval_{end.status}"] += 1
        effects = [
            *self._seal(episode),
            do.Close("eval", end.status, episode.episode_id),
            do.ForgetTurns(episode.episode_id),
        ]
        if result := self.evals.finish(begin.slot.id, end):
            effects.append(do.EvalDone(result.reward or 0.0, result.success, begin.slot.id))
        elif end.final and self.evals.give_up(begin.slot.id):
            self.counts["eval_given_up"] += 1
            effects.append(do.GiveUpEval(begin.slot.id))
        return [*effects, self._tell(episode, begin, "", now)]

    def _drop(self, episode: OpenEpisode, reason: str, now: float) -> list[do.Effect]:
        """End an open episode without training it."""
        effects = self._seal(episode)
        begin = episode.begin
        if begin is None:
            self.counts[f"stray.{reason}"] += 1
        else:
            self.counts[f"dropped.{reason}" if begin.mode == "train" else f"eval_{reason}"] += 1
            effects += [self._tell(episode, begin, reason, now), *self._leave(episode, begin, now)]
        return [*effects, do.Close("dropped", reason, episode.episode_id), do.ForgetTurns(episode.episode_id)]

    # -------------------------------------------------------------------------------------------- groups

    def _leave(self, episode: OpenEpisode, begin: EpisodeBegin, now: float) -> list[do.Effect]:
        """Remove a dropped episode from its group. If it was finished, or the last attempt, its slot is given up."""
        slot, end = begin.slot, episode.end
        is_last = end is not None and (end.final or end.status == "finished")
        effects = self._give_up(slot.group_id, slot.id, now) if is_last else []
        self.groups.leave(slot.group_id, episode.episode_id)
        return effects + self._go_on(slot.group_id)

    def _give_up(self, group_id: str, slot_id: str, now: float) -> list[do.Effect]:
        group = self.groups.give_up(group_id, slot_id, now)
        if group is None:
            return []
        self.counts["slot_given_up"] += 1
        return [do.GiveUpSlot(group_id, slot_id, group.kind, group.size, now)]

    def _go_on(self, group_id: str) -> list[do.Effect]:
        """Send a group on, or forget it, if no more members will come."""
        group = self.groups.open.get(group_id)
        if group is None or group.lacks:
            return []
        if group.winners:
            return self._publish(group_id)
        return [] if group.running else self._forget(group_id)

    def _forget(self, group_id: str) -> list[do.Effect]:
        self.groups.open.pop(group_id, None)
        return [do.ForgetGivenUp(group_id)]

    def _publish(self, group_id: str) -> list[do.Effect]:
        """Send a group on, or drop it if too few members can be compared."""
        group = self.groups.open[group_id]
        shares = self.groups.shares(group)
        chosen = {episode_id for members in shares.values() for episode_id in members}
        effects: list[do.Effect] = []
        for member in group.winners.values():
            if member.episode_id in chosen:
                effects.append(do.Release(member.episode_id))
            else:
                effects += self._too_small(member)
        if not chosen:
            is_spent = not group.lacks and not group.running
            group.winners.clear()
            group.since = 0.0
            self.groups.leave(group_id, "")
            return [*effects, do.FreeGroup(group_id), *(self._forget(group_id) if is_spent else [])]
        self.counts["forwarded"] += len(chosen)
        self.counts["groups"] += 1
        effects.append(do.SaveGroup(group_id, group.kind, group.size, "published", group.since))
        if group.given_up:
            effects.append(do.ForgetGivenUp(group_id))
        for policy, members in shares.items():
            effects += [do.SaveOutcome(member, policy, group_id, "pending", 0, "") for member in members]
            effects += [do.Forward(member, policy, len(members)) for member in members]
        self.groups.publish(group_id, {policy: set(members) for policy, members in shares.items()})
        return effects

    def _too_small(self, member: WaitingMember) -> list[do.Effect]:
        self.counts["dropped.group_too_small"] += 1
        return [
            do.FreeSlot(member.slot_id),
            do.Close("dropped", "group_too_small", member.episode_id),
            do.ForgetTurns(member.episode_id),
        ]

    def _reported(self, episode_id: str, group_id: str, state: str, reason: str) -> list[do.Effect]:
        """Settle an episode after a learner's report: forget its bodies, and free its group's credit with the last member."""
        group = self.groups.published[group_id]
        effects: list[do.Effect] = []
        if not any(episode_id in pending for pending in group.pending.values()):
            del self.groups.place[episode_id]
            if episode_id in group.trained:
                state, reason = "trained", ""
            self.counts["trained" if state == "trained" else f"dropped.{reason}"] += 1
            effects += [do.Close(state, reason, episode_id), do.ForgetTurns(episode_id)]
        if not group.pending:
            del self.groups.published[group_id]
            if group.trained:
                self.credit.train(group.kind)
            effects.append(do.SaveGroup(group_id, group.kind, group.size, "done", 0.0))
        return effects

    # ------------------------------------------------------------------------------------------- helpers

    def _open(self, episode_id: str, now: float) -> tuple[OpenEpisode, list[do.Effect]]:
        episode = self.open[episode_id] = OpenEpisode(episode_id=episode_id, began_at=now, heard_at=now)
        return episode, [do.Open(episode_id, now)]

    def _seal(self, episode: OpenEpisode) -> list[do.Effect]:
        """Remove an episode from the open ones, keeping what late duplicates are compared with."""
        del self.open[episode.episode_id]
        begin = episode.begin
        slot_id, kind, client_id = (begin.slot.id, begin.kind, begin.client_id) if begin else ("", "", "")
        digest = _digest(episode.end_body) if episode.end else b""
        return [do.Seal(slot_id, kind, client_id, digest, "\n".join(episode.calls), episode.episode_id)]

    def _join(self, begin: EpisodeBegin) -> None:
        """Count a running episode in its group. An episode of a published group is already paid for by that group."""
        group_id = begin.slot.group_id
        if group_id in self.groups.open or not self.past.group_closed(group_id):
            self.groups.run(group_id, begin.kind, begin.group_size, begin.slot.id, begin.episode_id)

    def _use_ticket(self, begin: EpisodeBegin, *, wanted: bool = False) -> list[do.Effect]:
        if begin.ticket_id is None:
            return []
        used = self.credit.use(begin.kind, begin.ticket_id)
        if wanted and not used:
            self.counts["ticket_unknown"] += 1
        return used

    def _patience_s(self, episode: OpenEpisode) -> float:
        asked = episode.begin.idle_timeout_s if episode.begin else None
        return self.rules.idle_timeout_s if asked is None else min(asked, MAX_SILENCE_S)

    def _named(self, episode: OpenEpisode, call: TurnMeta) -> bool:
        """Return whether a held end waits for this turn: the end names it, or a turn that arrived builds on it."""
        end = episode.end
        if end is None or episode.begin is None or end.calls is None:
            return True
        return call.call_id in end.calls or any(other.parent == call.call_id for other in episode.calls.values())

    def _tell(self, episode: OpenEpisode, begin: EpisodeBegin, reason: str, now: float) -> do.Emit:
        """Return the event of an ended episode."""
        end = episode.end
        rewards = end.rewards if end else {}
        fields = {
            "episode_id": episode.episode_id,
            "kind": begin.kind,
            "status": end.status if end else "expired",
            "reward": sum(rewards.values()) / len(rewards) if rewards else None,
            "client_id": begin.client_id,
            "code_version": begin.code_version,
            "reason": reason,
            "detail": end.reason if end else "",
        }
        if begin.mode == "eval":
            extra = {"success": end.success if end else None, "metadata": end.metadata if end else {}}
            return do.Emit("eval", {**fields, **extra})
        return do.Emit("episode", {**fields, "rewards": rewards, "seconds": now - episode.began_at})

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        for group_id, (kind, size, since) in snapshot.groups.items():
            for member in snapshot.waiting.get(group_id, ()):
                self.groups.win(group_id, kind, size, member, min(since, now))
        for group_id, slot_id, kind, size, at in snapshot.given_up:
            self.groups.open.setdefault(group_id, OpenGroup(kind=kind, size=size)).given_up[slot_id] = min(at, now)
        for group_id, published in snapshot.published.items():
            self.groups.restore(group_id, published)
        for episode in snapshot.episodes:
            self.open[episode.episode_id] = episode
            episode.heard_at = episode.held_since = now
            if episode.begin and episode.begin.mode == "train":
                self._join(episode.begin)


def _tainted(episode: OpenEpisode, taint: str) -> list[do.Effect]:
    """Mark an episode as tainted; the first reason stays."""
    if episode.taint:
        return []
    episode.taint = taint
    return [do.Taint(TAINTS.index(taint), episode.episode_id)]


def _same(one: EpisodeBegin | None, other: EpisodeBegin) -> bool:
    """Return whether two begins are equal except for the ticket, which differs when a begin is repeated through another proxy."""
    return one is not None and msgspec.structs.replace(one, ticket_id=other.ticket_id) == other


def _kind_of_repeat(reason: str, digest: bytes, body: bytes) -> str:
    if reason == "silent":
        return "late_end"
    return "duplicates" if digest == _digest(body) else "conflicting_end"


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()
