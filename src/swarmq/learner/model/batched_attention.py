"""Attention over a layout without a compiler: nodes of similar size in batches of plain scaled-dot-product attention.

Each node attends over the path from its root. Only attention pads: queries and keys are gathered into [B, L] and the outputs
gathered back, so no other layer computes padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it

from swarmq.timeline.turns import IntArray

Run = tuple[int, int]

PIECE_QUERIES = 512
"""Number of queries per piece of a node that needs a mask; without pieces, the mask would grow with the square of the length."""
MAX_PADDING_RATIO = 1.5
"""Largest ratio of padded to real (query, key) pairs in a batch."""
MIN_BATCH_PAIRS = 1 << 16
"""Number of (query, key) pairs below which starting the kernel takes longer than computing the batch."""


class AttentionForm(NamedTuple):
    """Options of a layer's attention."""

    scale: float
    window: int | None
    """Number of tokens that a query sees, counted back from itself; None: all of its ancestors."""
    softcap: float | None
    sinks: Tensor | None  # [heads]


class AttentionBatch(NamedTuple):
    """Batch of B nodes or pieces of nodes. Keys are indices into the T tokens of the layout; queries are indices into the tokens
    with queries."""

    queries: Tensor  # [B, Q]
    keys: Tensor  # [B, K]
    mask: Tensor | None  # [B, 1, Q, K] True where a query sees a key; None: causal, with Q = K


class AttentionBatches(NamedTuple):
    """Batches of attention for a whole layout."""

    batches: list[AttentionBatch]
    answers: Tensor  # [L] position of the output of each token with a query, among all queries of all batches


class QueryPiece(NamedTuple):
    """A run of queries and the tokens that they may see."""

    start: int
    end: int
    keys: list[Run]
    num_keys: int
    """Number of visible tokens; the last of them are the queries themselves."""

    @property
    def num_queries(self) -> int:
        return self.end - self.start


def attend_in_batches(
    query: Tensor, key: Tensor, value: Tensor, layout: AttentionBatches, form: AttentionForm
) -> Tensor:
    """Compute attention [1, heads, L, D] from queries of the same shape and from keys and values [1, key heads, T, D]."""
    repeat = query.shape[1] // key.shape[1]
    answers = []
    for batch in layout.batches:
        q = _gather(query[0], batch.queries)
        k, v = (_gather(x[0], batch.keys) for x in (key, value))
        if repeat > 1:
            k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        if form.softcap is None and form.sinks is None:
            answer = F.scaled_dot_product_attention(
                q, k, v, attn_mask=batch.mask, is_causal=batch.mask is None, scale=form.scale
            )
        else:
            answer = _attend_explicitly(q, k, v, batch.mask, form)
        answers.append(answer.transpose(1, 2).flatten(0, 1))
    return _gather(torch.cat(answers).transpose(0, 1), layout.answers[None])


def build_batches(
    nodes: Sequence[Run],
    paths: Sequence[Sequence[Run]],
    window: int | None,
    device: torch.device,
    tokens: IntArray | None = None,
    *,
    piece_queries: int = PIECE_QUERIES,
    min_batch_pairs: int = MIN_BATCH_PAIRS,
) -> AttentionBatches:
    """Build the batches of a layout. `paths`: the runs of tokens from the root to the end of each node. `tokens` [L],
    ascending: the tokens with queries, by default all. `piece_queries`: number of queries per piece of a node that needs a mask.
    `min_batch_pairs`: number of (query, key) pairs up to which a batch may be padded freely."""
    parts = zip(nodes, paths, strict=True) if tokens is None else _select_parts(tokens, nodes, paths)
    pieces = [piece for part, path in parts for piece in _cut_node(part, path, window, piece_queries)]
    pieces.sort(key=lambda piece: (piece.num_keys, piece.num_queries), reverse=True)
    batches = []
    answers = np.empty(max(end for _, end in nodes), np.int64)
    done = 0
    for members in _group_by_size(pieces, min_batch_pairs):
        batches.append(_build_batch(members, window, device))
        width = batches[-1].queries.shape[1]
        for piece in members:
            answers[piece.start : piece.end] = done + np.arange(piece.num_queries)
            done += width
    if tokens is not None:
        places = torch.from_numpy(np.searchsorted(tokens, np.arange(len(answers)))).to(device)
        batches = [batch._replace(queries=places[batch.queries]) for batch in batches]
        answers = answers[tokens]
    return AttentionBatches(batches, torch.from_numpy(answers).to(device))


def _gather(tokens: Tensor, index: Tensor) -> Tensor:
    """Gather [heads, T, D] by [B, L] into [B, heads, L, D]. Uses an embedding, because its gradient is fast and deterministic."""
    heads, _, size = tokens.shape
    found = F.embedding(index, tokens.transpose(0, 1).flatten(1))
    return found.view(*index.shape, heads, size).transpose(1, 2)


def _attend_explicitly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: AttentionForm) -> Tensor:
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float() * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if form.sinks is not None:
        sink = form.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _select_parts(
    tokens: IntArray, nodes: Sequence[Run], paths: Sequence[Sequence[Run]]
) -> Iterator[tuple[Run, Sequence[Run]]]:
    """Return the parts of nodes that `tokens` cover, each with the path from the root to the part's end."""
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1)]
    for (start, end), path in zip(nodes, paths, strict=True):
        length = sum(b - a for a, b in path)
        for low, high in runs:
            first, last = max(start, low), min(end, high)
            if first < last:
                yield (first, last), _slice_path(path, 0, length - (end - last))


def _cut_node(node: Run, path: Sequence[Run], window: int | None, piece_queries: int) -> Iterator[QueryPiece]:
    start, end = node
    length = sum(b - a for a, b in path)
    depth = length - (end - start)
    step = end - start if depth == 0 and window is None else piece_queries
    for first in range(start, end, step):
        last = min(first + step, end)
        unseen = 0 if window is None else max(0, depth + first - start - window + 1)
        keys = _slice_path(path, unseen, depth + last - start)
        yield QueryPiece(first, last, keys, depth + last - start - unseen)


def _slice_path(path: Sequence[Run], first: int, last: int) -> list[Run]:
    """Return the runs of the path's tokens from `first` up to, but without, `last`."""
    kept, at = [], 0
    for start, end in path:
        low, high = max(first - at, 0), min(last - at, end - start)
        if low < high:
            kept.append((start + low, start + high))
        at += end - start
    return kept


def _group_by_size(pieces: Sequence[QueryPiece], min_batch_pairs: int) -> Iterator[list[QueryPiece]]:
    """Yield groups of pieces of similar size that can be padded to one size without much waste."""
    members: list[QueryPiece] = []
    real = widest = 0
    for piece in pieces:
        pairs = piece.num_queries * piece.num_keys
        width = max(widest, piece.num_queries)
        padded = (len(members) + 1) * width * (members[0] if members else piece).num_keys
        if members and padded > max(min_batch_pairs, MAX_PADDING_RATIO * (real + pairs)):
            yield members
            members, real, width = [], 0, piece.num_queries
        members.append(piece)
        real, widest = real + pairs, width
    yield members


def _build_batch(pieces: Sequence[QueryPiece], window: int | None, device: torch.device) -> AttentionBatch:
    """Build one batch. Missing queries repeat the first one and see the first key; missing keys are seen by no other query."""
    num_queries, num_keys = (max(sizes) for sizes in zip(*((p.num_queries, p.num_keys) for p in pieces), strict=True))
    queries, keys = (np.empty((len(pieces), size), np.int64) for size in (num_queries, num_keys))
    for i, piece in enumerate(pieces):
        queries[i] = piece.start
        queries[i, : piece.num_queries] = np.arange(piece.start, piece.end)
        keys[i] = piece.start
        keys[i, : piece.num_keys] = np.concatenate([np.arange(a, b) for a, b in piece.keys])
    if window is None and all(piece.num_queries == piece.num_keys for piece in pieces):
        mask = None
    else:
        own = np.array([[piece.num_keys - piece.num_queries] for piece in pieces])
        behind = (own + np.arange(num_queries))[:, :, None] - np.arange(num_keys)[None, None, :]
        seen = (behind >= 0) & (behind < (window or num_keys))
        real = np.arange(num_queries)[None, :] < [[piece.num_queries] for piece in pieces]
        seen = np.where(real[:, :, None], seen, np.arange(num_keys) == 0)
        mask = torch.from_numpy(seen[:, None]).to(device)
    return AttentionBatch(torch.from_numpy(queries).to(device), torch.from_numpy(keys).to(device), mask)
