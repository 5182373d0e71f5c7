"""What the tables of README and docs are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def table(heads: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Lines of Markdown."""
    heads = list(heads)
    yield _row(heads)
    yield f"|{'---|' * len(heads)}\n"
    yield from map(_row, rows)


def ends(held_out: Mapping[str, float]) -> tuple[float, float]:
    """Of a reward by weight version, before and after."""
    versions = sorted(held_out, key=int)
    return held_out[versions[0]], held_out[versions[-1]]


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"
