"""A prefix tree across the turns of an episode and across episodes: shared beginnings are computed once.

Where timelines repeat what forks share, the tree keeps one node per shared run of tokens. A tree too large for one
pass is cut into parts. Every part repeats the tokens on the way from the root to its own, so cutting before a leaf
costs as many tokens as that leaf shares with the leaf before it; `split` finds the cheapest cuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from swarmq.timeline.layout import Layout
from swarmq.timeline.pack import over_budget, pack
from swarmq.timeline.trie import ROOT, Trie
from swarmq.timeline.turns import IntArray, ResolvedTurn


class PrefixTree:
    """Episodes, each a list of turns, over one trie."""

    def __init__(self, episodes: Sequence[Sequence[ResolvedTurn]]) -> None:
        self.episodes = episodes
        self.trie = Trie()
        self.ends = [self.trie.plant(turns) for turns in episodes]
        """Episode -> turn -> the node that ends where the turn ends."""
        self.order = _depth_first(self.trie)
        """All nodes but the root, parents before children, subtrees together."""
        self._rank = {node: rank for rank, node in enumerate(self.order)}

    @property
    def num_tokens(self) -> int:
        """What one pass without any budget computes."""
        return self._size(self.order)

    def layouts(self, budget: int) -> list[Layout]:
        """Passes of at most `budget` tokens, together training every turn once, each turn wholly in one pass.

        Raises TimelineError (`over_budget`) where a single sequence is too long.
        """
        parts = self.split(budget)
        seen: set[int] = set()
        layouts = []
        for members in pack([self._size(part) for part in parts], budget):
            nodes = {node for part in members for node in parts[part]}
            layouts.append(self.lay(nodes, training=nodes - seen))
            seen |= nodes
        return layouts

    def split(self, budget: int) -> list[list[int]]:
        """The parts with the fewest tokens in sum, each of at most `budget`, among cuts in depth-first order.

        A part is a list of nodes that contains the parents of its members, in depth-first order.
        """
        leaves = [node for node in self.order if not self.trie.children[node]]
        depths = [self.trie.end(leaf) for leaf in leaves]
        if depths and max(depths) > budget:
            worst = int(np.argmax(depths))
            raise over_budget(worst, depths[worst], budget)
        cuts = _cheapest_cuts(depths, self._shared_with_previous(leaves), budget)
        return [self._with_ancestors(leaves[start:end]) for start, end in cuts]

    def lay(self, nodes: Iterable[int], *, training: set[int]) -> Layout:
        """One pass over `nodes`, closed under parents, that trains the turns that end in the nodes `training`."""
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
        who = [(e, t) for e, ends_T in enumerate(self.ends) for t, end in enumerate(ends_T) if end in training]
        turns = [self.episodes[e][t] for e, t in who]
        sampled = [self._sampled_at(self.ends[e][t], turn, shift) for (e, t), turn in zip(who, turns, strict=True)]
        sizes = [len(at) for at in sampled]
        at = np.concatenate(sampled)
        return Layout(
            token_ids=token_ids,
            positions=np.arange(edges[-1], dtype=np.int32) + np.repeat(depths - starts, lengths),
            exits=np.repeat(_subtree_ends(parents, ends), lengths),
            node_starts=starts,
            node_parents=parents,
            predictors=previous[at],
            targets=token_ids[at],
            logprobs=np.concatenate([turn.logprobs for turn in turns]),
            versions=np.concatenate([turn.versions for turn in turns]),
            episodes=np.repeat(np.array([e for e, _ in who], np.int32), sizes),
            turns=np.repeat(np.array([t for _, t in who], np.int32), sizes),
            offsets=np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        )

    def _sampled_at(self, end: int, turn: ResolvedTurn, shift: dict[int, int]) -> IntArray:
        """Where a turn's sampled tokens lie: depth plus the shift of the node that holds it."""
        pieces = []
        node = end
        while self.trie.end(node) > turn.prompt_length:
            first = max(self.trie.starts[node], turn.prompt_length)
            pieces.append(np.arange(first, self.trie.end(node), dtype=np.int32) + np.int32(shift[node]))
            node = self.trie.parents[node]
        return np.concatenate(pieces[::-1])

    def _with_ancestors(self, leaves: Sequence[int]) -> list[int]:
        nodes: set[int] = set()
        for leaf in leaves:
            node = leaf
            while node != ROOT and node not in nodes:
                nodes.add(node)
                node = self.trie.parents[node]
        return sorted(nodes, key=self._rank.__getitem__)

    def _shared_with_previous(self, leaves: Sequence[int]) -> list[int]:
        """Leaf -> how many tokens it shares with the leaf before it in depth-first order."""
        shared, seen = [], {ROOT}
        for leaf in leaves:
            node = leaf
            while node not in seen:
                seen.add(node)
                node = self.trie.parents[node]
            shared.append(self.trie.end(node))
        return shared

    def _size(self, nodes: Iterable[int]) -> int:
        return sum(len(self.trie.labels[node]) for node in nodes)


def _depth_first(trie: Trie) -> list[int]:
    order, stack = [], [ROOT]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(trie.children[node].values()))
    return order[1:]


def _cheapest_cuts(depths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Ranges of leaves, each within `budget`, for which the sum of `shared` at the ranges' starts is least.

    A range from i to j has depths[i] + sum of (depth - shared) of the leaves after i tokens, less the later it starts;
    so the starts possible for j are a window, and the cheapest of them the front of a monotone queue: linear time.
    """
    added = np.concatenate([[0], np.cumsum(np.subtract(depths, shared))]).tolist()
    price = [0] * (len(depths) + 1)
    """Least sum of repeats for the leaves before j."""
    start = [0] * (len(depths) + 1)
    window: deque[int] = deque()
    for j in range(len(depths)):
        cost = price[j] + shared[j]
        while window and price[window[-1]] + shared[window[-1]] > cost:
            window.pop()
        window.append(j)
        while shared[window[0]] + added[j + 1] - added[window[0]] > budget:
            window.popleft()
        start[j + 1] = window[0]
        price[j + 1] = price[window[0]] + shared[window[0]]
    cuts, end = [], len(depths)
    while end:
        cuts.append((start[end], end))
        end = start[end]
    return cuts[::-1]


def _subtree_ends(parents: IntArray, ends: IntArray) -> IntArray:
    """Node -> one past the last token of its subtree, for nodes in depth-first order."""
    last = ends.tolist()
    for node in range(len(last) - 1, -1, -1):
        if parents[node] >= 0:
            last[parents[node]] = max(last[parents[node]], last[node])
    return np.array(last, np.int32)
