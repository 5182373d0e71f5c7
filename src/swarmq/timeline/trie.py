"""A radix trie over token ids, which finds the beginnings that sequences share.

Every node is a run of tokens and stands for the sequence that ends with the node. Node numbers stay valid: splitting a node gives
its upper part a new number, so a number returned by `insert` always means the end of the inserted sequence. Comparisons are
vectorised. Inserting takes one step per token that is not known to be shared; to find the first such token takes log^2(n) steps
for n nodes above it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from swarmq.timeline.turns import IntArray, ResolvedTurn

ROOT = 0


class Trie:
    """A trie with its nodes in parallel lists; the root has no tokens."""

    def __init__(self) -> None:
        self.labels: list[IntArray] = [np.empty(0, np.int32)]
        self.starts: list[int] = [0]
        """Node -> depth of its first token: the number of tokens before it."""
        self.parents: list[int] = [-1]
        self.children: list[dict[int, int]] = [{}]
        """Node -> first token -> child, in order of arrival."""
        self._trails = [Trail(-1)]
        """Node -> the trail that it belongs to."""
        self._trails[ROOT].insert(ROOT, 0)

    def __len__(self) -> int:
        return len(self.labels)

    def end(self, node: int) -> int:
        """Return the length of the sequence that ends with `node`."""
        return self.starts[node] + len(self.labels[node])

    def insert(self, tokens: IntArray, *, near: int = ROOT, known: int = 0) -> int:
        """Insert a sequence and return the node that ends where `tokens` end. `tokens[:known]` must equal the path to `near`."""
        node, depth = self._find_ancestor(near, known), known
        while True:
            rest = self.labels[node][depth - self.starts[node] :]
            if len(rest):
                same = _measure_common_prefix(rest, tokens[depth:])
                depth += same
                if same < len(rest):
                    node = self._split(node, depth - self.starts[node])
            if depth == len(tokens):
                return node
            child = self.children[node].get(int(tokens[depth]))
            if child is None:
                return self._add(node, tokens[depth:], depth)
            node = child

    def insert_turns(self, turns: Sequence[ResolvedTurn]) -> list[int]:
        """Insert an episode's turns and return the end node of each."""
        ends: list[int] = []
        for i, turn in enumerate(turns):
            if 0 <= turn.parent < i:
                ends.append(self.insert(turn.token_ids, near=ends[turn.parent], known=turn.shared))
            else:
                ends.append(self.insert(turn.token_ids))
        return ends

    def _find_ancestor(self, node: int, depth: int) -> int:
        """Return the node on the path to `node` that holds token number `depth` (from 1), or the root for 0."""
        return self._trails[node].find_node(depth)

    def _add(self, parent: int, label: IntArray, start: int) -> int:
        trail = self._trails[parent]
        return self._put(parent, label, start, trail if trail.nodes[-1] == parent else Trail(start, trail))

    def _put(self, parent: int, label: IntArray, start: int, trail: Trail) -> int:
        node = len(self.labels)
        self.labels.append(label)
        self.starts.append(start)
        self.parents.append(parent)
        self.children.append({})
        self.children[parent][int(label[0])] = node
        self._trails.append(trail)
        trail.insert(node, self.end(node))
        return node

    def _split(self, node: int, at: int) -> int:
        label = self.labels[node]
        upper = self._put(self.parents[node], label[:at], self.starts[node], self._trails[node])
        self.labels[node] = label[at:]
        self.starts[node] += at
        self.parents[node] = upper
        self.children[upper][int(label[at])] = node
        return upper


class Trail:
    """A chain of nodes, each continuing the one before, with a reference to the trail from which its first node branches off.

    Splitting a node extends a trail and changes nothing else. Jump pointers (by skew-binary numbers) lead from a trail to distant
    trails above it, and bisection finds a node within a trail.
    """

    def __init__(self, start: int, above: Trail | None = None) -> None:
        self.start = start
        """Number of tokens before the trail's first node."""
        self.nodes: list[int] = []
        self.ends: list[int] = []
        """Number of tokens up to the last token of each node, ascending."""
        self.above: Trail = above or self
        self.level: int = self.above.level + 1 if above else 0
        self.far: Trail = self.above.jump() if above else self

    def insert(self, node: int, end: int) -> None:
        at = bisect_left(self.ends, end)
        self.ends.insert(at, end)
        self.nodes.insert(at, node)

    def find_node(self, depth: int) -> int:
        """Return the node, in this trail or above, that holds token number `depth`."""
        trail = self
        while trail.start >= depth:
            trail = trail.far if trail.far.start >= depth else trail.above
        return trail.nodes[bisect_left(trail.ends, depth)]

    def jump(self) -> Trail:
        """Return the target of the jump pointer of a trail that branches off this one."""
        near, far = self.far, self.far.far
        return far if self.level - near.level == near.level - far.level else self


def _measure_common_prefix(a: IntArray, b: IntArray) -> int:
    size = min(len(a), len(b))
    if not size:
        return 0
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
