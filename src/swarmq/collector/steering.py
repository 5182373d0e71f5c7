"""What people ask of a run while it is up, and what the collector decides by itself: settings, pace, dry kinds. Pure.

command ──obey──> refused, with the reason: nothing is changed
             └──> the next control state: rules of the core, and told to every learner
tick ────look──> a kind ran dry, or came back: the next control state, and a warning
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from swarmq import live
from swarmq.collector.records import Rules, Usage
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Command, Control, Pace

PACES: dict[str, Pace] = {"pause": "paused", "drain": "draining", "resume": "running"}


class Steering:
    """The control state of a run, and the rules that follow from it."""

    def __init__(self, file: SwarmJob, state: Control) -> None:
        self.file = file
        self.alive: dict[str, float] = {}
        """Kind -> when somebody last took one of its tickets or worked on it."""
        self.dry: set[str] = set()
        """Kinds that are known to have run dry, lent or not."""
        self.adopt(state)

    def adopt(self, state: Control) -> None:
        self.state = state
        self.job = live.applied(self.file, state.changes)
        """The settings that are in effect."""
        stretches = live.stretches(self.file, state.changes, lambda change: change.from_grant)
        self.rules = msgspec.structs.replace(Rules.of(self.job), stretches=stretches)

    def obey(self, command: Command, *, versions: Mapping[str, int], from_grant: int) -> tuple[Control, dict[str, Any]]:
        """The state after a command, and the reply. Raises ConfigError for one that cannot be obeyed."""
        number, state = self.state.number + 1, self.state
        if command.action == "set":
            settings = dict(command.settings)
            if "mix" in settings:
                settings.setdefault("mix_schedule", None)  # constant from then on
            before = self.job
            after = live.proposed(before, settings, versions)
            ahead = before.groups.max_staleness + 2
            changes = live.changes_between(
                before,
                after,
                self.file,
                settings,
                number=number,
                from_step={policy: version + ahead for policy, version in versions.items()},
                from_grant=from_grant,
            )
            kept = [old for old in state.changes if old.path in live.MIX or old.path not in settings]
            state = msgspec.structs.replace(state, changes=(*kept, *changes))
            told = [{"path": one.path, "before": one.before, "value": one.value} for one in changes]
            reply: dict[str, Any] = {"changes": told, "learners": sorted(_learners(settings, versions))}
        elif command.action == "checkpoint":
            state = msgspec.structs.replace(state, checkpoints=state.checkpoints + 1)
            reply = {"learners": sorted(versions)}
        else:
            state = msgspec.structs.replace(state, pace=PACES[command.action])
            reply = {"pace": state.pace, "learners": sorted(versions)}
        state = msgspec.structs.replace(state, number=number, command_id=command.command_id)
        return state, {"state": "accepted", "number": number, **reply}

    def look(
        self, usage: Mapping[str, Usage], out: Mapping[str, Collection[str]], shares: Mapping[str, float], now: float
    ) -> tuple[Control | None, list[str]]:
        """The next state if a kind ran dry or came back, and warnings. `shares` are those of the newest mix."""
        rules = self.rules
        for kind, tickets in out.items():
            if not tickets or usage.get(kind, Usage()).running:
                self.alive[kind] = now
        since = {kind: now - self.alive.setdefault(kind, now) for kind in out}
        dry = {kind for kind, idle_s in since.items() if idle_s >= rules.dry_after_s}
        fresh, back = dry - self.dry, (self.dry | set(self.state.lent)) - dry
        if not fresh and not back:
            return None, []
        self.dry = dry
        lendable = {kind for kind in dry if rules.when_dry == "lend" or kind not in shares}
        lent = lendable if shares.keys() - lendable else set(self.state.lent) - back
        texts = [
            f"kind {kind} has run dry: {len(out[kind])} tickets out, nobody has taken one for {since[kind]:.0f} s; "
            + (
                "its share is lent to the others until it is back"
                if kind in lent
                else "batches wait for it"
                + (
                    ""
                    if rules.when_dry == "lend"
                    else " (groups.when_dry = 'lend' would let the others have its share)"
                )
            )
            for kind in sorted(fresh)
        ]
        texts += [f"kind {kind} is back and has its share again" for kind in sorted(back)]
        if lent == set(self.state.lent):
            return None, texts
        state = msgspec.structs.replace(
            self.state, number=self.state.number + 1, lent=tuple(sorted(lent)), command_id=""
        )
        return state, texts


def refusal(error: ConfigError) -> dict[str, Any]:
    return {"state": "refused", "text": str(error).removeprefix("set: ")}


def _learners(settings: Mapping[str, Any], versions: Mapping[str, int]) -> set[str]:
    """The policies whose learners will say from which step a change holds."""
    concerned = {live.concerns(path) for path in settings}
    return {policy for policy in versions if None in concerned or policy in concerned}
