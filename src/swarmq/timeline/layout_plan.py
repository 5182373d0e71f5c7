"""Chooses how to compute a batch: as packed rows, or as trees if sharing saves more than their overhead.

Both give the same log-probabilities and the same gradient, so the choice affects only time. Time is modelled as a cost per token
(matrix products that do not depend on the context) plus a cost per visible pair of tokens (attention; fewer pairs in layers with
a window). Rows are kept unless the tree is clearly cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from swarmq.timeline.fold import Timeline, fold
from swarmq.timeline.layout import Layout, count_pairs, lay_rows
from swarmq.timeline.pack import pack
from swarmq.timeline.routing import RoutedTokens
from swarmq.timeline.tree import PrefixTree
from swarmq.timeline.turns import ResolvedTurn

Way = Literal["rows", "tree"]

TREE_MUST_SAVE = 0.03
"""Minimum share of the modelled time that a tree must save to be chosen over rows."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a forward pass in floating-point operations, or anything proportional to them."""

    token: float
    pair: float
    """Cost of one visible (query, key) pair, summed over all layers with full attention."""
    windowed: dict[int, float] = {}
    """Attention window -> cost of one visible pair, summed over all layers with that window."""
    frozen: float = 0.0
    """Part of the cost `token` that is spent on products with frozen weights."""
    tree_slowdown: float = 1.0
    """Time of a visible pair in a tree over that in packed rows, which may have a faster attention."""

    def attention(self, layouts: Iterable[Layout]) -> float:
        """Return the cost of attention over all pairs of `layouts`."""
        prices = [(None, self.pair), *self.windowed.items()]
        return sum(price * count_pairs(layout, window) for layout in layouts for window, price in prices)

    def training(self, layouts: Sequence[Layout]) -> float:
        """Return the cost of forward and backward passes. The backward pass of a product has two products, the gradients of
        both factors, or one if a factor is a frozen weight."""
        return (3 * self.token - self.frozen) * _count_tokens(layouts) + 3 * self.attention(layouts)


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The layouts of one batch and the reason for the choice."""

    layouts: list[Layout]
    way: Way
    reason: str
    """Reason for rows or trees in one line, for the log."""
    tokens: int
    """Number of tokens that these layouts compute."""
    tokens_unfolded: int
    """Number of tokens if every turn were its own row."""


class FoldedEpisodes:
    """Resolved episodes with their timelines and tree, computed once and used with several budgets. Their layouts have to be restored."""

    def __init__(self, episodes: Sequence[Sequence[ResolvedTurn]]) -> None:
        self.episodes = episodes
        self._routed: RoutedTokens | None = None
        sizes = [turn.routing.shape[1] for turns in episodes for turn in turns if turn.routing is not None]
        if sizes:
            self._routed = RoutedTokens(sizes[0])
            self.episodes = [self._routed.number(turns) for turns in episodes]

    @cached_property
    def rows(self) -> list[tuple[int, Timeline]]:
        """All timelines, each with the index of its episode."""
        return [(e, row) for e, turns in enumerate(self.episodes) for row in fold(turns)]

    @cached_property
    def tree(self) -> PrefixTree:
        return PrefixTree(self.episodes)

    def restore(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the layouts with the experts of their tokens, if these were recorded."""
        return list(layouts if self._routed is None else map(self._routed.restore, layouts))


def plan_layouts(
    folded: FoldedEpisodes,
    budget: int,
    *,
    cost: Cost,
    only: Way | None = None,
    because: str = "",
    row_pass: int | None = None,
) -> LayoutPlan:
    """Return layouts of at most `budget` tokens that train every sampled token once.

    `only`: use rows or trees whatever they cost, for the reason `because`. `row_pass`: tokens per pass of packed rows, if larger
    passes are not faster on this device; trees always fill the budget, because larger trees share more. Raises TimelineError
    (`over_budget`) for a turn longer than `budget`.
    """
    lengths = [len(turn) for turns in folded.episodes for turn in turns]
    unfolded, longest = sum(lengths), max(lengths, default=0)
    if only == "tree":
        return _make_plan(folded, folded.tree.layouts(budget), "tree", because, unfolded)
    rows = _pack_rows(folded.rows, budget if row_pass is None else min(budget, max(row_pass, longest)))
    if only == "rows":
        return _make_plan(folded, rows, "rows", because, unfolded)
    trees = folded.tree.layouts(budget)
    row_price = cost.training(rows)
    tree_price = cost.training(trees) + 3 * (cost.tree_slowdown - 1) * cost.attention(trees)
    saved = 1 - tree_price / row_price if row_price else 0.0
    reason = (
        f"the tree needs {_count_tokens(trees)} tokens where rows need {_count_tokens(rows)}, {saved:.1%} less work"
    )
    return (
        _make_plan(folded, trees, "tree", reason, unfolded)
        if saved >= TREE_MUST_SAVE
        else _make_plan(folded, rows, "rows", reason, unfolded)
    )


def plan_rows(episodes: Sequence[Sequence[ResolvedTurn]], budget: int) -> list[Layout]:
    """Return the folded timelines of all episodes as packed rows."""
    folded = FoldedEpisodes(episodes)
    return folded.restore(_pack_rows(folded.rows, budget))


def _pack_rows(rows: Sequence[tuple[int, Timeline]], budget: int) -> list[Layout]:
    return [lay_rows([rows[i] for i in members]) for members in pack([len(row) for _, row in rows], budget)]


def _count_tokens(layouts: Sequence[Layout]) -> int:
    return sum(layout.num_tokens for layout in layouts)


def _make_plan(folded: FoldedEpisodes, layouts: list[Layout], way: Way, reason: str, unfolded: int) -> LayoutPlan:
    return LayoutPlan(
        layouts=folded.restore(layouts),
        way=way,
        reason=reason,
        tokens=_count_tokens(layouts),
        tokens_unfolded=unfolded,
    )
