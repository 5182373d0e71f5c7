"""Choose how to compute a batch: packed rows, or trees where sharing pays for them.

Both give the same log-probabilities and the same gradient, so the choice is about time alone. Time is modelled as a
price per token (all matrix products whose size does not depend on the context) and one per visible pair of tokens
(attention, less in layers with a window). Rows are kept unless the tree is clearly cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from swarmq.timeline.fold import Timeline, fold
from swarmq.timeline.layout import Layout, lay_rows, num_pairs
from swarmq.timeline.pack import pack
from swarmq.timeline.tree import PrefixTree
from swarmq.timeline.turns import ResolvedTurn

Way = Literal["rows", "tree"]

TREE_MUST_SAVE = 0.03
"""Share of the modelled time that a tree must save before it replaces rows."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Floating-point operations of a forward pass, or anything proportional to them."""

    token: float
    pair: float
    """In layers that see everything."""
    windowed: dict[int, float] = {}
    """Window -> the price of a pair in layers that see so many tokens."""
    frozen: float = 0.0
    """The part of `token` that is products with weights which are not trained."""

    def attention(self, layouts: Iterable[Layout]) -> float:
        """What all pairs of `layouts` cost."""
        prices = [(None, self.pair), *self.windowed.items()]
        return sum(price * num_pairs(layout, window) for layout in layouts for window, price in prices)

    def training(self, layouts: Sequence[Layout]) -> float:
        """Of forward and backward: a product's backward pass is two of its size, the gradients of both factors, or one where a factor
        is a weight that is not trained."""
        return (3 * self.token - self.frozen) * _tokens(layouts) + 3 * self.attention(layouts)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The passes of one batch and why they are as they are."""

    layouts: list[Layout]
    way: Way
    reason: str
    """One line for the log."""
    tokens: int
    """Computed by these passes."""
    tokens_unfolded: int
    """What every turn as its own row would have computed."""


class Folded:
    """Resolved episodes and what they are laid out from, found once however many budgets are planned for."""

    def __init__(self, episodes: Sequence[Sequence[ResolvedTurn]]) -> None:
        self.episodes = episodes

    @cached_property
    def rows(self) -> list[tuple[int, Timeline]]:
        """Each with the index of its episode."""
        return [(e, row) for e, turns in enumerate(self.episodes) for row in fold(turns)]

    @cached_property
    def tree(self) -> PrefixTree:
        return PrefixTree(self.episodes)


def plan_layouts(
    folded: Folded,
    budget: int,
    *,
    cost: Cost,
    only: Way | None = None,
    because: str = "",
    row_pass: int | None = None,
) -> Plan:
    """Passes of at most `budget` tokens that train every sampled token once.

    `only` leaves no choice, for the reason `because`. Packed rows go into passes of about `row_pass` tokens where
    given: larger ones are no quicker for every processor, while a tree shares more the more it holds. Raises
    TimelineError (`over_budget`) for a turn longer than `budget`.
    """
    lengths = [len(turn) for turns in folded.episodes for turn in turns]
    unfolded, longest = sum(lengths), max(lengths, default=0)
    if only == "tree":
        return _plan(folded.tree.layouts(budget), "tree", because, unfolded)
    rows = _packed(folded.rows, budget if row_pass is None else min(budget, max(row_pass, longest)))
    if only == "rows":
        return _plan(rows, "rows", because, unfolded)
    trees = folded.tree.layouts(budget)
    row_price, tree_price = (cost.training(layouts) for layouts in (rows, trees))
    saved = 1 - tree_price / row_price if row_price else 0.0
    said = f"the tree needs {_tokens(trees)} tokens where rows need {_tokens(rows)}, {saved:.1%} less work"
    return _plan(trees, "tree", said, unfolded) if saved >= TREE_MUST_SAVE else _plan(rows, "rows", said, unfolded)


def row_layouts(episodes: Sequence[Sequence[ResolvedTurn]], budget: int) -> list[Layout]:
    """Folded timelines of all episodes, packed."""
    return _packed(Folded(episodes).rows, budget)


def _packed(rows: Sequence[tuple[int, Timeline]], budget: int) -> list[Layout]:
    return [lay_rows([rows[i] for i in members]) for members in pack([len(row) for _, row in rows], budget)]


def _tokens(layouts: Sequence[Layout]) -> int:
    return sum(layout.num_tokens for layout in layouts)


def _plan(layouts: list[Layout], way: Way, reason: str, unfolded: int) -> Plan:
    return Plan(layouts=layouts, way=way, reason=reason, tokens=_tokens(layouts), tokens_unfolded=unfolded)
