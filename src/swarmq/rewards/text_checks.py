"""Checks of model output for repetition and nonsense, in any script.

A unit is a word in scripts that separate words, and a character in others (Chinese, Japanese, Thai, ...); an emoji with its
modifiers is one unit. Punctuation, brackets and indentation are not units, so that code and tables do not count as repetitive
because of their form.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import msgspec

NGRAM = 6
UNSPACED = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Myanmar, Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana, Han
    "\U00020000-\U0003ffff"
)
EMOJI = "\u203c-\u3299\U0001f000-\U0001faff"
_MODIFIER = "[\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
_UNIT = re.compile(
    rf"[\U0001f1e6-\U0001f1ff]{{2}}"  # flags
    rf"|[{EMOJI}]{_MODIFIER}*(?:\u200d[{EMOJI}]{_MODIFIER}*)*"
    rf"|[{UNSPACED}][\u0300-\u036f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u3099\u309a]*"
    rf"|(?:(?![{UNSPACED}])[\w\u0300-\u036f\u200c\u200d])+(?:['\u2019](?:(?![{UNSPACED}])\w)+)*"
)
_PLAIN_CONTROLS = "\t\n\r\f\x1b"
"""Control characters that plain text may contain: tabs, line ends, form feeds and escape."""


def split_units(text: str) -> list[str]:
    """Return the units of a text in order. Equivalent encodings of an accent, and upper and lower case, give equal units."""
    return _UNIT.findall(unicodedata.normalize("NFC", text).casefold())


def repeated_share(text: str, *, n: int = NGRAM) -> float:
    """Return the share of runs of `n` units that occurred earlier in the text: 0 without repetition, near 1 in a loop."""
    found = split_units(text)
    runs = Counter(tuple(found[start : start + n]) for start in range(len(found) - n + 1))
    total = sum(runs.values())
    return 1.0 - len(runs) / total if total else 0.0


def loops(text: str, *, times: int = 4, least_units: int = 12) -> bool:
    """Return whether the text ends by repeating the same units at least `times` times, `least_units` units in all."""
    found = split_units(text)
    for period in range(1, len(found) // times + 1):
        length = max(period * times, least_units)
        tail = found[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def nonsense_share(text: str) -> float:
    """Return the share of characters that no writer intends: broken decodings, control characters, private and unassigned code
    points."""
    return sum(map(_is_nonsense, text)) / len(text) if text else 0.0


class TextChecks(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the text that a model writes. Without arguments every text passes."""

    max_repeated: float | None = None
    """Maximum `repeated_share` of a text, e.g. 0.5; None: any."""
    max_nonsense: float | None = None
    """Maximum `nonsense_share` of a text, e.g. 0.02; None: any."""
    no_loops: bool = False
    ngram: int = NGRAM

    def problem(self, text: str) -> str:
        """Return what is wrong with the text, in words; "" if nothing is."""
        if self.no_loops and loops(text):
            return "ends in a loop"
        if self.max_repeated is not None and (share := repeated_share(text, n=self.ngram)) > self.max_repeated:
            return f"repeats itself: {share:.0%} of its runs of {self.ngram}"
        if self.max_nonsense is not None and (share := nonsense_share(text)) > self.max_nonsense:
            return f"nonsense: {share:.1%} of its characters"
        return ""


def _is_nonsense(character: str) -> bool:
    if character == "\ufffd":
        return True
    category = unicodedata.category(character)
    if category == "Cc":
        return character not in _PLAIN_CONTROLS
    if category == "Cn":  # newer emoji and characters than this Python knows
        return not re.match(rf"[{EMOJI}{UNSPACED}]", character)
    return category in ("Co", "Cs")
