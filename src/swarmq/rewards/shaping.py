"""Rewards built from parts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from swarmq.errors import OutcomeError
from swarmq.outcome import Outcome, to_finite_float
from swarmq.rewards.score import Score


def combine(
    parts: Mapping[str, float | Score], weights: Mapping[str, float] | None = None, *, success: bool | None = None
) -> Outcome:
    """Return the weighted sum of the parts as reward (weight 1 by default), with every part as a metric; the metrics' means are
    shown by kind. The reason of a Score becomes metadata under the name of its part.

    Raises OutcomeError for a part that is not a finite number and for a weight without a part.
    """
    weights = weights or {}
    if unknown := [name for name in weights if name not in parts]:
        raise OutcomeError(f"weights names {', '.join(unknown)}; the parts are {', '.join(parts) or 'none'}")
    values = {name: to_finite_float(name, value) for name, value in parts.items()}
    reward = sum(to_finite_float(f"weights.{name}", weights.get(name, 1.0)) * value for name, value in values.items())
    reasons = {name: part.reason for name, part in parts.items() if isinstance(part, Score) and part.reason}
    return Outcome(reward, success=success, metrics=values, metadata=reasons)


def clip(reward: float, low: float = -1.0, high: float = 1.0) -> float:
    """Return the reward clipped to the bounds. Raises OutcomeError for NaN, which has no place between bounds."""
    return min(max(to_finite_float("reward", reward), low), high)


def length_penalty(length: float, *, free: float, full: float, worst: float = -1.0) -> float:
    """Return 0 up to `free`, then falling linearly to `worst` at `full` and beyond (soft overlong punishment, 2503.14476)."""
    if not free < full:
        raise OutcomeError(f"length_penalty: free must be less than full (got {free:g} and {full:g})")
    return worst * min(max((length - free) / (full - free), 0.0), 1.0)


def potential_differences(potentials: Sequence[float], *, gamma: float = 1.0) -> list[float]:
    """Return `gamma * next - present` for each of the S - 1 steps between S potentials.

    Added to the rewards of the steps, the differences change how fast the policy learns but not which policy is best (Ng,
    Harada and Russell, 1999).
    """
    return [gamma * after - before for before, after in pairwise(potentials)]
