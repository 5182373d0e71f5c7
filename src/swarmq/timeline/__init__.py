"""Exact token sequences from turns, each token computed once. Pure: numpy in, numpy out.

    Turn --resolve--> ResolvedTurn --fold--> Timeline --pack, lay_rows--> Layout   (packed rows)
                                   `--PrefixTree.layouts------------------^        (trees)

`plan_layouts` goes from resolved episodes (`FoldedEpisodes`) to layouts and chooses between the two.
"""

from swarmq.timeline.fold import Timeline, fold, unfold
from swarmq.timeline.images import ImagePatches, ImageTable
from swarmq.timeline.layout import Layout, lay_rows, pad_rows
from swarmq.timeline.layout_plan import Cost, FoldedEpisodes, LayoutPlan, plan_layouts, plan_rows
from swarmq.timeline.pack import pack
from swarmq.timeline.tree import PrefixTree
from swarmq.timeline.turns import ResolvedTurn, make_resolved_turn, resolve

__all__ = [
    "Cost",
    "FoldedEpisodes",
    "ImagePatches",
    "ImageTable",
    "Layout",
    "LayoutPlan",
    "PrefixTree",
    "ResolvedTurn",
    "Timeline",
    "fold",
    "lay_rows",
    "make_resolved_turn",
    "pack",
    "pad_rows",
    "plan_layouts",
    "plan_rows",
    "resolve",
    "unfold",
]
