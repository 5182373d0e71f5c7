"""Open episodes: messages arrive in any order; an episode is decided once everything needed is there, or its time is over.

begin, turn, delivery report, end ──> open ──complete──> accepted: winner of its slot, waits in its group
                                       │ └──────────────> evaluated
                                       └──silent, incomplete, tainted or not trainable──> dropped, with a reason
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from swarmq.broker.client_rules import is_foreign
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.assemble import decide_received, find_flaw, find_uncredited_rewards, fits_message
from swarmq.collector.decide.control import RunControl
from swarmq.collector.decide.evals import Evals
from swarmq.collector.decide.groups import Groups
from swarmq.collector.decide.state import (
    HOLD_S,
    MAX_SILENCE_S,
    TAINTS,
    OpenEpisode,
    RunState,
    TurnMeta,
    WaitingMember,
)
from swarmq.collector.decide.tickets import TicketWindow
from swarmq.messages import DeliveryReport, EpisodeBegin, EpisodeEnd, RefusedTurn, Turn, encode

MAX_UNCREDITED_WARNINGS = 100
"""Maximum number of warnings about uncredited rewards, in case every episode has different ones."""


class OpenEpisodes:
    """All episodes whose fate is not decided, and the rules that decide it."""

    def __init__(
        self, run: RunState, groups: Groups, tickets: TicketWindow, evals: Evals, control: RunControl | None
    ) -> None:
        self.run = run
        self.groups = groups
        self.tickets = tickets
        self.evals = evals
        self.control = control
        self.open: dict[str, OpenEpisode] = {}
        self._unsaved_ends: list[str] = []
        """Episodes whose ends are not stored yet."""
        self._unsaved_deliveries: dict[str, tuple[list[str], list[str]]] = {}
        """Episode id -> (sent calls, withdrawn calls) that are not stored yet."""
        self._warned_uncredited: set[tuple[str, str]] = set()

    def restore(self, episodes: Iterable[OpenEpisode], now: float) -> None:
        """Restore stored episodes. Their idle time starts anew."""
        for episode in episodes:
            self.open[episode.episode_id] = episode
            episode.last_message_at = episode.held_since = now
            if episode.begin and episode.begin.mode == "train":
                self.groups.join(episode.begin)

    def has_training(self) -> bool:
        """Return whether an episode that is not for evaluation is open."""
        return any(episode.begin and episode.begin.mode == "train" for episode in self.open.values())

    def eval_slots(self) -> set[str]:
        """Return the evaluation slots with an open episode."""
        begins = (episode.begin for episode in self.open.values())
        return {begin.slot.id for begin in begins if begin and begin.mode == "eval"}

    def expire(self, now: float, *, asleep_s: float) -> list[do.Effect]:
        """Drop silent episodes, and decide ended ones that have waited long enough. `asleep_s`: seconds in which the
        collector was stopped, which do not count as waiting."""
        effects: list[do.Effect] = []
        for episode in list(self.open.values()):
            if episode.end is not None:
                episode.held_since = min(episode.held_since + asleep_s, now)
                if now - episode.held_since >= HOLD_S:
                    decided = self._decide_if_complete(episode, now, waited=True)
                    effects += decided or self._drop(episode, "incomplete" if episode.begin else "no_begin", now)
            elif now - episode.last_message_at >= self._idle_timeout_s(episode):
                effects += self._drop(episode, "silent", now)
        return effects

    def save_waiting(self) -> list[do.Effect]:
        """Return the rows of the ends and delivery reports since the last call. A decided episode needs none of them."""
        effects: list[do.Effect] = [
            do.SaveEnd(self.open[name].end_body, name) for name in self._unsaved_ends if name in self.open
        ]
        effects += [
            do.SaveTurn(
                name,
                encode(
                    DeliveryReport(
                        run=self.run.rules.run, served_id=name, sent={name: tuple(sent)}, withdrawn={name: tuple(gone)}
                    )
                ),
            )
            for name, (sent, gone) in self._unsaved_deliveries.items()
            if name in self.open
        ]
        self._unsaved_ends.clear()
        self._unsaved_deliveries.clear()
        return effects

    def begin(self, begin: EpisodeBegin, body: bytes, now: float) -> list[do.Effect]:
        episode = self.open.get(begin.episode_id)
        if (episode is None and self.run.past.ended(begin.episode_id)) or (
            episode and _is_same_begin(episode.begin, begin)
        ):
            self.run.counts["duplicates"] += 1
            return self._use_ticket(begin)
        if episode and episode.begin:
            if self._is_foreign(begin, episode):
                return self._use_ticket(begin)
            self.run.counts["conflicting_begin"] += 1
            return [*_taint(episode, "two_clients"), *self._use_ticket(begin)]
        effects: list[do.Effect] = []
        if episode is None:
            episode, effects = self._open(begin.episode_id, now, body)
        else:
            effects.append(do.SaveBegin(body, begin.episode_id))
        effects += self._use_ticket(begin, wanted=True)
        episode.begin, episode.last_message_at = begin, now
        if begin.mode == "train":
            self.run.counts["begun"] += 1
            self.groups.join(begin)
            if self.control:
                self.control.alive[begin.kind] = now
        else:
            self.run.counts["eval_begun"] += 1
        return effects + self._decide_if_complete(episode, now)

    def add_turn(self, turn: Turn, body: bytes, now: float) -> list[do.Effect]:
        episode = self.open.get(turn.episode_id)
        effects: list[do.Effect] = []
        if episode is None:
            if ended := self.run.past.ended(turn.episode_id):
                self.run.counts["duplicates" if turn.call_id in ended.calls else "late_turn"] += 1
                return []
            episode, effects = self._open(turn.episode_id, now)
        call = TurnMeta.of(turn, len(body))
        if known := episode.calls.get(turn.call_id):
            self.run.counts["duplicates" if known == call else "conflicting_turn"] += 1
            return []
        if self._is_foreign(turn, episode):
            return []
        if episode.end and not self._is_awaited(episode, call):
            self.run.counts["late_turn"] += 1
            return []
        episode.calls[turn.call_id] = call
        episode.last_message_at = now
        self.run.counts["turns"] += 1
        return [*effects, do.SaveTurn(turn.episode_id, body), *self._decide_if_complete(episode, now)]

    def refuse_turn(self, turn: RefusedTurn, now: float) -> list[do.Effect]:
        episode = self.open.get(turn.episode_id)
        effects: list[do.Effect] = []
        if episode is None:
            if self.run.past.ended(turn.episode_id):
                self.run.counts["late_turn"] += 1
                return []
            episode, effects = self._open(turn.episode_id, now)
        if turn.call_id in episode.calls:
            self.run.counts["duplicates"] += 1
            return []
        episode.last_message_at = now
        return [*effects, *_taint(episode, "refused_turn"), *self._decide_if_complete(episode, now)]

    def take_delivery_report(self, report: DeliveryReport, now: float) -> list[do.Effect]:
        effects: list[do.Effect] = []
        for episode_id in dict.fromkeys([*report.sent, *report.withdrawn]):
            episode = self.open.get(episode_id)
            if episode is None:
                if self.run.past.ended(episode_id):
                    continue
                episode, opened = self._open(episode_id, now)
                effects += opened
            sent, withdrawn = episode.take_report(report)
            if not sent and not withdrawn:
                continue
            pending = self._unsaved_deliveries.setdefault(episode_id, ([], []))
            pending[0].extend(sent)
            pending[1].extend(withdrawn)
            effects += self._decide_if_complete(episode, now)
        return effects

    def end(self, end: EpisodeEnd, body: bytes, now: float) -> list[do.Effect]:
        episode = self.open.get(end.episode_id)
        effects: list[do.Effect] = []
        if episode is None:
            if ended := self.run.past.ended(end.episode_id):
                self.run.counts[_classify_late_end(ended.reason, ended.digest, body)] += 1
                return []
            episode, effects = self._open(end.episode_id, now)
        if self._is_foreign(end, episode):
            return []
        if episode.end:
            self.run.counts["duplicates" if episode.end == end else "conflicting_end"] += 1
            return []
        episode.end, episode.end_body, episode.held_since = end, body, now
        self._unsaved_ends.append(end.episode_id)
        return [*effects, *self._decide_if_complete(episode, now)]

    def _is_foreign(self, message: EpisodeBegin | Turn | EpisodeEnd, episode: OpenEpisode) -> bool:
        """Return whether the message comes from another client than the one that began the episode."""
        if episode.begin is None or not is_foreign(message.client_id, episode.begin.client_id):
            return False
        self.run.counts["foreign"] += 1
        return True

    def _decide_if_complete(self, episode: OpenEpisode, now: float, *, waited: bool = False) -> list[do.Effect]:
        """Decide an episode if everything needed is there; otherwise it stays open or held.

        `waited`: whether the time for delivery reports is over, so that calls without a report count as not received.
        """
        begin, end = episode.begin, episode.end
        if begin is None or end is None:
            return []
        if begin.mode == "eval":
            return self._finish_eval(episode, begin, end, now)
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
        reason = defect or self._find_objection(episode, begin, end, kept)
        if reason:
            return self._drop(episode, reason, now)
        self.run.counts["unseen_turns"] += len(verdict.awaited)
        return self._accept(episode, begin, kept, now)

    def _find_objection(self, episode: OpenEpisode, begin: EpisodeBegin, end: EpisodeEnd, kept: set[str]) -> str:
        """Return the reason for which a finished, complete episode is dropped, or "" if it can be trained."""
        policies = self._trained_policies(episode, begin, kept)
        if self.run.past.winner(begin.slot.id):
            return "superseded"
        if begin.slot.group_id not in self.groups.open and self.run.past.group_closed(begin.slot.group_id):
            return "late_sibling"
        called = {episode.calls[call_id].policy for call_id in kept}
        if not set(begin.policies) <= set(self.run.rules.known) or not called <= set(begin.policies):
            return "unknown_policy"
        if episode.taint and end.calls is None:
            return episode.taint
        if not policies:
            return "unseen" if self._trained_policies(episode, begin, episode.calls) else "no_turns"
        if not set(policies) <= end.rewards.keys() or not end.rewards.keys() <= set(begin.policies):
            return "reward_missing"
        if not fits_message(episode.calls, kept, len(episode.end_body)):
            return "too_large"
        return ""

    def _trained_policies(self, episode: OpenEpisode, begin: EpisodeBegin, kept: Iterable[str]) -> tuple[str, ...]:
        """Return the trained policies with sampled tokens in this episode."""
        present = {episode.calls[call_id].policy for call_id in kept if episode.calls[call_id].sampled}
        return tuple(policy for policy in self.run.rules.trained if policy in present and policy in begin.policies)

    def _accept(self, episode: OpenEpisode, begin: EpisodeBegin, kept: set[str], now: float) -> list[do.Effect]:
        self.run.counts["finished"] += 1
        self.run.counts["orphan_turns"] += len(episode.calls) - len(kept)
        assert episode.end is not None
        slot, policies = begin.slot, self._trained_policies(episode, begin, kept)
        named = tuple(
            call_id for call_id in episode.calls if call_id in kept
        )  # the rollout is assembled from these calls alone
        end_body = encode(msgspec.structs.replace(episode.end, calls=named, received=None))
        member = WaitingMember(episode.episode_id, slot.id, policies)
        group = self.groups.win(slot.group_id, begin.kind, begin.group_size, member, now)
        effects: list[do.Effect] = [
            do.Finish(**msgspec.structs.asdict(self._seal(episode, now)), policies=",".join(policies), end=end_body),
            do.WinSlot(slot.id, episode.episode_id),
        ]
        if len(group.winners) == 1:
            effects.append(do.SaveGroup(slot.group_id, group.kind, group.size, "open", group.since))
        effects += [self._describe_end(episode, begin, "", now), *self._warn_uncredited(episode, kept)]
        return effects + self.groups.advance(slot.group_id)

    def _warn_uncredited(self, episode: OpenEpisode, kept: set[str]) -> list[do.Effect]:
        """Return warnings for rewards of agent tags or calls that are missing or not trained, once for each."""
        assert episode.end is not None
        self.run.counts["rewards_uncredited"] += len(episode.end.call_rewards.keys() - kept)
        found = find_uncredited_rewards(episode.calls, episode.end, kept)
        fresh = list(found.keys() - self._warned_uncredited)[: MAX_UNCREDITED_WARNINGS - len(self._warned_uncredited)]
        self._warned_uncredited |= set(fresh)
        return [do.Emit("warning", {"text": found[tag]}) for tag in fresh]

    def _finish_eval(self, episode: OpenEpisode, begin: EpisodeBegin, end: EpisodeEnd, now: float) -> list[do.Effect]:
        self.run.counts[f"eval_{end.status}"] += 1
        effects: list[do.Effect] = [
            self._seal(episode, now),
            do.Close("eval", end.status, episode.episode_id, episode.end_body),
            do.ForgetTurns(episode.episode_id),
        ]
        if result := self.evals.finish(begin.slot.id, end):
            effects.append(
                do.EvalDone(result.reward or 0.0, result.success, msgspec.msgpack.encode(result.metrics), begin.slot.id)
            )
        elif end.final and self.evals.give_up(begin.slot.id):
            self.run.counts["eval_given_up"] += 1
            effects.append(do.GiveUpEval(begin.slot.id))
        return [*effects, self._describe_end(episode, begin, "", now)]

    def _drop(self, episode: OpenEpisode, reason: str, now: float) -> list[do.Effect]:
        """End an open episode without training it."""
        effects: list[do.Effect] = [self._seal(episode, now)]
        begin = episode.begin
        if begin is None:
            self.run.counts[f"stray.{reason}"] += 1
        else:
            self.run.counts[f"dropped.{reason}" if begin.mode == "train" else f"eval_{reason}"] += 1
            effects += [self._describe_end(episode, begin, reason, now), *self.groups.drop(begin, episode.end, now)]
        close = do.Close("dropped", reason, episode.episode_id, episode.end_body)
        return [*effects, close, do.ForgetTurns(episode.episode_id)]

    def _open(self, episode_id: str, now: float, begin: bytes | None = None) -> tuple[OpenEpisode, list[do.Effect]]:
        episode = self.open[episode_id] = OpenEpisode(episode_id=episode_id, began_at=now, last_message_at=now)
        return episode, [do.Open(episode_id, now) if begin is None else do.Begin(begin, episode_id, now)]

    def _seal(self, episode: OpenEpisode, now: float) -> do.Seal:
        """Remove an episode from the open ones, and return what is needed to recognise late duplicates."""
        del self.open[episode.episode_id]
        begin = episode.begin
        slot_id, kind, client_id = (begin.slot.id, begin.kind, begin.client_id) if begin else ("", "", "")
        digest = _digest(episode.end_body) if episode.end else b""
        return do.Seal(slot_id, kind, client_id, digest, "\n".join(episode.calls), now, episode.episode_id)

    def _use_ticket(self, begin: EpisodeBegin, *, wanted: bool = False) -> list[do.Effect]:
        if begin.ticket_id is None:
            return []
        used = self.tickets.use(begin.kind, begin.ticket_id)
        if wanted and not used:
            self.run.counts["ticket_unknown"] += 1
        return used

    def _idle_timeout_s(self, episode: OpenEpisode) -> float:
        requested_s = episode.begin.idle_timeout_s if episode.begin else None
        return self.run.rules.idle_timeout_s if requested_s is None else min(requested_s, MAX_SILENCE_S)

    def _is_awaited(self, episode: OpenEpisode, call: TurnMeta) -> bool:
        """Return whether a held end waits for this turn, because the end names it or a turn that has arrived builds on it."""
        end = episode.end
        if end is None or episode.begin is None or end.calls is None:
            return True
        return call.call_id in end.calls or any(other.parent == call.call_id for other in episode.calls.values())

    def _describe_end(self, episode: OpenEpisode, begin: EpisodeBegin, reason: str, now: float) -> do.Emit:
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


def _taint(episode: OpenEpisode, taint: str) -> list[do.Effect]:
    """Mark an episode as tainted. The first reason is kept."""
    if episode.taint:
        return []
    episode.taint = taint
    return [do.Taint(TAINTS.index(taint), episode.episode_id)]


def _is_same_begin(one: EpisodeBegin | None, other: EpisodeBegin) -> bool:
    """Return whether two begins are equal except for the ticket, which differs when a begin is repeated through another proxy."""
    return one is not None and msgspec.structs.replace(one, ticket_id=other.ticket_id) == other


def _classify_late_end(reason: str, digest: bytes, body: bytes) -> str:
    if reason == "silent":
        return "late_end"
    return "duplicates" if digest == _digest(body) else "conflicting_end"


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()
