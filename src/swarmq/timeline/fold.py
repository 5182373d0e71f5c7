"""Fold the turns of an episode into the fewest token sequences that train every sampled token exactly once.

A row may train two turns if the later one's prompt begins with all of the earlier one (its prompt and its sampled tokens),
because both then see exactly the context in which they were sampled. A row is a chain of turns, each continuing the one before,
so the number of rows is least if as many turns as possible continue another one. Turn j can continue the turns that end on the
path to j's prompt, and each of these contains the ones before it. So it is optimal, in the number of rows and of tokens, to let
every turn continue the deepest turn that no other turn continues yet (a free turn). Two turns that sampled the same tokens after
the same prompt overlap and cannot share a row, so both are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmq.timeline.trie import ROOT, Trie
from swarmq.timeline.turns import FloatArray, IntArray, ResolvedTurn


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence to train on; every array has length T."""

    token_ids: IntArray  # [T]
    trained: NDArray[np.bool_]  # [T] True where the policy sampled the token and this timeline trains it
    logprobs: FloatArray  # [T] natural log under the weights that sampled; 0 where not trained
    versions: IntArray  # [T] weight version that sampled the token; -1 where not trained
    turns: IntArray  # [T] index of the turn that sampled the token; -1 where not trained

    def __len__(self) -> int:
        return len(self.token_ids)


def fold(turns: Sequence[ResolvedTurn]) -> list[Timeline]:
    """Return the fewest timelines of one episode, ordered by their first turn."""
    successors = _find_successors(turns)
    continued = set(successors.values())
    rows = []
    for first in range(len(turns)):
        if first in continued:
            continue
        chain = [first]
        while chain[-1] in successors:
            chain.append(successors[chain[-1]])
        rows.append(_build_row(turns, chain))
    return rows


def unfold(turns: Sequence[ResolvedTurn]) -> list[Timeline]:
    """Return every turn as its own timeline. Tests compare `fold` with it."""
    return [_build_row(turns, [i]) for i in range(len(turns))]


def _find_successors(turns: Sequence[ResolvedTurn]) -> dict[int, int]:
    """Return turn -> the turn that continues it in the same row."""
    trie = Trie()
    ends = trie.insert_turns(turns)
    free: dict[int, list[int]] = {}
    for i in reversed(range(len(turns))):
        free.setdefault(ends[i], []).append(i)
    above = list(trie.parents)
    successors: dict[int, int] = {}
    for j, turn in enumerate(turns):
        node = ends[j]
        while trie.end(node) > turn.prompt_length:
            node = trie.parents[node]
        node = _find_free_ancestor(node, free, above)
        if node != ROOT:
            successors[free[node].pop()] = j
    return successors


def _find_free_ancestor(node: int, free: dict[int, list[int]], above: list[int]) -> int:
    """Return the deepest node, from `node` up to the root, that has a free turn, or the root. Later searches skip nodes without a
    free turn that this search has passed."""
    skipped = []
    while node != ROOT and not free.get(node):
        skipped.append(node)
        node = above[node]
    for each in skipped:
        above[each] = node
    return node


def _build_row(turns: Sequence[ResolvedTurn], chain: Sequence[int]) -> Timeline:
    tokens = turns[chain[-1]].token_ids
    size = len(tokens)
    row = Timeline(
        token_ids=tokens,
        trained=np.zeros(size, np.bool_),
        logprobs=np.zeros(size, np.float32),
        versions=np.full(size, -1, np.int32),
        turns=np.full(size, -1, np.int32),
    )
    for i in chain:
        span = slice(turns[i].prompt_length, len(turns[i]))
        row.trained[span] = True
        row.logprobs[span] = turns[i].logprobs
        row.versions[span] = turns[i].versions
        row.turns[span] = i
    return row
