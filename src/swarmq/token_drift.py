"""Token drift: a measure of how well turns continue earlier turns, token by token. Pure.

A turn with an earlier turn to continue either begins with exactly its tokens, or is a branch for a named reason. If a fresh
rendering gives other tokens for the same text, that is drift: repaired if the recorded tokens were kept, a branch with the
reason `drift` if they could not be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from swarmq.messages import Turn

LOST = frozenset({"drift", "template_rewrote_history", "answer_cut", "token_dropped", "character_cut"})
"""Reasons of branches that nobody intended and that recompute their whole context. docs/explanation/proxy.md says how to avoid them."""

EDITED = frozenset({"history_edited", "tools_changed"})
"""Reasons of branches that an agent causes, on purpose (a summary in place of the history) or not (a clock in the system
prompt)."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of turns by how they continue an earlier turn."""

    turns: int = 0
    continued: int = 0
    """Number of turns with an earlier turn to continue; the others begin a conversation."""
    repaired: int = 0
    """Number of turns whose prompt keeps recorded tokens where a rendering gives others."""
    drifted: int = 0
    """Number of turns that were repaired or branched because of drift."""
    branches: dict[str, int] = {}
    """Reason -> number of turns that could not continue."""

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Drift:
        return sum(map(cls.of_turn, turns), cls())

    @classmethod
    def of_turn(cls, turn: Turn) -> Drift:
        return cls(
            turns=1,
            continued=int((turn.parent is not None and not turn.begins) or turn.branch is not None),
            repaired=int(turn.repaired),
            drifted=int(turn.repaired or turn.branch == "drift"),
            branches={turn.branch: 1} if turn.branch else {},
        )

    def __add__(self, other: Drift) -> Drift:
        return Drift(
            turns=self.turns + other.turns,
            continued=self.continued + other.continued,
            repaired=self.repaired + other.repaired,
            drifted=self.drifted + other.drifted,
            branches=dict(Counter(self.branches) + Counter(other.branches)),
        )

    @property
    def rate(self) -> float:
        """Share of drifted turns among the turns with an earlier turn to continue."""
        return self.drifted / max(self.continued, 1)

    @property
    def lost(self) -> float:
        """Share of unintended branches among the turns with an earlier turn to continue."""
        return self.share(LOST)

    def share(self, reasons: Collection[str]) -> float:
        """Return the share of turns that branched for one of `reasons`, among those with an earlier turn to continue."""
        return sum(count for reason, count in self.branches.items() if reason in reasons) / max(self.continued, 1)

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.branches.items()))
        return (
            f"{self.continued} of {self.turns} turns had one to continue: {self.rate:.1%} drifted, "
            f"{self.repaired} repaired, branches: {reasons or 'none'}"
        )
