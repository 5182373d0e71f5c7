"""Drafts continue what any conversation of the engine said; `draft_search_gpu.py` does the same on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from swarmq.weights.format.conventions import LONGEST_MATCH, SHORTEST_MATCH

if TYPE_CHECKING:
    import numpy.typing as npt


def find_continuation(
    texts: npt.NDArray[np.int32],  # [texts, tokens]
    lengths: npt.NDArray[np.int32],  # [texts]
    row: int,
    count: int,
) -> list[int]:
    """Return at most `count` tokens that followed the longest match of the newest tokens of a text; none if it is too short.

    Of matches of the same length, one in the same text goes first, then the last text, then the last place.
    """
    newest = texts[row, max(lengths[row] - LONGEST_MATCH, 0) : lengths[row]][::-1]
    if len(newest) < SHORTEST_MATCH:
        return []
    searched = texts[:, : lengths.max()]
    rows, ends = np.nonzero((searched[:, 1:] == newest[0]) & (searched[:, :-1] == newest[1]))
    ends += 1
    followed = ends < lengths[rows] - 1
    rows, ends = rows[followed], ends[followed]
    if not len(rows):
        return []
    matches, matched = np.ones(len(rows), dtype=bool), np.full(len(rows), SHORTEST_MATCH)
    for back in range(SHORTEST_MATCH, len(newest)):
        matches &= (ends >= back) & (texts[rows, ends - back] == newest[back])
        matched += matches
    best = np.lexsort((ends, rows, rows == row, matched))[-1]
    source, start = rows[best], ends[best] + 1
    room = texts.shape[1] - lengths[row]
    drafted: list[int] = texts[source, start : min(start + min(count, room), lengths[source])].tolist()
    return drafted
