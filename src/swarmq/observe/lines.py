"""Timestamped lines for terminals, wrapped below their text."""

from __future__ import annotations

import textwrap
import time

from swarmq.runtime.terminal import visible


def wrap_beside(head: str, text: str, *, width: int | None) -> str:
    """Return `text` beside `head`, wrapped between words at `width` columns, or not wrapped if `width` is None."""
    text = visible(text)
    if width is not None:
        columns = max(width - len(head), 1)
        wrapped = (
            textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
        )
        text = "\n".join(wrapped)
    return head + textwrap.indent(text, " " * len(head)).lstrip(" ")


def format_elapsed(began: float) -> str:
    """Return the head of a line: seconds since `began` on the monotonic clock."""
    return f"{time.monotonic() - began:6.1f} s  "
