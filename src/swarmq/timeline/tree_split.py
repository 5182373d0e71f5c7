"""Split a tree that is too large for one pass into passes that repeat as few tokens as possible.

A pass computes the path from the root to each of its nodes, so a node whose subtree is spread over several passes is repeated in
each of them. To find the optimum is a bin-packing problem and too slow. Three splits are computed in about linear time, and the
one with the fewest tokens is used:

- the cheapest of all cuts in depth-first order, with the parts packed;
- first-fit decreasing from the leaves up: subtrees below a node that do not fit one pass are packed by the tokens that they add to
  the node, so that few passes repeat the node, and free room is filled further up;
- the same, but a short node is merged into each of its children, so that short common beginnings do not leave passes half empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from swarmq.timeline.pack import Bins, make_over_budget_error, pack

SHORT_SHARE = 1 / 256
"""Share of the budget below which a node counts as short and may be repeated freely."""

TOP = -1
"""The node above all roots, without tokens. As an index it is the last element of each list."""


class Tree:
    """A tree, as lists over its nodes in depth-first order: parents before children, subtrees contiguous."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int]) -> None:
        self.lengths = [*lengths, 0]
        self.parents = parents
        self.children: list[list[int]] = [[] for _ in self.lengths]
        self.ends = [0] * len(self.lengths)
        """Node -> number of tokens from the root to its last token."""
        self.sizes = [*self.lengths]
        """Node -> number of tokens in its subtree."""
        self.after = [*range(1, len(self.lengths)), 0]
        """Node -> the first node after its subtree."""
        for node, parent in enumerate(parents):
            self.children[parent].append(node)
            self.ends[node] = self.ends[parent] + lengths[node]
        for node in range(len(parents) - 1, -1, -1):
            self.sizes[parents[node]] += self.sizes[node]
            self.after[parents[node]] = max(self.after[parents[node]], self.after[node])

    def include_ancestors(self, tops: Iterable[int]) -> set[int]:
        """Return the nodes of the subtrees of `tops` and all of their ancestors."""
        nodes: set[int] = set()
        for top in tops:
            nodes.update(range(top, self.after[top]))
            node = self.parents[top]
            while node != TOP and node not in nodes:
                nodes.add(node)
                node = self.parents[node]
        return nodes

    def size(self, nodes: Iterable[int]) -> int:
        return sum(self.lengths[node] for node in nodes)


def divide(lengths: Sequence[int], parents: Sequence[int], budget: int) -> list[set[int]]:
    """Return passes of at most `budget` tokens, each a set of nodes that contains the parents of all its nodes; every node is in
    at least one pass.

    `lengths`, `parents`: tokens and parent (-1 at a root) of every node in depth-first order. Raises TimelineError
    (`over_budget`) if a single sequence is too long.
    """
    tree = Tree(lengths, parents)
    ways = (
        cut(tree, budget),
        pack_from_leaves(tree, budget, short=0),
        pack_from_leaves(tree, budget, short=int(SHORT_SHARE * budget)),
    )
    return min(ways, key=lambda passes: sum(map(tree.size, passes)))


def pack_from_leaves(tree: Tree, budget: int, *, short: int) -> list[set[int]]:
    """Split by first-fit decreasing from the leaves up; nodes of at most `short` tokens are repeated for every child."""
    small, originals = _merge_short_nodes(tree, short)
    passes: dict[int, Bins] = {}
    """Node whose subtree is split -> its passes, each of which has the path from the root to the node, and whole subtrees below it."""
    for node in range(len(small.parents) - 1, TOP - 1, -1):
        way, children = small.ends[node], small.children[node]
        if node != TOP and way - small.lengths[node] + small.sizes[node] <= budget:
            continue
        divided = sorted((passes.pop(child) for child in children if child in passes), key=lambda each: len(each.items))
        # the child with the most passes keeps its bins, so that fewer items have to be packed again
        bins = divided.pop() if divided else Bins(budget)
        items = [(small.sizes[child], [originals[child]]) for child in children if way + small.sizes[child] <= budget]
        items += [(each.get_size(i) - way, tops) for each in divided for i, tops in enumerate(each.items)]
        for size, tops in sorted(items, key=lambda item: -item[0]):
            bins.add(tops, size, opening=way)
        passes[node] = bins
    return [tree.include_ancestors(tops) for tops in passes[TOP].items]


def _merge_short_nodes(tree: Tree, short: int) -> tuple[Tree, list[int]]:
    """Return the tree with short nodes and nodes with one child merged into their children, and, for each of its nodes, the
    original node."""
    lengths: list[int] = []
    parents: list[int] = []
    originals: list[int] = []
    kept = {TOP: (TOP, 0)}
    """Node -> (nearest kept node among the node and its ancestors, tokens from there to the node)."""
    for node, parent in enumerate(tree.parents):
        above, extra = kept[parent]
        length = extra + tree.lengths[node]
        if len(tree.children[node]) == 1 or (tree.children[node] and length <= short):
            kept[node] = above, length
        else:
            kept[node] = len(originals), 0
            lengths.append(length)
            parents.append(above)
            originals.append(node)
    return Tree(lengths, parents), originals


def cut(tree: Tree, budget: int) -> list[set[int]]:
    """Split by the cheapest cuts in depth-first order. A cut before a leaf repeats the tokens that the leaf shares with the leaf
    before it."""
    leaves = [node for node in range(len(tree.parents)) if not tree.children[node]]
    depths = [tree.ends[leaf] for leaf in leaves]
    if depths and max(depths) > budget:
        worst = int(np.argmax(depths))
        raise make_over_budget_error(worst, depths[worst], budget)
    parts = [
        tree.include_ancestors(leaves[a:b])
        for a, b in _find_cheapest_cuts(depths, _measure_shared_prefixes(tree, leaves), budget)
    ]
    return [set().union(*(parts[i] for i in members)) for members in pack([*map(tree.size, parts)], budget)]


def _measure_shared_prefixes(tree: Tree, leaves: Sequence[int]) -> list[int]:
    shared, seen = [], {TOP}
    for leaf in leaves:
        node = leaf
        while node not in seen:
            seen.add(node)
            node = tree.parents[node]
        shared.append(tree.ends[node])
    return shared


def _find_cheapest_cuts(depths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Return ranges of leaves, each within `budget`, with the least sum of `shared` at the ranges' starts.

    A range from leaf i to leaf j has depths[i] + sum of (depth - shared) over the leaves after i tokens, which falls as i grows.
    So the possible starts for j form a sliding window, and a monotone queue gives its cheapest element in linear time.
    """
    added = np.concatenate([[0], np.cumsum(np.subtract(depths, shared))]).tolist()
    price = [0] * (len(depths) + 1)
    """Cut position -> least number of repeated tokens for all leaves before it."""
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
