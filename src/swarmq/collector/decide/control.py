"""Control of a live run: operators' changes of settings and pace, and dry kinds that the collector detects itself. Pure.

command ──obey──> refused, with the reason: nothing changes
             └──> the next control state: new rules of the core, sent to every learner
tick ──detect──> a kind ran dry, or came back: the next control state, and a warning
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from swarmq import live_settings
from swarmq.collector.decide.state import Rules, Usage
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Command, Control, Pace
from swarmq.runtime.wording import count_of

PACES: dict[str, Pace] = {"pause": "paused", "drain": "draining", "resume": "running"}


LOOK_BACK, TEACHES = 4, 2
"""Factors that decide when a flat kind, whose groups teach nothing, gets its share of the mix back. It is examined once
LOOK_BACK * `uninformative_groups` of its groups are counted, and must have trained at least TEACHES of every
`uninformative_groups` on average. With only one, the kind would be flat again at once."""


class KindSignal(msgspec.Struct):
    """Counts of one kind's groups that one policy received since it last trained the kind, or since the kind became flat."""

    is_flat: bool = False
    """Whether too many of the groups had equal rewards."""
    taught: int = 0
    """Number of trained groups."""
    equal: int = 0
    """Number of groups that were dropped for equal rewards."""


class RunControl:
    """The control state of a run and the rules that follow from it."""

    def __init__(self, file: SwarmJob, state: Control) -> None:
        self.file = file
        self.alive: dict[str, float] = {}
        """Kind -> time when a client last took one of its tickets or worked on it."""
        self.dry: set[str] = set()
        """Kinds that are dry, whether their share is lent or not."""
        self._signals: dict[tuple[str, str], KindSignal] = {}
        """(policy, kind) -> counts of the groups that the policy received."""
        self._reported_flat: set[str] = set()
        """Flat kinds that were already reported, and are not reported again while informative groups stay rare."""
        self.adopt(state)

    def adopt(self, state: Control) -> None:
        self.state = state
        self.job = live_settings.apply_changes(self.file, state.changes)
        """Settings in effect."""
        stretches = live_settings.mix_stretches(self.file, state.changes, lambda change: change.from_grant)
        self.rules = msgspec.structs.replace(Rules.of(self.job), stretches=stretches)

    def obey(self, command: Command, *, versions: Mapping[str, int], from_grant: int) -> tuple[Control, dict[str, Any]]:
        """Return the control state after a command, and the reply. Raises ConfigError for a command that cannot be obeyed."""
        number, state = self.state.number + 1, self.state
        if command.action in {"set", "stop"}:
            before = self.job
            if command.action == "stop":
                settings = _last_steps(command.settings, versions)
                after = live_settings.validate_changes(before, settings, {}, file=self.file)
            else:
                settings = dict(command.settings)
                if "mix" in settings:
                    settings.setdefault("mix_schedule", None)  # the mix is constant from then on
                after = live_settings.validate_changes(before, settings, versions, file=self.file)
            ahead = before.groups.max_staleness + 2
            changes = live_settings.diff_settings(
                before,
                after,
                self.file,
                settings,
                number=number,
                from_step={policy: version + ahead for policy, version in versions.items()},
                from_grant=from_grant,
            )
            kept = [old for old in state.changes if old.path in live_settings.MIX or old.path not in settings]
            state = msgspec.structs.replace(state, changes=(*kept, *changes))
            applied = [{"path": one.path, "before": one.before, "value": one.value} for one in changes]
            reply: dict[str, Any] = {"changes": applied, "learners": sorted(_learners(settings, versions))}
        elif command.action == "checkpoint":
            state = msgspec.structs.replace(state, checkpoints=state.checkpoints + 1)
            reply = {"learners": sorted(versions)}
        else:
            reply = {"pace": PACES[command.action], "learners": sorted(versions)}
            gone = (
                live_settings.find_reached_limits(self.file, state.changes, versions)
                if command.action == "resume"
                else []
            )
            if gone:
                reply["changes"] = [
                    {"path": one.path, "before": one.value, "value": live_settings.value_at(self.file, one.path)}
                    for one in gone
                ]
            kept = [change for change in state.changes if change not in gone]
            state = msgspec.structs.replace(state, pace=PACES[command.action], changes=tuple(kept))
        state = msgspec.structs.replace(state, number=number, command_id=command.command_id)
        return state, {"state": "accepted", "number": number, **reply}

    def count_report(self, policy: str, *, taught: Mapping[str, int], equal: Mapping[str, int]) -> None:
        """Count a learner's report: kind -> trained groups, and kind -> groups dropped for equal rewards."""
        for kind in taught.keys() | equal.keys():
            if kind in taught and kind not in self.state.lent:
                self._signals[policy, kind] = KindSignal()
                continue
            signal = self._signals.setdefault((policy, kind), KindSignal())
            signal.taught += taught.get(kind, 0)
            signal.equal += equal.get(kind, 0)

    def detect_dry_kinds(
        self,
        usage: Mapping[str, Usage],
        out: Mapping[str, Collection[str]],
        shares: Mapping[str, float],
        learning: Collection[str],
        now: float,
    ) -> tuple[Control | None, list[str], list[str]]:
        """Return the next control state, or None if it stays; warnings of kinds that ran dry or came back; and warnings of kinds
        that teach nothing.

        `out`: kind -> its tickets that are out. `shares`: the mix of the newest batch. `learning`: policies with steps to go.
        """
        rules = self.rules
        for kind, tickets in out.items():
            if not tickets or usage.get(kind, Usage()).running:
                self.alive[kind] = now
        since = {kind: now - self.alive.setdefault(kind, now) for kind in out}
        idle = {kind for kind, idle_s in since.items() if idle_s >= rules.dry_after_s}
        dry = idle | self._find_uninformative(shares, learning)
        fresh, back = dry - self.dry, (self.dry | set(self.state.lent)) - dry
        if not fresh and not back:
            return None, [], []
        self.dry = dry
        lendable = {kind for kind in dry if rules.when_dry == "lend" or kind not in shares}
        lent = lendable if shares.keys() - lendable else set(self.state.lent) - back
        stalls = {
            kind: f"has run dry: {count_of(len(out[kind]), 'ticket')} out, nobody has taken one for {since[kind]:.0f} s"
            for kind in fresh & idle
        }
        flat = {
            kind: f"teaches nothing now: rewards were equal in each of its last {self._too_many(kind, shares)} groups"
            for kind in fresh - idle - self._reported_flat
        }
        stall_texts, flat_texts = (
            [
                f"kind {kind} {cause}; {self._describe_lending(kind in lent, others=len(shares) > 1)}"
                for kind, cause in sorted(causes.items())
            ]
            for causes in (stalls, flat)
        )
        self._reported_flat = (self._reported_flat | fresh) - idle
        stall_texts += [f"kind {kind} is back and has its share again" for kind in sorted(back - self._reported_flat)]
        if lent == set(self.state.lent):
            return None, stall_texts, flat_texts
        state = msgspec.structs.replace(
            self.state, number=self.state.number + 1, lent=tuple(sorted(lent)), command_id=""
        )
        return state, stall_texts, flat_texts

    def _find_uninformative(self, shares: Mapping[str, float], learning: Collection[str]) -> set[str]:
        """Return the flat kinds: their groups teach nothing, so a learner would wait for them in vain."""
        uninformative_groups = self.rules.uninformative_groups
        for (policy, kind), signal in self._signals.items():
            groups = signal.equal + signal.taught
            if not signal.is_flat and signal.equal >= self._too_many(kind, shares) and policy in learning:
                self._signals[policy, kind] = KindSignal(is_flat=True)
            elif signal.is_flat and groups >= LOOK_BACK * uninformative_groups:
                teaches = signal.taught * uninformative_groups >= TEACHES * groups
                self._signals[policy, kind] = (
                    KindSignal() if teaches else KindSignal(True, taught=signal.taught // 2, equal=signal.equal // 2)
                )
        return {kind for (policy, kind), signal in self._signals.items() if signal.is_flat and policy in learning}

    def _too_many(self, kind: str, shares: Mapping[str, float]) -> int:
        """Return the number of consecutive groups with equal rewards that make a kind flat."""
        return round(self.rules.uninformative_groups * max(1.0, shares.get(kind, 0.0) * self.rules.groups_per_batch))

    def _describe_lending(self, lent: bool, *, others: bool) -> str:
        if lent:
            return "its share is lent to the other kinds until it is back"
        hint = (
            " (groups.when_dry = 'lend' would lend its share to the other kinds)"
            if self.rules.when_dry == "wait" and others
            else ""
        )
        return f"batches wait for it{hint}"


def refusal(error: ConfigError) -> dict[str, Any]:
    return {"state": "refused", "text": str(error).removeprefix("set: ")}


def _last_steps(asked: Mapping[str, Any], versions: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings that end each policy after its step in `asked` (None: the present step). Raises ConfigError for a
    step in the past."""
    settings: dict[str, Any] = {}
    for policy, after in asked.items():
        present = versions.get(policy, 0)
        if isinstance(after, int) and after <= present:
            raise ConfigError(
                f"--after {after}: {policy} has made {count_of(present, 'step')}; name a later one, or leave --after out to end after the present step"
            )
        if after is None and not present:
            raise ConfigError(
                f"{policy} has made no step yet: --after 1 ends it after its first step; Ctrl-C ends it at once, without a checkpoint"
            )
        settings[f"policies.{policy}.train.max_steps"] = present if after is None else after
    return settings


def _learners(settings: Mapping[str, Any], versions: Mapping[str, int]) -> set[str]:
    """Return the policies whose learners will report the step from which a change of these settings holds."""
    concerned = {live_settings.policy_of_path(path) for path in settings}
    return {policy for policy in versions if None in concerned or policy in concerned}
