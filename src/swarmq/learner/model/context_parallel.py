"""Context parallelism: micro-batches whose tokens are cut over several ranks, for rows that are too long for one GPU's memory.

  chunk of the layout   0 1 2 3 4 5 6 7     twice as many as ranks, in the layout's order
  computed by rank      0 1 2 3 3 2 1 0     each rank has an early and a late chunk, because late chunks see the most

Everything in a decoder but attention treats tokens independently, so a rank computes only its own tokens. Attention takes the
queries of the rank's own tokens and the keys and values of all tokens. The ranks gather these in every layer, and sum their
gradients in the backward pass. The scores of sampled tokens are combined, so every rank of a group computes the same loss, and
gets the part of the gradient that passes through its own tokens; the sum over the ranks is the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from swarmq.errors import LearnerError
from swarmq.timeline.layout import Layout, pad_rows
from swarmq.timeline.turns import IntArray, RoutingArray

T = TypeVar("T")

ALL_GATHER, REDUCE_SCATTER = (
    getattr(torch.distributed, new, None) or getattr(torch.distributed, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
"""Collectives under their names in torch 2.13, which warns about the former names; in older versions under the former names."""


class ContextPart(msgspec.Struct, frozen=True, kw_only=True):
    """The L tokens of a layout that one rank computes, and the P of the layout's S sampled tokens that these tokens predict."""

    layout: Layout
    """The whole layout, padded at its end to the total length of the parts. A padding token attends only to itself."""
    tokens: IntArray  # [L] ascending indices into the layout
    predictors: IntArray  # [P] indices into `tokens`
    sampled: IntArray  # [P] ascending indices into the layout's S sampled tokens

    @property
    def token_ids(self) -> IntArray:
        return self.layout.token_ids[self.tokens]

    @property
    def positions(self) -> IntArray:
        return self.layout.positions[self.tokens]

    @property
    def targets(self) -> IntArray:
        return self.layout.targets[self.sampled]

    @property
    def routing(self) -> RoutingArray | None:
        return None if self.layout.routing is None else self.layout.routing[self.tokens]


def cut_for_rank(layout: Layout, context: ContextGroup, *, block: int = 1) -> ContextPart:
    """Return this rank's part of the layout, cut at multiples of `block` tokens."""
    rank, ranks = context.rank, context.ranks
    length = cut_length(layout.num_tokens, ranks, block)
    chunk = length // (2 * ranks)
    mine = (rank, 2 * ranks - 1 - rank)
    tokens = np.concatenate([np.arange(number * chunk, (number + 1) * chunk) for number in mine]).astype(np.int32)
    sampled = np.flatnonzero(np.isin(layout.predictors // chunk, mine)).astype(np.int32)
    return ContextPart(
        layout=pad_rows(layout, len(layout.node_starts) + length - layout.num_tokens),
        tokens=tokens,
        predictors=np.searchsorted(tokens, layout.predictors[sampled]).astype(np.int32),
        sampled=sampled,
    )


def cut_length(num_tokens: int, ranks: int, block: int) -> int:
    """Return the number of tokens of all parts together, with padding."""
    chunks = 2 * ranks * block
    return -(-num_tokens // chunks) * chunks


class ContextGroup:
    """The ranks that share each micro-batch, as seen by one of them. All of them call every method, in the same order."""

    def __init__(self, ranks: int = 1, rank: int = 0, *, devices: Any = None, hosts: Any = None) -> None:
        """`devices`, `hosts`: process groups for tensors on devices and for values in host memory; without them nothing is
        exchanged."""
        self.ranks, self.rank = ranks, rank
        self._devices, self._hosts = devices, hosts

    @classmethod
    def of(cls, accelerator: Accelerator, ranks: int, timeout: timedelta) -> ContextGroup:
        """Build groups of `ranks` neighbouring ranks; the number of all ranks must be a multiple of `ranks`. Every rank calls
        it."""
        if ranks == 1:
            return ALONE
        found: Callable[..., Any] = torch.distributed.new_subgroups
        devices, _ = found(ranks, timeout=timeout)
        hosts, _ = found(ranks, timeout=timeout, backend="gloo")
        return cls(ranks, accelerator.process_index % ranks, devices=devices, hosts=hosts)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its group. The ranks of a group have equal numbers, so sums over all ranks include
        only those of the first."""
        return self.rank == 0

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of all ranks' tokens, in the layout's order.

        `key`, `value`: those of this rank's tokens, [1, key heads, L, D] each.
        """
        if self._devices is None:
            return key, value
        keys, values = _GatherKeysAndValues.apply(key, value, self)  # type: ignore[no-untyped-call]
        return keys, values

    def combine_scores(self, scored: Tensor, sampled: Tensor, count: int) -> Tensor:
        """Combine the scores of all ranks into [..., S] for S = `count` sampled tokens.

        `scored` [..., P]: scores by this rank. `sampled` [P]: indices of these tokens among the S sampled ones.
        """
        whole: Tensor = _CombineScores.apply(scored, sampled, count, self)  # type: ignore[no-untyped-call]
        return whole

    def reduce_min(self, value: float) -> float:
        """Return the smallest `value` of all ranks that share the micro-batch."""
        if self._hosts is None:
            return value
        smallest = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=self._hosts)
        return float(smallest)

    def run_on_first(self, ask: Callable[[], T]) -> T:
        """Call `ask` on the group's first rank only, and return its result on all ranks of the group. A LearnerError of `ask` is
        raised on all of them, too."""
        if self._hosts is None:
            return ask()
        shared: list[Any] = [None, None]
        if self.is_first:
            try:
                shared[0] = ask()
            except LearnerError as error:
                shared[1] = str(error)
        torch.distributed.broadcast_object_list(shared, group=self._hosts, group_src=0)
        if shared[1] is not None:
            raise LearnerError(shared[1])
        answer: T = shared[0]
        return answer

    def all_gather(self, own: Tensor) -> Tensor:
        """Gather `own` [1, ...] of each of the n ranks into [n, ...]."""
        parts = own.new_empty(self.ranks, *own.shape[1:])
        ALL_GATHER(parts, own.contiguous(), group=self._devices)
        return parts

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Sum `parts` [n, ...] over the n ranks, and return this rank's slice [1, ...]."""
        own = parts.new_empty(1, *parts.shape[1:])
        REDUCE_SCATTER(own, parts, group=self._devices)
        return own

    def all_reduce(self, values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values, group=self._devices)
        return values


ALONE = ContextGroup()


class _GatherKeysAndValues(torch.autograd.Function):
    """Gathers keys and values in one graph node; ranks could execute two nodes in different orders."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, context: ContextGroup) -> tuple[Tensor, Tensor]:
        ctx.context = context
        return _to_layout_order(context.all_gather(key)), _to_layout_order(context.all_gather(value))

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradients over the ranks in FP32, like all sums over ranks."""
        key, value = (ctx.context.reduce_scatter(_to_rank_order(x, ctx.context.ranks)).to(x.dtype) for x in above)
        return key, value, None


class _CombineScores(torch.autograd.Function):
    """Combines scores. Every rank computes the same loss, so the backward pass needs no communication: each rank takes the
    gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, scored: Tensor, sampled: Tensor, count: int, context: ContextGroup) -> Tensor:
        ctx.save_for_backward(sampled)
        return context.all_reduce(scored.new_zeros(*scored.shape[:-1], count).index_copy_(-1, sampled, scored))

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (sampled,) = ctx.saved_tensors
        return above[0].index_select(-1, sampled), None, None, None


def _to_layout_order(parts: Tensor) -> Tensor:
    """Return each rank's tokens, [n, heads, L, D], as [1, heads, n L, D] in the layout's order."""
    early, late = parts.chunk(2, dim=2)
    return torch.cat([*early, *reversed(late.unbind())], dim=1)[None]


def _to_rank_order(tokens: Tensor, ranks: int) -> Tensor:
    """Return the inverse of `_to_layout_order`, in FP32."""
    chunks = tokens[0].chunk(2 * ranks, dim=1)
    size = chunks[0].shape[1]
    parts = tokens.new_empty(ranks, tokens.shape[1], 2 * size, tokens.shape[3], dtype=torch.float32)
    for part, early, late in zip(parts, chunks, reversed(chunks), strict=False):
        part[:, :size].copy_(early)
        part[:, size:].copy_(late)
    return parts
