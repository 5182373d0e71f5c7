"""The collector's store in plain dicts: same interface, same promises, at a fraction of the cost. For simulations.

That both are the same is tested wherever the collector is: `twin_store.py` runs them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.evals import Evals, EvalSlot, EvalTask
from swarmq.collector.decide.state import (
    TAINTS,
    EndedEpisode,
    KindWindow,
    OpenEpisode,
    PublishedGroup,
    Snapshot,
    TurnMeta,
    WaitingMember,
)
from swarmq.errors import CollectorError
from swarmq.messages import Control, DeliveryReport, EpisodeBegin, EpisodeEnd, Message, Slot, Turn, decode

Table = dict[Any, Any]
MISSING = object()


class MemoryStore:
    """Tables as dicts, and what to put back where when a transaction fails."""

    def __init__(self, decoded: Callable[[bytes], Message] = decode) -> None:
        """`decoded` may know the messages of bodies already."""
        self._decoded = decoded
        self._undo: list[tuple[Table, Any, Any]] = []
        self._serial = 0
        self.states: dict[str, tuple[str, str]] = {}
        """Episode -> state and reason."""
        self._began: dict[str, float] = {}
        self._taints: dict[str, str] = {}
        self._begins: dict[str, bytes] = {}
        self._ends: dict[str, bytes] = {}
        self._seals: dict[str, do.Seal] = {}
        self._resolve_policies: dict[str, str] = {}
        self._turns: dict[str, tuple[bytes, ...]] = {}
        self._slots: dict[str, str] = {}
        self._groups: dict[str, do.SaveGroup] = {}
        self._given_up: dict[tuple[str, str], do.GiveUpSlot] = {}
        self._outcomes: dict[tuple[str, str], do.SaveOutcome] = {}
        self._outbox: dict[tuple[str, str], tuple[int, do.Forward]] = {}
        self._tickets: dict[str, tuple[do.IssueTicket, bool]] = {}
        self._credit: dict[str, do.SaveCredit] = {}
        self._control: dict[None, bytes] = {}
        self._replies: dict[str, bytes] = {}
        self._unsent_control: dict[str, do.SendControl] = {}
        self._eval_tasks: dict[str, do.SaveEvalTask] = {}
        self._eval_slots: dict[str, tuple[do.IssueEval, bool, do.EvalDone | None]] = {}
        self._evals_given_up: dict[str, None] = {}
        self._evaluations: dict[tuple[float, str], do.SendEvaluation] = {}
        self._versions: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for table, key, before in reversed(self._undo):
                if before is MISSING:
                    del table[key]
                else:
                    table[key] = before
            raise
        finally:
            self._undo.clear()

    def write(self, effect: do.Effect) -> None:
        if writer := WRITERS.get(type(effect)):
            writer(self, effect)

    # ---------------------------------------------------------------------------------------- the past

    def ended(self, episode_id: str) -> EndedEpisode | None:
        state, reason = self.states.get(episode_id, ("open", ""))
        if state == "open":
            return None
        seal = self._seals.get(episode_id)
        digest, calls = (seal.digest, seal.calls) if seal else (b"", "")
        return EndedEpisode(state, reason, digest, frozenset(calls.split("\n")))

    def winner(self, slot_id: str) -> str | None:
        return self._slots.get(slot_id)

    def group_closed(self, group_id: str) -> bool:
        group = self._groups.get(group_id)
        return group is not None and group.state != "open"

    def reply(self, command_id: str) -> dict[str, Any] | None:
        body = self._replies.get(command_id)
        return msgspec.msgpack.decode(body) if body else None

    # ----------------------------------------------------------------------------------------- reading

    def snapshot(self) -> Snapshot:
        waiting: dict[str, list[WaitingMember]] = {}
        for name in self._in_state("waiting"):
            begin = self._decoded(self._begins[name])
            assert isinstance(begin, EpisodeBegin)
            member = WaitingMember(name, self._seals[name].slot_id, tuple(self._resolve_policies[name].split(",")))
            waiting.setdefault(begin.slot.group_id, []).append(member)
        return Snapshot(
            episodes=[self._open_episode(name) for name in self._in_state("open")],
            groups={g.group_id: (g.kind, g.size, g.since) for g in self._groups.values() if g.state == "open"},
            waiting=waiting,
            given_up=[msgspec.structs.astuple(given_up) for _, given_up in sorted(self._given_up.items())],
            published=self._published(),
            tickets={name: issued.kind for name, (issued, _) in self._tickets.items()},
            credit={
                row.kind: KindWindow(allocated=row.allocated, trained=row.trained, debt=row.debt, due=row.due)
                for row in self._credit.values()
            },
            versions=dict(self._versions),
            counts=dict(self._counts),
            control=self.control(),
            evals=self._evals(),
        )

    def outbox(self) -> list[do.Effect]:
        return [
            *(issued for _, (issued, sent) in sorted(self._tickets.items()) if not sent),
            *(control for _, control in sorted(self._unsent_control.items())),
            *(issued for _, (issued, sent, _done) in sorted(self._eval_slots.items()) if not sent),
            *(evaluation for _, evaluation in sorted(self._evaluations.items())),
            *(forward for _, forward in sorted(self._outbox.values(), key=lambda row: row[0])),
        ]

    def control(self) -> Control | None:
        body = self._control.get(None)
        return msgspec.msgpack.decode(body, type=Control) if body else None

    def parts(self, episode_id: str) -> tuple[EpisodeBegin, EpisodeEnd, list[Turn]] | None:
        if self.states.get(episode_id, ("", ""))[0] != "published":
            return None
        begin, end = self._decoded(self._begins[episode_id]), self._decoded(self._ends[episode_id])
        assert isinstance(begin, EpisodeBegin)
        assert isinstance(end, EpisodeEnd)
        turns = map(self._decoded, self._turns.get(episode_id, ()))
        return begin, end, [turn for turn in turns if isinstance(turn, Turn)]

    def payload(self, task_id: str) -> bytes | None:
        task = self._eval_tasks.get(task_id)
        return task.payload if task else None

    def _in_state(self, wanted: str) -> list[str]:
        names = [name for name, (state, _) in self.states.items() if state == wanted]
        return sorted(names, key=lambda name: (self._began[name], name))

    def _open_episode(self, name: str) -> OpenEpisode:
        began_at, calls = self._began[name], {}
        episode = OpenEpisode(
            episode_id=name, began_at=began_at, last_message_at=began_at, taint=self._taints.get(name, "")
        )
        if (body := self._begins.get(name)) and isinstance(begin := self._decoded(body), EpisodeBegin):
            episode.begin = begin
        if (body := self._ends.get(name)) and isinstance(end := self._decoded(body), EpisodeEnd):
            episode.end, episode.end_body = end, body
        for body in self._turns.get(name, ()):
            piece = self._decoded(body)
            if isinstance(piece, Turn):
                calls[piece.call_id] = TurnMeta.of(piece, len(body))
            elif isinstance(piece, DeliveryReport):
                episode.take_report(piece)
        episode.calls = calls
        return episode

    def _published(self) -> dict[str, PublishedGroup]:
        groups = {
            g.group_id: PublishedGroup(kind=g.kind, size=g.size, pending={}, members={}, trained=set())
            for g in self._groups.values()
            if g.state == "published"
        }
        for outcome in self._outcomes.values():
            if group := groups.get(outcome.group_id):
                group.members[outcome.policy] = group.members.get(outcome.policy, 0) + 1
                if outcome.state == "pending":
                    group.pending.setdefault(outcome.policy, set()).add(outcome.episode_id)
                elif outcome.state == "trained":
                    group.trained.add(outcome.episode_id)
        return groups

    def _evals(self) -> Evals:
        slots = []
        for _, (issued, _, done) in sorted(self._eval_slots.items()):
            one = EvalSlot(
                slot=msgspec.msgpack.decode(issued.slot, type=Slot),
                kind=issued.kind,
                version=issued.version,
                began_at=issued.began_at,
                given_up=issued.slot_id in self._evals_given_up,
            )
            if done:
                one.done, one.reward, one.success = True, done.reward, done.success
                one.metrics = msgspec.msgpack.decode(done.metrics)
            slots.append(one)
        tasks = [
            EvalTask(task_id=name, kind=task.kind, repeats=task.repeats)
            for name, task in sorted(self._eval_tasks.items())
        ]
        return Evals(tasks, slots)

    # ----------------------------------------------------------------------------------------- writing

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _set(self, table: Table, key: Any, value: Any) -> None:
        self._undo.append((table, key, table.get(key, MISSING)))
        table[key] = value

    def _insert(self, table: Table, key: Any, value: Any) -> None:
        if key in table:
            raise CollectorError(f"{key} is there already")
        self._set(table, key, value)

    def _delete(self, table: Table, key: Any) -> None:
        if key in table:
            self._undo.append((table, key, table.pop(key)))

    def _open(self, effect: do.Open) -> None:
        self._insert(self.states, effect.episode_id, ("open", ""))
        self._set(self._began, effect.episode_id, effect.began_at)

    def _begin(self, effect: do.Begin) -> None:
        self._open(do.Open(effect.episode_id, effect.began_at))
        self._set(self._begins, effect.episode_id, effect.body)

    def _finish(self, effect: do.Finish) -> None:
        self._accept(do.Accept(effect.policies, effect.episode_id))
        self._set(self._seals, effect.episode_id, effect)
        self._set(self._ends, effect.episode_id, effect.end)

    def _accept(self, effect: do.Accept) -> None:
        self._set(self.states, effect.episode_id, ("waiting", ""))
        self._set(self._resolve_policies, effect.episode_id, effect.policies)

    def _close(self, effect: do.Close) -> None:
        self._set(self.states, effect.episode_id, (effect.state, effect.reason))
        self._delete(self._begins, effect.episode_id)
        self._delete(self._ends, effect.episode_id)

    def _forward(self, effect: do.Forward) -> None:
        if (key := (effect.episode_id, effect.policy)) not in self._outbox:
            self._set(self._outbox, key, (self._next(), effect))

    def _issue_eval(self, effect: do.IssueEval) -> None:
        _, _, done = self._eval_slots.get(effect.slot_id, (effect, False, None))
        self._set(self._eval_slots, effect.slot_id, (effect, False, done))

    def _ticket_sent(self, effect: do.TicketSent) -> None:
        if row := self._tickets.get(effect.ticket_id):
            self._set(self._tickets, effect.ticket_id, (row[0], True))

    def _eval_sent(self, effect: do.EvalSent) -> None:
        if row := self._eval_slots.get(effect.slot_id):
            self._set(self._eval_slots, effect.slot_id, (row[0], True, row[2]))

    def _eval_done(self, effect: do.EvalDone) -> None:
        if row := self._eval_slots.get(effect.slot_id):
            self._set(self._eval_slots, effect.slot_id, (row[0], row[1], effect))

    def _control_sent(self, effect: do.ControlSent) -> None:
        row = self._unsent_control.get(effect.policy)
        if row and row.number <= effect.number:
            self._delete(self._unsent_control, effect.policy)


WRITERS: dict[type[do.Effect], Callable[[MemoryStore, Any], object]] = {
    do.Open: MemoryStore._open,
    do.Begin: MemoryStore._begin,
    do.SaveBegin: lambda s, e: s._set(s._begins, e.episode_id, e.body),
    do.Taint: lambda s, e: s._set(s._taints, e.episode_id, TAINTS[e.number]),
    do.SaveTurn: lambda s, e: s._set(s._turns, e.episode_id, (*s._turns.get(e.episode_id, ()), e.body)),
    do.SaveEnd: lambda s, e: s._set(s._ends, e.episode_id, e.body),
    do.Seal: lambda s, e: s._set(s._seals, e.episode_id, e),
    do.Finish: MemoryStore._finish,
    do.Accept: MemoryStore._accept,
    do.Release: lambda s, e: s._set(s.states, e.episode_id, ("published", "")),
    do.Close: MemoryStore._close,
    do.ForgetTurns: lambda s, e: s._delete(s._turns, e.episode_id),
    do.WinSlot: lambda s, e: s._insert(s._slots, e.slot_id, e.episode_id),
    do.FreeSlot: lambda s, e: s._delete(s._slots, e.slot_id),
    do.GiveUpSlot: lambda s, e: s._insert(s._given_up, (e.group_id, e.slot_id), e),
    do.ForgetGivenUp: lambda s, e: [s._delete(s._given_up, key) for key in list(s._given_up) if key[0] == e.group_id],
    do.SaveGroup: lambda s, e: s._set(s._groups, e.group_id, e),
    do.FreeGroup: lambda s, e: s._delete(s._groups, e.group_id),
    do.SaveOutcome: lambda s, e: s._set(s._outcomes, (e.episode_id, e.policy), e),
    do.Forward: MemoryStore._forward,
    do.ForwardSent: lambda s, e: s._delete(s._outbox, (e.episode_id, e.policy)),
    do.IssueTicket: lambda s, e: s._set(s._tickets, e.ticket_id, (e, False)),
    do.TicketSent: MemoryStore._ticket_sent,
    do.TicketUsed: lambda s, e: s._delete(s._tickets, e.ticket_id),
    do.SaveCredit: lambda s, e: s._set(s._credit, e.kind, e),
    do.SaveEvalTask: lambda s, e: s._set(s._eval_tasks, e.task_id, e),
    do.IssueEval: MemoryStore._issue_eval,
    do.EvalSent: MemoryStore._eval_sent,
    do.EvalDone: MemoryStore._eval_done,
    do.GiveUpEval: lambda s, e: s._set(s._evals_given_up, e.slot_id, None),
    do.CloseRound: lambda s, _: [
        s._delete(table, key) for table in (s._eval_slots, s._evals_given_up) for key in list(table)
    ],
    do.SendEvaluation: lambda s, e: s._set(s._evaluations, (e.began_at, e.policy), e),
    do.EvaluationSent: lambda s, e: s._delete(s._evaluations, (e.began_at, e.policy)),
    do.SaveControl: lambda s, e: s._set(s._control, None, e.body),
    do.SaveReply: lambda s, e: s._set(s._replies, e.command_id, e.body),
    do.SendControl: lambda s, e: s._set(s._unsent_control, e.policy, e),
    do.ControlSent: MemoryStore._control_sent,
    do.SaveFile: lambda s, e: None,
    do.SaveVersion: lambda s, e: s._set(s._versions, e.policy, e.version),
    do.SaveCount: lambda s, e: s._set(s._counts, e.name, e.value),
}
"""How each effect that is a row is written, as `swarmq.collector.store.SQL` says it."""
