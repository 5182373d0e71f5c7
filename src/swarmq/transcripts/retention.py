"""The choice of transcripts to remove when the limit on size or age is exceeded. Pure.

Conversations go before facts: a removed conversation (the body of a frame) leaves its meta, until its whole segment is out of age.
Under the size cap, the least interesting conversations go first, and of those the oldest: trained ones and those with equal rewards,
then those that ordinary operation drops, at last failures and evaluations. The newest KEPT conversations of every kind, state and
reason always stay, whatever the caps say.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from swarmq.messages import EQUAL_REWARDS

KEPT = 32
"""Number of newest conversations that always stay, for each combination of kind, state and reason."""
TARGET = 0.9
"""Share of the size cap down to which conversations are removed, so that segments are not rewritten all the time."""
FORGOTTEN = 0xFFFF
"""Class index that stands for a frame without meta."""

ORDINARY = frozenset(
    {"stale", "overlong", "superseded", "late_sibling", "group_too_small", "kind_not_in_mix", "version_unknown"}
)
"""Reasons for which episodes are dropped without anything being wrong."""


class SegmentIndex(msgspec.Struct, kw_only=True):
    """Facts about one segment. A frame is identified by its index in the arrays."""

    number: int
    generation: int = 0
    size: int
    """Size of the file in bytes."""
    newest_at: float = 0.0
    """Unix time when the last of its episodes was closed."""
    classes: array[int] = msgspec.field(default_factory=lambda: array("H"))
    """Class of each frame, as numbered by `Classes`; FORGOTTEN for one without meta."""
    bodies: array[int] = msgspec.field(default_factory=lambda: array("I"))
    """Size of each frame's body in bytes; 0 if it was removed."""

    def add(self, class_: int, body_size: int, closed_at: float) -> None:
        self.classes.append(class_)
        self.bodies.append(body_size)
        self.newest_at = max(self.newest_at, closed_at)


class Classes:
    """Indices of classes of conversations (kind, state, reason), so that a million frames need little memory."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, str], int] = {}
        self.interest: list[int] = []
        """Class index -> interest of its conversations, from 0 (removed first) to 2 (removed last)."""

    def number(self, kind: str, state: str, reason: str) -> int:
        """Return the index of a class. There are at most FORGOTTEN; all further classes share the last."""
        key = (kind, state, reason)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = min(len(self.interest), FORGOTTEN - 1)
            if found == len(self.interest):
                self.interest.append(interest(state, reason))
        return found


class RetentionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Segments, bodies and metas to remove."""

    remove: tuple[int, ...] = ()
    """Numbers of the segments to delete as a whole."""
    strip: dict[int, frozenset[int]] = {}
    """Number of a segment -> indices of frames that lose their bodies."""
    forget: dict[int, frozenset[int]] = {}
    """Number of a segment -> indices of frames that lose their metas, too."""

    def __bool__(self) -> bool:
        return bool(self.remove or self.strip or self.forget)


def interest(state: str, reason: str) -> int:
    """Return how interesting the conversation of an episode is, from 0 (removed first) to 2 (removed last)."""
    if state == "trained" or reason == EQUAL_REWARDS:
        return 0
    return 1 if state == "dropped" and reason in ORDINARY else 2


def find_protected(segments: Sequence[SegmentIndex], *, kept: int = KEPT) -> dict[int, frozenset[int]]:
    """Return number of a segment -> indices of frames whose bodies always stay."""
    seen: Counter[int] = Counter()
    protected: dict[int, frozenset[int]] = {}
    for segment in reversed(segments):
        found = []
        for frame in range(len(segment.bodies) - 1, -1, -1):
            class_ = segment.classes[frame]
            if segment.bodies[frame] and seen[class_] < kept:
                seen[class_] += 1
                found.append(frame)
        if found:
            protected[segment.number] = frozenset(found)
    return protected


def plan_age(segments: Sequence[SegmentIndex], *, before: float, kept: int = KEPT) -> RetentionPlan:
    """Plan the removal of segments whose episodes were all closed before the time `before`, except for protected bodies.

    The last segment, to which frames are appended, is left alone.
    """
    aged = [segment for segment in segments[:-1] if segment.newest_at < before]
    if not aged:
        return RetentionPlan()
    protected = find_protected(segments, kept=kept)
    forget = {}
    for segment in aged:
        stay = protected.get(segment.number, frozenset())
        gone = {frame for frame, class_ in enumerate(segment.classes) if class_ != FORGOTTEN} - stay
        if stay and gone:
            forget[segment.number] = frozenset(gone)
    return RetentionPlan(remove=tuple(one.number for one in aged if one.number not in protected), forget=forget)


def plan_size(
    segments: Sequence[SegmentIndex], interests: Sequence[int], *, cap: int, target: int, kept: int = KEPT
) -> RetentionPlan:
    """If the segments exceed `cap` bytes, plan removals that leave at most `target` bytes.

    The plan removes bodies first, the least interesting and oldest ones before others. If that is not enough, it removes whole segments
    without bodies, oldest first, but never the newest segment.
    """
    excess = sum(segment.size for segment in segments) - target
    if excess + target <= cap:
        return RetentionPlan()
    protected = find_protected(segments, kept=kept)
    strip: dict[int, set[int]] = defaultdict(set)
    for level in sorted(set(interests)):
        for segment, frame in _bodies(segments, protected, interests, level):
            if excess <= 0:
                return RetentionPlan(strip=_frozen(strip))
            strip[segment.number].add(frame)
            excess -= segment.bodies[frame]
    remove = []
    for segment in segments[:-1]:
        if excess <= 0:
            break
        if segment.number not in protected:
            remove.append(segment.number)
            excess -= segment.size - sum(segment.bodies[frame] for frame in strip.pop(segment.number, ()))
    return RetentionPlan(remove=tuple(remove), strip=_frozen(strip))


def _bodies(
    segments: Sequence[SegmentIndex], protected: dict[int, frozenset[int]], interests: Sequence[int], level: int
) -> Iterable[tuple[SegmentIndex, int]]:
    """Yield the unprotected bodies of one level of interest, oldest first."""
    for segment in segments:
        stay = protected.get(segment.number, frozenset())
        for frame, size in enumerate(segment.bodies):
            if size and frame not in stay and interests[segment.classes[frame]] == level:
                yield segment, frame


def _frozen(frames: dict[int, set[int]]) -> dict[int, frozenset[int]]:
    return {segment: frozenset(found) for segment, found in frames.items() if found}
