"""Findings: the result of a check (good, noteworthy or wrong) and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

Level = Literal["ok", "note", "warning", "error"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    level: Level
    check: str
    """Name of the check in a few words."""
    text: str
    """Observation with numbers; if the level is not `ok`, also the limit and what to do."""
    named: bool = True
    """Whether `check` is printed before the text; false if the text already begins with the name of the measured quantity."""

    @property
    def line(self) -> str:
        return f"{self.check}: {self.text}" if self.named else self.text


def verdict(found: Sequence[Finding]) -> Finding:
    """Return the overall verdict in one line."""
    named = {
        level: ", ".join(dict.fromkeys(finding.check for finding in found if finding.level == level))
        for level in ("error", "warning", "ok")
    }
    look = f"look at {named['warning']}" if named["warning"] else ""
    if named["error"]:
        return Finding(level="error", check="verdict", text=f"wrong: {named['error']}" + (f"; {look}" if look else ""))
    if look:
        return Finding(level="warning", check="verdict", text=f"nothing is broken, but {look}")
    if not named["ok"]:
        return Finding(level="note", check="verdict", text="there is nothing to examine yet")
    return Finding(level="ok", check="verdict", text="sound: nothing wrong was found")


def judge_value(check: str, *, bad: bool, ok: str, wrong: str, level: Level = "error") -> Finding:
    return Finding(level=level if bad else "ok", check=check, text=wrong if bad else ok)
