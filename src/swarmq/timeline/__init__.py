"""Exact token sequences from turns, each token computed once. Pure: numpy in, numpy out.

    Turn --resolve--> ResolvedTurn --fold--> Timeline --pack, lay_rows--> Layout   (packed rows)
                                   `--PrefixTree.layouts------------------^        (trees)

`plan_layouts` goes from resolved episodes (`Folded`) to layouts and chooses between the two.
"""

from swarmq.timeline.fold import Timeline, fold, unfold
from swarmq.timeline.layout import Layout, lay_rows, with_rows
from swarmq.timeline.layout_plan import Cost, Folded, Plan, plan_layouts, row_layouts
from swarmq.timeline.pack import pack
from swarmq.timeline.tree import PrefixTree
from swarmq.timeline.turns import ResolvedTurn, resolve, standalone

__all__ = [
    "Cost",
    "Folded",
    "Layout",
    "Plan",
    "PrefixTree",
    "ResolvedTurn",
    "Timeline",
    "fold",
    "lay_rows",
    "pack",
    "plan_layouts",
    "resolve",
    "row_layouts",
    "standalone",
    "unfold",
    "with_rows",
]
