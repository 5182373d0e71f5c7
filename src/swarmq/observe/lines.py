"""Lines for a person at a terminal: what has happened, and when. Text that is longer than the terminal is wide goes on below
itself."""

from __future__ import annotations

import textwrap
import time

from swarmq.runtime.terminal import visible


def hanging(head: str, text: str, *, width: int | None) -> str:
    """`text` beside `head`, broken between words at `width` columns; None: not at all."""
    text = visible(text)
    if width is not None:
        columns = max(width - len(head), 1)
        wrapped = (
            textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
        )
        text = "\n".join(wrapped)
    return head + textwrap.indent(text, " " * len(head)).lstrip(" ")


def since(began: float) -> str:
    """The head of a line: seconds since `began` of the monotonic clock."""
    return f"{time.monotonic() - began:6.1f} s  "
