"""The task mix: the shares at a step, and the division of whole groups by them. Pure.

Collector and learner use the same functions on the same shares, for tickets and for batches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from swarmq.config import MixSchedule

ROUNDING = 9
"""Number of decimals to which fractions of groups are rounded, because shares like 0.1 do not add up exactly."""

Shares = dict[str, float]


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """The task mix from `from_step` on, until the next stretch begins."""

    from_step: int
    mix: Shares
    schedule: MixSchedule | None = None


class Dealt(NamedTuple):
    """Number of groups of each kind in one batch, with the rounding errors for the next batch."""

    counts: dict[str, int]
    carry: Shares
    """Kind -> fraction of a group that rounding still owes the kind, negative if it got too much; sums to 0."""


def kinds_of(stretches: Sequence[Stretch]) -> tuple[str, ...]:
    """Return all kinds that have a share at any step."""
    kinds: dict[str, None] = {}
    for stretch in stretches:
        points = stretch.schedule.points if stretch.schedule else ()
        kinds |= dict.fromkeys([*stretch.mix, *(kind for point in points for kind in point.mix)])
    return tuple(kinds)


def shares(stretches: Sequence[Stretch], step: int, lent: Collection[str] = ()) -> Shares:
    """Return the shares of the batch that makes the weights of `step`; the shares of `lent` kinds go to the others."""
    current = [stretch for stretch in stretches if stretch.from_step <= step][-1]
    mix = _scheduled_mix(current, step)
    active = {kind: share for kind, share in mix.items() if share > 0 and kind not in lent}
    total = sum(active.values())
    return {kind: share / total for kind, share in active.items()} if active else mix


def deal(mix: Mapping[str, float], carry: Mapping[str, float], groups: int) -> Dealt:
    """Divide `groups` whole groups among the kinds of `mix` by largest remainder. `carry`: what rounding in earlier batches
    still owes each kind.

    Over all batches so far, each kind has got its exact share to within one group.
    """
    owed = sum(carry.get(kind, 0.0) for kind in mix)  # not 0 where a kind has just left or lent its share
    wanted = {kind: round(share * (groups - owed) + carry.get(kind, 0.0), ROUNDING) for kind, share in mix.items()}
    counts = {kind: max(0, math.floor(value)) for kind, value in wanted.items()}
    while (total := sum(counts.values())) != groups:
        if total < groups:
            counts[max(wanted, key=lambda kind: wanted[kind] - counts[kind])] += 1
        else:
            counts[min((k for k in wanted if counts[k]), key=lambda kind: wanted[kind] - counts[kind])] -= 1
    return Dealt(counts, {kind: round(wanted[kind] - counts[kind], ROUNDING) for kind in wanted})


def _scheduled_mix(stretch: Stretch, step: int) -> Shares:
    schedule = stretch.schedule
    if schedule is None:
        return stretch.mix
    last = schedule.points[-1]
    if step >= last.step:
        return last.mix
    ways = pairwise([(0, stretch.mix), *((point.step, point.mix) for point in schedule.points)])
    (start, before), (end, after) = next(way for way in ways if way[0][0] <= step < way[1][0])
    if schedule.shape == "table":
        return before
    done = (step - start) / (end - start)
    if schedule.shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    kinds = dict.fromkeys([*before, *after])
    return {kind: (1 - done) * before.get(kind, 0.0) + done * after.get(kind, 0.0) for kind in kinds}
