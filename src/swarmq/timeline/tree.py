"""A prefix tree over the turns of one or several episodes, with which shared beginnings are computed once.

After a fork, timelines repeat their common beginning; the tree has one node for each shared run of tokens. A tree too large for
one pass is split (swarmq.timeline.tree_split): every pass repeats the tokens from the root to its own nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from swarmq.timeline.layout import Layout
from swarmq.timeline.tree_split import divide
from swarmq.timeline.trie import ROOT, Trie
from swarmq.timeline.turns import IntArray, ResolvedTurn


class PrefixTree:
    """Turns of one or several episodes in one trie, laid out for forward passes."""

    def __init__(self, episodes: Sequence[Sequence[ResolvedTurn]]) -> None:
        self.episodes = episodes
        self.trie = Trie()
        self.ends = [self.trie.insert_turns(turns) for turns in episodes]
        """Episode -> turn -> the node that ends where the turn ends."""
        self.order = _order_depth_first(self.trie)
        """All nodes but the root, parents before children, subtrees contiguous."""
        self._rank = {node: rank for rank, node in enumerate(self.order)}
        self._ending: dict[int, list[tuple[int, int]]] = {}
        """Node -> turns that end there, as (episode, turn)."""
        for e, ends in enumerate(self.ends):
            for t, end in enumerate(ends):
                self._ending.setdefault(end, []).append((e, t))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a single pass over the whole tree."""
        return sum(len(self.trie.labels[node]) for node in self.order)

    def layouts(self, budget: int) -> list[Layout]:
        """Return layouts of at most `budget` tokens that together train every turn once, each turn wholly in one layout.

        Raises TimelineError (`over_budget`) if a single sequence is too long.
        """
        lengths = [len(self.trie.labels[node]) for node in self.order]
        parents = [self._rank.get(self.trie.parents[node], -1) for node in self.order]
        seen: set[int] = set()
        layouts = []
        for members in divide(lengths, parents, budget):
            nodes = {self.order[member] for member in members}
            layouts.append(self.lay(nodes, training=nodes - seen))
            seen |= nodes
        return layouts

    def lay(self, nodes: Iterable[int], *, training: set[int]) -> Layout:
        """Lay out `nodes`, a set that contains the parents of all its nodes, and train the turns that end in the nodes
        `training`."""
        trie, order = self.trie, sorted(nodes, key=self._rank.__getitem__)
        place = {node: i for i, node in enumerate(order)}
        lengths = np.array([len(trie.labels[node]) for node in order], np.int32)
        depths = np.array([trie.starts[node] for node in order], np.int32)
        parents = np.array([place.get(trie.parents[node], -1) for node in order], np.int32)
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        starts, ends = edges[:-1], edges[1:]

        previous = np.arange(-1, edges[-1] - 1, dtype=np.int32)
        previous[starts] = np.where(parents >= 0, ends[parents] - 1, -1)
        token_ids = np.concatenate([trie.labels[node] for node in order])
        shift = dict(zip(order, (starts - depths).tolist(), strict=True))
        turn_ids = sorted(turn for node in training for turn in self._ending.get(node, ()))
        turns = [self.episodes[e][t] for e, t in turn_ids]
        sampled = [
            self._locate_sampled(self.ends[e][t], turn, shift) for (e, t), turn in zip(turn_ids, turns, strict=True)
        ]
        sizes = [len(at) for at in sampled]
        at = np.concatenate(sampled)
        return Layout(
            token_ids=token_ids,
            positions=np.arange(edges[-1], dtype=np.int32) + np.repeat(depths - starts, lengths),
            exits=np.repeat(_find_subtree_ends(parents, ends), lengths),
            node_starts=starts,
            node_parents=parents,
            predictors=previous[at],
            targets=token_ids[at],
            logprobs=np.concatenate([turn.logprobs for turn in turns]),
            versions=np.concatenate([turn.versions for turn in turns]),
            episodes=np.repeat(np.array([e for e, _ in turn_ids], np.int32), sizes),
            turns=np.repeat(np.array([t for _, t in turn_ids], np.int32), sizes),
            offsets=np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        )

    def _locate_sampled(self, end: int, turn: ResolvedTurn, shift: dict[int, int]) -> IntArray:
        """Return the positions of a turn's sampled tokens in the layout: a token's depth plus the shift of its node."""
        pieces = []
        node = end
        while self.trie.end(node) > turn.prompt_length:
            first = max(self.trie.starts[node], turn.prompt_length)
            pieces.append(np.arange(first, self.trie.end(node), dtype=np.int32) + np.int32(shift[node]))
            node = self.trie.parents[node]
        return np.concatenate(pieces[::-1])


def _order_depth_first(trie: Trie) -> list[int]:
    order, stack = [], [ROOT]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(trie.children[node].values()))
    return order[1:]


def _find_subtree_ends(parents: IntArray, ends: IntArray) -> IntArray:
    """Return node -> index after the last token of its subtree, for nodes in depth-first order."""
    last = ends.tolist()
    for node in range(len(last) - 1, -1, -1):
        if parents[node] >= 0:
            last[parents[node]] = max(last[parents[node]], last[node])
    return np.array(last, np.int32)
