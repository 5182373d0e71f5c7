"""The proxy's counters for its `state` event, and the warnings that follow from them."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from swarmq.errors import EngineAnswerError
from swarmq.messages import Turn
from swarmq.runtime.wording import count_of
from swarmq.token_drift import EDITED, LOST, Drift

REMEDIES = {
    "answer_cut": "ask with include_stop_str_in_output, or with stop_token_ids in place of stop strings",
    "character_cut": "ask for longer answers, or send answers back as they came",
    "token_dropped": "send answers back as they came, and serve a chat template that writes them so",
    "drift": "please report it with the model's name: its text cannot be continued exactly",
    "history_edited": "keep every message as it was, and what changes (a clock, a step number) in the newest one alone",
    "template_rewrote_history": "send reasoning back, or serve a chat template that keeps history as it was sampled",
    "tools_changed": "send the same tools and chat_template_kwargs in every call of a conversation",
}
"""Reason of a branch -> how to avoid it."""

OFTEN = 0.5
"""Share of turns above which an agent's edits of its history cause a warning, because they are rarely intended."""


@dataclasses.dataclass
class Counters:
    alert: float = 1.0
    """Share of lost continuations above which a warning is emitted; 1: no warnings, also none about edits."""
    window: int = 100
    """Number of newest turns of a policy to judge by, among those with an earlier turn to continue."""
    open_calls: int = 0
    by_kind: dict[str, Counter[str]] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    """Task kind -> `calls`, `episodes`, `prompt_tokens`, `sampled_tokens`, `turns`."""
    errors: int = 0
    unusable: Counter[str] = dataclasses.field(default_factory=Counter)
    """Reason -> number of unusable answers of engines."""
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    """Tool type or parameter -> number of requests from which it was left out."""
    watchers: list[Callable[[Turn, float], None]] = dataclasses.field(default_factory=list)
    """Functions to call with each confirmed turn and the seconds that its confirmation took."""
    drift: Drift = dataclasses.field(default_factory=Drift)
    _recent: dict[str, deque[Drift]] = dataclasses.field(default_factory=dict)
    _warned: set[str] = dataclasses.field(default_factory=set)
    _left_out_told: set[str] = dataclasses.field(default_factory=set)
    _flaws: dict[tuple[str, str, str], list[str]] = dataclasses.field(default_factory=dict)
    """(policy, engine, reason) -> error texts of unusable answers since the last call of `alerts`."""
    _cuts: dict[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    """(policy, limit on an answer's tokens) -> largest `max_tokens` of an agent's request since the last call of `alerts`."""
    _cuts_told: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    def total(self, name: str) -> int:
        """Return the sum of the counter `name` in `by_kind` over all kinds."""
        return sum(counts[name] for counts in self.by_kind.values())

    def take(self, turn: Turn, confirm_s: float = 0.0, *, kind: str = "") -> None:
        """Count a confirmed turn."""
        for watch in self.watchers:
            watch(turn, confirm_s)
        one = Drift.of_turn(turn)
        self.by_kind[kind].update(turns=1, sampled_tokens=turn.num_sampled)
        self.drift += one
        if one.continued:
            self._recent.setdefault(turn.policy, deque(maxlen=self.window)).append(one)

    def refuse_answer(self, policy: str, engine: str, error: EngineAnswerError) -> None:
        self.unusable[error.reason] += 1
        self._flaws.setdefault((policy, engine, error.reason), []).append(str(error))

    def cut(self, policy: str, *, asked: int, limit: int) -> None:
        """Count an agent's request for a longer answer than the settings allow."""
        if (policy, limit) not in self._cuts_told:
            self._cuts[policy, limit] = max(asked, self._cuts.get((policy, limit), 0))

    def leave_out(self, kinds: Iterable[str]) -> None:
        """Count a request from which these tools or parameters were left out."""
        self.left_out.update({kind if kind.startswith("tools.") else "unknown parameters" for kind in kinds})

    def fields(self) -> dict[str, Any]:
        return {
            "calls": self.total("calls"),
            "open_calls": self.open_calls,
            "prompt_tokens": self.total("prompt_tokens"),
            "sampled_tokens": self.total("sampled_tokens"),
            "kinds": {kind: dict(counts) for kind, counts in self.by_kind.items()},
            "errors": self.errors,
            "unusable_answers": dict(self.unusable),
            "left_out": dict(self.left_out),
            "continued": self.drift.continued,
            "repaired": self.drift.repaired,
            "drift_rate": self.drift.rate,
            "branches": self.drift.branches,
        }

    def alerts(self) -> list[str]:
        """Return the warnings that are due: for each engine with unusable answers since `alerts` was last called; once for each limit that
        cuts answers and for each thing left out of requests; and for each policy with drift above the threshold, again only
        after its drift was well below."""
        lines = [
            f"policy {policy}: {count_of(len(reasons), 'answer')} of the engine at {engine} could not be used ({reason}): {reasons[-1]}; the "
            "agents got an error. Look at the engine's log and weights (not a number?), then start it again"
            for (policy, engine, reason), reasons in self._flaws.items()
        ]
        self._flaws.clear()
        lines += [
            f"policy {policy}: agents ask for answers of {asked} tokens (max_tokens) and get {limit} at most, as "
            f"policies.{policy}.sampling.max_tokens or their kind's max_tokens says: raise it, leave it out, or ask for fewer"
            for (policy, limit), asked in self._cuts.items()
        ]
        self._cuts_told |= self._cuts.keys()
        self._cuts.clear()
        for name in sorted(self.left_out.keys() - self._left_out_told):
            self._left_out_told.add(name)
            lines.append(
                f"{name}: left out of agents' requests and named in x-swarmq-overridden; only a provider could run such a tool, and "
                "no engine knows such a parameter. Take them out of the agent, or refuse them (proxy.server_tools, "
                "proxy.unknown_parameters)"
            )
        for policy, window in self._recent.items():
            if len(window) < self.window:
                continue
            recent = sum(window, Drift())
            edited = recent.share(EDITED)
            often = max(OFTEN, self.alert)
            if (recent.lost > self.alert or edited > often) and policy not in self._warned:
                self._warned.add(policy)
                branched = recent.share(LOST | EDITED)
                lines.append(
                    f"policy {policy}: {branched:.0%} of the last {self.window} turns could not continue their "
                    f"conversation token by token ({recent}); each of them computes its whole context again. "
                    f"Most often: {_remedy(recent)}. All reasons: docs/explanation/proxy.md, 'Branches'"
                )
            elif recent.lost <= self.alert / 2 and edited <= often / 2:
                self._warned.discard(policy)
        return lines


def _remedy(drift: Drift) -> str:
    """Return how to avoid the most frequent reason of branches."""
    reason = max(LOST | EDITED, key=lambda name: (drift.branches.get(name, 0), name))
    return f"{reason}: {REMEDIES[reason]}"
