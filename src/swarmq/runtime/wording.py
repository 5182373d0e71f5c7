"""Words that follow a number."""

from __future__ import annotations


def count_of(n: int, one: str, many: str = "") -> str:
    """Return a number with its noun, which may have its verb behind it. `many`: by default `one` with an s."""
    return f"{n} {one if n == 1 else many or f'{one}s'}"
