"""How well turns continued the turns before them. Pure.

A turn that has an earlier one to continue either begins with exactly its tokens, or it is a branch for a typed reason.
Where a fresh rendering would have put other tokens for the same text, that is drift: repaired when the recorded tokens
were kept, a branch of reason `drift` when they could not be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from swarmq.messages import Turn

LOST = frozenset({"drift", "template_rewrote_history", "answer_cut", "token_dropped", "character_cut"})
"""Branches that nobody asked for: each computes its whole context again. docs/proxy.md says what avoids which."""

EDITED = frozenset({"history_edited", "tools_changed"})
"""Branches that an agent makes, on purpose (a summary in place of the history) or not (a clock in the system prompt)."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of turns."""

    turns: int = 0
    continued: int = 0
    """That had an earlier turn to continue; the others begin a conversation."""
    repaired: int = 0
    """Whose prompt keeps recorded tokens where a rendering has others."""
    drifted: int = 0
    """Repaired or branched by drift."""
    branches: dict[str, int] = {}
    """Reason -> turns that could not continue."""

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
        """Drifted turns per turn with something to continue."""
        return self.drifted / max(self.continued, 1)

    @property
    def lost(self) -> float:
        """Share of the turns with something to continue that branched though nobody asked for it."""
        return self.share(LOST)

    def share(self, reasons: Collection[str]) -> float:
        """Share of the turns with something to continue that branched for one of these reasons."""
        return sum(count for reason, count in self.branches.items() if reason in reasons) / max(self.continued, 1)

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.branches.items()))
        return (
            f"{self.continued} of {self.turns} turns had one to continue: {self.rate:.1%} drifted, "
            f"{self.repaired} repaired, branches: {reasons or 'none'}"
        )
