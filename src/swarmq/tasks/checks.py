"""The check that a made task carries, and its result for an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from swarmq.errors import RewardError
from swarmq.rewards import Score, exact_match, fuzzy_match
from swarmq.rewards.score import RIGHT, wrong

MIN_SIMILARITY = 0.8
"""Minimum similarity (from 0 to 1) at which a name or phrase counts as the expected one."""
_ANSWER_LINE = re.compile(r"^[\s*_#>-]*answer[*_\s]*:[*_\s]*(.+?)[*_\s]*$", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is checked.

    exact    the answer is one of the `expected` texts, after normalisation (`swarmq.rewards.matches`)
    phrase   the answer is similar to one of the `expected` texts
    number   the answer has one number, and it is within `tolerance` (relative) of the first expected one
    choice   the answer is the letter of the expected choice
    """

    type: Literal["exact", "phrase", "number", "choice"]
    expected: tuple[str, ...]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not self.expected or not all(text.strip() for text in self.expected):
            raise ValueError("check.expected is empty: name at least one answer")
        if not 0.0 <= self.tolerance < 1.0:
            raise ValueError(f"check.tolerance is {self.tolerance:g}: it must be from 0 to below 1")
        if self.type == "number" and _read_number(self.expected[0]) is None:
            raise ValueError(f"check.expected is {self.expected[0]!r}: a check of type number needs one number")
        if self.type == "choice" and not re.fullmatch(r"[A-Za-z]", self.expected[0].strip()):
            raise ValueError(f"check.expected is {self.expected[0]!r}: a check of type choice needs one letter")

    def score(self, answer: str) -> Score:
        """Return the score of an answer. `answer` is the answer alone, as `extract_answer` returns it."""
        match self.type:
            case "exact":
                return exact_match(answer, self.expected)
            case "phrase":
                similar = fuzzy_match(answer, self.expected, least=MIN_SIMILARITY)
                return RIGHT if similar.value else similar
            case "choice":
                letter = answer.strip(" \t().:").upper()
                return RIGHT if letter == self.expected[0].strip().upper() else wrong("another choice")
            case "number":
                return self._compare_number(answer)

    def _compare_number(self, answer: str) -> Score:
        given, expected = _read_number(answer), _read_number(self.expected[0])
        assert expected is not None
        if given is None:
            return wrong("not one number")
        near = abs(given - expected) <= self.tolerance * abs(expected)
        return RIGHT if near else wrong(f"{given:g} is not the expected number")


def extract_answer(text: str) -> str:
    """Return the text after the last `Answer:`, or the last line if there is none."""
    if found := _ANSWER_LINE.findall(text):
        return str(found[-1])
    return (text.strip().splitlines() or [""])[-1].strip()


def score(task: Mapping[str, Any], text: str) -> Score:
    """Return the score of a model's text for a made task (a line of tasks.jsonl). Raises RewardError for a task without a check."""
    try:
        check = msgspec.convert(task.get("check"), Check)
    except (msgspec.ValidationError, ValueError) as error:
        raise RewardError(f"task {task.get('id')!r}: check: {error}") from error
    return check.score(extract_answer(text))


def _read_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[0].replace(",", "")) if len(found) == 1 else None
