"""The result of a check of an answer."""

from __future__ import annotations

import msgspec

from swarmq.outcome import Outcome, to_finite_float


class Score(msgspec.Struct, frozen=True):
    """A value and, if it is below 1, the reason. It counts as a number: return it as a reward, or give it to `combine`.

    Raises OutcomeError for a value that is not a finite number.
    """

    value: float
    """The score, from 0 to 1."""
    reason: str = ""

    def __post_init__(self) -> None:
        to_finite_float("the value of a Score", self.value)

    def __float__(self) -> float:
        return float(self.value)

    def outcome(self) -> Outcome:
        """Return an Outcome with the value as reward, `success` if it is 1, and the reason as metadata."""
        return Outcome(self.value, success=self.value == 1.0, metadata={"reason": self.reason} if self.reason else {})


RIGHT = Score(1.0)


def wrong(reason: str) -> Score:
    """Return a score of 0 with its reason."""
    return Score(0.0, reason)
