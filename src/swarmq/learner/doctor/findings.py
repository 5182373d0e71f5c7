"""What a check found: good, worth knowing, or wrong, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "note", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    level: Level
    check: str
    """What was looked at, in a few words."""
    text: str
    """What was seen, with numbers; where it is not `ok`, also the limit and what to do."""


def judged(check: str, *, bad: bool, ok: str, wrong: str, level: Level = "error") -> Finding:
    return Finding(level=level if bad else "ok", check=check, text=wrong if bad else ok)
