"""Attention over a layout: every token sees its own ancestors and nothing else (swarmq.timeline.layout).

On CUDA this is compiled FlexAttention with block masks computed from the layout and not from T x T pairs. Lengths are padded to a
few values, so that few kernels are compiled; only attention computes padding. Packed rows are computed by FlashAttention where it
passed its trial (flash_attention.py). Elsewhere, nodes are computed in batches by plain scaled-dot-product attention
(batched_attention). If ranks share a pass (context_parallel.py), a rank has the queries of its own tokens, and the keys and
values of all tokens.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from swarmq.errors import LearnerError
from swarmq.learner.model.activation_checkpointing import KeptActivations
from swarmq.learner.model.batched_attention import (
    AttentionBatches,
    AttentionForm,
    Run,
    attend_in_batches,
    build_batches,
)
from swarmq.learner.model.context_parallel import ALONE, ContextGroup, ContextPart
from swarmq.learner.model.flash_attention import MAX_ROWS, Kind, Rows, attend_in_rows, is_allowed
from swarmq.timeline.layout import Layout, list_node_spans, map_blocks
from swarmq.timeline.turns import IntArray

NAME = "swarmq_layout"
"""Name of this attention among the attention implementations of transformers."""

BLOCK = 128
LENGTHS = [1024, 4096, 8192, *(step * 2**n for n in range(7) for step in (16384, 24576))]
"""Lengths to which layouts are padded, few enough that compilations, which take seconds, stay rare. Padding costs little: a
padded block is one of the many tiles of a real block, and its share of the copies."""


def list_padded_lengths(tokens: int) -> list[int]:
    """Return all lengths to which layouts of up to `tokens` tokens are padded."""
    return LENGTHS[: bisect_left(LENGTHS, tokens) + 1]


class NoLayoutError(LearnerError):
    """Attention was called without a layout."""


class Visibility:
    """Attention over one layout on one device, with the masks or batches that let every token see only its ancestors."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        compiled: bool,
        least: int = 0,
        part: ContextPart | None = None,
        context: ContextGroup = ALONE,
    ) -> None:
        """`least`: minimum length, with padding, for which kernels are compiled. `part`: the part of the layout computed here, in
        whole blocks if compiled; `context` computes the rest."""
        layout = part.layout if part else layout
        self.num_tokens = layout.num_tokens
        self.compiled = compiled
        self.part = part
        self.context = context
        self._layout = layout
        self._device = device
        length = list_padded_lengths(max(self.num_tokens, least))[-1] if compiled else self.num_tokens
        self._exits, self._positions = _pad_layout(layout, length)
        self._block_masks: dict[int | None, BlockMask] = {}
        self._batches: dict[int | None, AttentionBatches] = {}
        self.kept = KeptActivations()

    @functools.cached_property
    def nodes(self) -> list[Run]:
        return list_node_spans(self._layout)

    @functools.cached_property
    def paths(self) -> list[list[Run]]:
        """Node -> runs of tokens from its root to its own end, in order."""
        return _list_paths(self.nodes, self._layout.node_parents.tolist())

    @functools.cached_property
    def rows(self) -> Rows | None:
        """The layout as packed rows that FlashAttention can compute, or None if it forks or ranks share it."""
        edges = None if self.part else _find_row_edges(self._layout.exits)
        if edges is None or len(edges) > MAX_ROWS + 1:
            return None
        return Rows(to_device(edges, self._device), int(np.diff(edges).max()))

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the block mask for queries and keys padded to `padded_length`; cached per window and layout."""
        if window not in self._block_masks:
            partly, wholly = map_blocks(self._exits, self._positions, BLOCK, window)
            partly[-(-self.num_tokens // BLOCK) :] = False  # blocks of padding only
            sees = _make_mask(to_device(self._exits, self._device), to_device(self._positions, self._device), window)
            if self.part:
                rows, tokens = self.part.tokens[::BLOCK] // BLOCK, self.part.tokens
                partly, wholly = (_append_zeros(x[rows], self.padded_queries // BLOCK) for x in (partly, wholly))
                sees = _restrict_queries(to_device(_append_zeros(tokens, self.padded_queries), self._device), sees)
            self._block_masks[window] = BlockMask.from_kv_blocks(
                *_order_blocks(partly, self._device),
                *_order_blocks(wholly, self._device),
                BLOCK_SIZE=BLOCK,
                mask_mod=sees,
            )
        return self._block_masks[window]

    def batches(self, window: int | None) -> AttentionBatches:
        """Return the batches for attention without a compiler; cached per window and layout."""
        if window not in self._batches:
            tokens = self.part.tokens if self.part else None
            self._batches[window] = build_batches(self.nodes, self.paths, window, self._device, tokens)
        return self._batches[window]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute attention [1, heads, T, D] of layer `module` from queries of that shape and keys and values [1, key heads, T,
        D], all for the tokens computed here."""
        if self.compiled:
            gathered = self.context.ranks * (key.nbytes + value.nbytes)
            saved = 2 * query.nbytes + gathered  # the output is as large as the query
            return self.kept.compute_attention(module, saved, lambda: _run_kernel(query, key, value, self, form))
        keys, values = self.context.gather(key, value)
        return attend_in_batches(query, keys, values, self.batches(form.window), form)

    @property
    def padded_length(self) -> int:
        """Padded number of tokens, for which the attention kernel is compiled."""
        return len(self._exits)

    @property
    def padded_queries(self) -> int:
        """Number of queries that the attention kernel gets. It depends on `padded_length` alone, so there is one kernel for
        each length."""
        return -(-self.padded_length // (BLOCK * self.context.ranks)) * BLOCK


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to `device` from pinned memory, because any other copy makes the host wait for the GPU."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@torch.compiler.disable  # type: ignore[untyped-decorator] # layers are compiled for any length, attention kernels for a few lengths
def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, key heads, T, D]
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    visibility: Visibility | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function with transformers' interface. Returns [1, T, heads, D]."""
    if visibility is None:
        raise NoLayoutError(
            "this model computes layouts only: call it through swarmq.learner.model.layout_model.LayoutModel"
        )
    if attention_mask is not None or query.shape[0] != 1:
        raise LearnerError("the model passes its own mask, or several rows, to its attention in addition to the layout")
    if dropout:
        raise LearnerError(
            "attention dropout makes training differ from sampling: set it to 0 in the model's configuration"
        )
    form = AttentionForm(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return visibility.attend(module, query, key, value, form).transpose(1, 2).contiguous(), None


def _run_kernel(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, form: AttentionForm) -> Tensor:
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if is_allowed(Kind.of(query, key, value, form)) and visibility.rows:
        return attend_in_rows(query, key, value, form, visibility.rows)
    return _run_flex_attention(query, key, value, visibility, form)


def _run_flex_attention(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, form: AttentionForm
) -> Tensor:
    count, kind = query.shape[2], query.device.type
    key, value = visibility.context.gather(key, value)
    query = _pad_tokens(query, visibility.padded_queries)
    key, value = (_pad_tokens(x, visibility.padded_length) for x in (key, value))
    # otherwise kernels compiled without autocast would be compiled again
    with torch.autocast(kind, torch.bfloat16, enabled=False):
        output = _compile_flex_attention()(
            query,
            key,
            value,
            score_mod=None if form.softcap is None else _make_softcap(form.softcap),
            block_mask=visibility.block_mask(form.window),
            scale=form.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=None if form.sinks is None else AuxRequest(lse=True),
        )
    if form.sinks is not None:
        # A sink acts as one more key with value 0, so the output is scaled by exp(lse) / (exp(lse) + exp(sink)).
        output, aux = output
        output = output * torch.sigmoid(aux.lse - form.sinks.float().view(1, -1, 1)).unsqueeze(-1).to(output.dtype)
    seen: Tensor = output[:, :, :count]
    return seen


def _pad_tokens(values: Tensor, length: int) -> Tensor:
    return F.pad(values, (0, 0, 0, length - values.shape[2])).contiguous()


def _find_row_edges(exits: IntArray) -> IntArray | None:
    """Return the start of every packed row and the end of the last one, or None if the layout forks."""
    edges = np.concatenate([[0], np.unique(exits)]).astype(np.int32)
    return edges if np.array_equal(exits, np.repeat(edges[1:], np.diff(edges))) else None


def _list_paths(nodes: list[Run], parents: list[int]) -> list[list[Run]]:
    paths: list[list[Run]] = []
    for (start, end), parent in zip(nodes, parents, strict=True):
        path = paths[parent] if parent >= 0 else []
        if path and path[-1][1] == start:
            paths.append([*path[:-1], (path[-1][0], end)])
        else:
            paths.append([*path, (start, end)])
    return paths


def _pad_layout(layout: Layout, length: int) -> tuple[IntArray, IntArray]:
    """Return exits and positions of the layout, padded to `length` with tokens that see only themselves."""
    extra = np.arange(layout.num_tokens, length, dtype=np.int32)
    return np.concatenate([layout.exits, extra + 1]), np.concatenate([layout.positions, 0 * extra])


def _append_zeros(values: NDArray[Any], length: int) -> NDArray[Any]:
    """Return `values` with zeros appended along the first dimension."""
    return np.pad(values, [(0, length - len(values)), *[(0, 0)] * (values.ndim - 1)])


def _order_blocks(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's form of a block mask [Q, K]: the number of key blocks per query block, and for each query block
    the indices of its key blocks first."""
    which = np.argsort(~blocks, axis=1, kind="stable")
    return tuple(to_device(x.astype(np.int32)[None, None], device) for x in (blocks.sum(1), which))  # type: ignore[return-value]


def _make_mask(exits: Tensor, positions: Tensor, window: int | None) -> Callable[..., Tensor]:
    def ancestor(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < exits[k])

    if window is None:
        return ancestor

    def ancestor_within(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < exits[k]) & (positions[q] - positions[k] < window)

    return ancestor_within


def _restrict_queries(queries: Tensor, sees: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt a mask function over tokens to query indices, if only some tokens (`queries`) have queries."""

    def of_token(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(b, h, queries[q], k)

    return of_token


@functools.cache
def _make_softcap(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention compiled per padded length, window and dtype.

    `fullgraph` turns an excess of compilations into an error, because uncompiled FlexAttention would fill the memory with T x T
    scores.
    """
    config = torch._dynamo.config  # noqa: SLF001 - the only home of this limit
    config.recompile_limit = max(config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
