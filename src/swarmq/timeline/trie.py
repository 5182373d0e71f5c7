"""A radix trie over token ids: which sequences share which beginnings.

Every node is a run of tokens and stands for the sequence that ends with it. Node numbers stay valid: splitting a node
gives its upper part a new number, so a number returned by `insert` always means the end of what was inserted.
Comparisons are vectorised; inserting costs as much as the tokens that are not known to be shared already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmq.timeline.turns import IntArray, ResolvedTurn

ROOT = 0


class Trie:
    """Nodes in parallel lists; the root has no tokens."""

    def __init__(self) -> None:
        self.labels: list[IntArray] = [np.empty(0, np.int32)]
        self.starts: list[int] = [0]
        """Depth of a node's first token: how many tokens precede it."""
        self.parents: list[int] = [-1]
        self.children: list[dict[int, int]] = [{}]
        """First token -> child, in order of arrival."""

    def __len__(self) -> int:
        return len(self.labels)

    def end(self, node: int) -> int:
        """Length of the sequence that ends with `node`."""
        return self.starts[node] + len(self.labels[node])

    def insert(self, tokens: IntArray, *, near: int = ROOT, known: int = 0) -> int:
        """The node that ends where `tokens` ends; `tokens[:known]` must equal the path to `near`."""
        node, depth = self._above(near, known), known
        while True:
            rest = self.labels[node][depth - self.starts[node] :]
            if len(rest):
                same = _common_prefix(rest, tokens[depth:])
                depth += same
                if same < len(rest):
                    node = self._split(node, depth - self.starts[node])
            if depth == len(tokens):
                return node
            child = self.children[node].get(int(tokens[depth]))
            if child is None:
                return self._add(node, tokens[depth:], depth)
            node = child

    def plant(self, turns: Sequence[ResolvedTurn]) -> list[int]:
        """Insert an episode's turns; the end node of each."""
        ends: list[int] = []
        for i, turn in enumerate(turns):
            if 0 <= turn.parent < i:
                ends.append(self.insert(turn.token_ids, near=ends[turn.parent], known=turn.shared))
            else:
                ends.append(self.insert(turn.token_ids))
        return ends

    def _above(self, node: int, depth: int) -> int:
        """The node on the path to `node` that holds token number `depth` (counting from 1); the root for 0."""
        while node != ROOT and self.starts[node] >= depth:
            node = self.parents[node]
        return node

    def _add(self, parent: int, label: IntArray, start: int) -> int:
        node = len(self.labels)
        self.labels.append(label)
        self.starts.append(start)
        self.parents.append(parent)
        self.children.append({})
        self.children[parent][int(label[0])] = node
        return node

    def _split(self, node: int, at: int) -> int:
        label = self.labels[node]
        upper = self._add(self.parents[node], label[:at], self.starts[node])
        self.labels[node] = label[at:]
        self.starts[node] += at
        self.parents[node] = upper
        self.children[upper][int(label[at])] = node
        return upper


def _common_prefix(a: IntArray, b: IntArray) -> int:
    size = min(len(a), len(b))
    if not size:
        return 0
    differs = a[:size] != b[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
