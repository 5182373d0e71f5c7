"""The tokens of one forward pass in depth-first order, and which sampled tokens it trains.

Packed rows and trees share this representation. A node is a run of tokens that continues its parent node; a packed row is a
node without parent. In depth-first order, the tokens that see token k (those after it in its node, and all of the nodes below)
form one range, so a single array describes visibility:

  q sees k   if and only if   k <= q < exits[k]

Positions count from the root of each tree, so every token keeps the position at which it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmq.timeline.fold import Timeline
from swarmq.timeline.images import ImagePatches
from swarmq.timeline.turns import FloatArray, IntArray, RoutingArray


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """T tokens in N nodes with S sampled tokens to train; a token sampled by two turns counts twice."""

    token_ids: IntArray  # [T] a negative one, m, is a place of images[-1 - m]
    positions: IntArray  # [T] number of tokens before it in its own sequence
    exits: IntArray  # [T] one past the last token that sees it
    node_starts: IntArray  # [N] ascending; node n is tokens node_starts[n] up to the next node's start
    node_parents: IntArray  # [N] index of the node it continues; -1 at a root

    predictors: IntArray  # [S] index into T of the token whose output predicts the sampled token
    targets: IntArray  # [S] the sampled token id
    logprobs: FloatArray  # [S] natural log under the weights that sampled it
    versions: IntArray  # [S] weight version that sampled it
    episodes: IntArray  # [S] index of its episode
    turns: IntArray  # [S] index of its turn in the episode
    offsets: IntArray  # [S] its index among the turn's sampled tokens

    images: Sequence[ImagePatches] = ()
    """Images of the batch, which this layout need not all show."""
    routing: RoutingArray | None = None  # [T, bytes] packed expert ids of each token; None: the router chooses

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return len(self.targets)

    @property
    def shows_images(self) -> bool:
        return bool((self.token_ids < 0).any())


def lay_rows(rows: Sequence[tuple[int, Timeline]]) -> Layout:
    """Lay out timelines, at least one, as packed rows that do not see each other. `rows`: (index of the episode, timeline)
    pairs."""
    lengths = [len(row) for _, row in rows]
    starts = np.cumsum([0, *lengths])
    trained = [np.flatnonzero(row.trained) for _, row in rows]
    turns = _ints([row.turns[at] for (_, row), at in zip(rows, trained, strict=True)])
    at = _ints([start + at for start, at in zip(starts, trained, strict=False)])
    return Layout(
        token_ids=_ints([row.token_ids for _, row in rows]),
        positions=_ints([np.arange(length) for length in lengths]),
        exits=np.repeat(starts[1:], lengths).astype(np.int32),
        node_starts=starts[:-1].astype(np.int32),
        node_parents=np.full(len(rows), -1, np.int32),
        predictors=at - 1,
        targets=_ints([row.token_ids[at] for (_, row), at in zip(rows, trained, strict=True)]),
        logprobs=np.concatenate([row.logprobs[at] for (_, row), at in zip(rows, trained, strict=True)]),
        versions=_ints([row.versions[at] for (_, row), at in zip(rows, trained, strict=True)]),
        episodes=_ints([np.full(len(at), episode) for (episode, _), at in zip(rows, trained, strict=True)]),
        turns=turns,
        offsets=_find_offsets(at, turns),
    )


def pad_rows(layout: Layout, count: int) -> Layout:
    """Return the layout with padding rows of one untrained token, up to `count` rows."""
    extra = np.arange(layout.num_tokens, layout.num_tokens + count - len(layout.node_starts), dtype=np.int32)
    return msgspec.structs.replace(
        layout,
        token_ids=np.concatenate([layout.token_ids, 0 * extra]),
        positions=np.concatenate([layout.positions, 0 * extra]),
        exits=np.concatenate([layout.exits, extra + 1]),
        node_starts=np.concatenate([layout.node_starts, extra]),
        node_parents=np.concatenate([layout.node_parents, 0 * extra - 1]),
        routing=None if layout.routing is None else np.pad(layout.routing, ((0, len(extra)), (0, 0))),
    )


def list_node_spans(layout: Layout) -> list[tuple[int, int]]:
    """Return the start and end of every node as indices into the tokens."""
    edges = [*layout.node_starts.tolist(), layout.num_tokens]
    return list(pairwise(edges))


def count_pairs(layout: Layout, window: int | None = None) -> int:
    """Return the number of (query, key) pairs of attention: over all ancestors, or only over keys less than `window` tokens
    back."""
    seen = layout.positions if window is None else np.minimum(layout.positions, window - 1)
    return int(seen.sum(dtype=np.int64)) + layout.num_tokens


def build_mask(layout: Layout, window: int | None = None) -> NDArray[np.bool_]:
    """Return the attention mask [T, T], True where a query (row) sees a key (column). This definition of visibility is for tests
    and small cases."""
    index = np.arange(layout.num_tokens)
    mask = (index[None, :] <= index[:, None]) & (index[:, None] < layout.exits[None, :])
    if window is not None:
        mask &= layout.positions[:, None] - layout.positions[None, :] < window
    return mask


def map_blocks(
    exits: IntArray, positions: IntArray, block: int, window: int | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two masks [T/block, T/block] of blocks of `block` queries x `block` keys: partly visible blocks, and wholly visible
    ones.

    The length must be a multiple of `block`. A block with a visible pair is always in one of the masks, and a block with an
    invisible pair is never in the second. Takes (T / block)^2 operations instead of T^2.
    """
    num = len(exits) // block
    exits, positions = exits.reshape(num, block), positions.reshape(num, block)
    first = np.arange(num) * block
    earlier = first[None, :] < first[:, None]
    some = np.eye(num, dtype=np.bool_) | (earlier & (exits.max(1)[None, :] > first[:, None]))
    whole = earlier & (exits.min(1)[None, :] >= first[:, None] + block)
    if window is not None:
        low, high = positions.min(1), positions.max(1)
        some &= low[:, None] - high[None, :] < window
        whole &= high[:, None] - low[None, :] < window
    return some & ~whole, whole


def _find_offsets(at: IntArray, turns: IntArray) -> IntArray:
    """Return the index of each sampled token within its turn. A turn's sampled tokens are consecutive, and sampled tokens of
    two rows are never adjacent."""
    begins = np.ones(len(at), np.bool_)
    begins[1:] = (np.diff(at) != 1) | (np.diff(turns) != 0)
    first = np.flatnonzero(begins)
    return (np.arange(len(at)) - np.repeat(first, np.diff([*first, len(at)]))).astype(np.int32)


def _ints(parts: Sequence[NDArray[Any]]) -> IntArray:
    joined: IntArray = np.concatenate(parts).astype(np.int32)
    return joined
