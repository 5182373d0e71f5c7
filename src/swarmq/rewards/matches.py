"""Comparison of an answer with expected texts. Pure.

Normalisation of both sides: Unicode NFKC, case folded, white space at both ends removed and collapsed to one space, and
quotation marks around the text and one `.`, `!`, `?`, `,`, `;` or `:` at its end removed. Nothing inside the text is removed:
"not 42" never equals "42".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

from swarmq.errors import MissingExtraError, RewardError
from swarmq.rewards.score import RIGHT, Score, wrong

MAX_CHARS = 100_000
"""Maximum characters of an answer; a longer answer is wrong."""
_QUOTES = "\"'`\u201c\u201d\u2018\u2019\u201e\u00ab\u00bb"
_ENDS = ".!?,;:"


def normalise(text: str) -> str:
    """Return the text in the form in which texts are compared."""
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    text = text[:-1].rstrip() if len(text) > 1 and text[-1] in _ENDS else text
    return text[1:-1].strip() if len(text) > 2 and text[0] in _QUOTES and text[-1] in _QUOTES else text


def exact_match(answer: str, expected: str | Iterable[str]) -> Score:
    """Return 1 if the normalised answer equals one of the expected texts, else 0. Raises RewardError if none is expected."""
    accepted = _normalise_expected(expected)
    if len(answer) > MAX_CHARS:
        return wrong(f"the answer has {len(answer)} characters")
    return RIGHT if normalise(answer) in accepted else wrong("the answer is another text")


def fuzzy_match(answer: str, expected: str | Iterable[str], *, least: float = 0.0) -> Score:
    """Return the similarity of the normalised answer to the nearest expected text: 1 minus the share of characters that must be
    inserted or deleted (rapidfuzz's `fuzz.ratio`); 0 below `least`.

    Text beyond the expected one lowers the score, so an answer that lists every possibility scores low. Raises RewardError if
    nothing is expected, and MissingExtraError without rapidfuzz.
    """
    try:
        from rapidfuzz import fuzz  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingExtraError("fuzzy_match needs rapidfuzz: pip install 'swarmq[rewards]'") from error
    accepted = _normalise_expected(expected)
    if len(answer) > MAX_CHARS:
        return wrong(f"the answer has {len(answer)} characters")
    found = normalise(answer)
    similarity = max(float(fuzz.ratio(found, text)) / 100.0 for text in accepted)
    if similarity < least:
        return wrong(f"similarity {similarity:.2f} is below {least:g}")
    return Score(similarity, "" if similarity == 1.0 else f"similarity {similarity:.2f}")


def _normalise_expected(expected: str | Iterable[str]) -> list[str]:
    texts: list[Any] = [expected] if isinstance(expected, str) else list(expected)
    if not texts:
        raise RewardError("expected is empty: give at least one text")
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise RewardError(f"expected is {text!r}: give texts that are not empty, which an empty answer would match")
    return [normalise(text) for text in texts]
