"""Passes whose tokens are cut over several ranks: rows that are longer than the memory of one GPU has room for.

    chunk of the layout   0 1 2 3 4 5 6 7     twice as many as ranks, in the layout's order
    computed by rank      0 1 2 3 3 2 1 0     an early one and a late one each, for what is late sees the most

All that a decoder does but attention is a token's own business, so a rank computes its own tokens alone. Attention takes the
queries of these against the keys and values of all, which the ranks gather in every layer and whose gradients they add up on
the way back. What sampled tokens scored is put together, so every rank of a group makes the same loss of the same numbers, and
has that part of its gradient which went through its own tokens: the sum over all ranks is the whole.
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
from swarmq.timeline.layout import Layout, with_rows
from swarmq.timeline.turns import IntArray

T = TypeVar("T")

ALL_GATHER, REDUCE_SCATTER = (
    getattr(torch.distributed, new, None) or getattr(torch.distributed, old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
"""By their names of torch 2.13 or those before, which it warns of."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """L tokens of a layout that one rank computes, and the P of its S sampled tokens that these predict."""

    layout: Layout
    """The whole, with tokens at its end that make it as long as the parts are together; they see themselves alone."""
    tokens: IntArray  # [L] ascending indices into the layout
    predictors: IntArray  # [P] indices into `tokens`
    sampled: IntArray  # [P] ascending indices into the S

    @property
    def token_ids(self) -> IntArray:
        return self.layout.token_ids[self.tokens]

    @property
    def positions(self) -> IntArray:
        return self.layout.positions[self.tokens]

    @property
    def targets(self) -> IntArray:
        return self.layout.targets[self.sampled]


def cut(layout: Layout, context: Context, *, block: int = 1) -> Part:
    """What this rank computes, in chunks of whole blocks of tokens."""
    rank, ranks = context.rank, context.ranks
    length = cut_length(layout.num_tokens, ranks, block)
    chunk = length // (2 * ranks)
    mine = (rank, 2 * ranks - 1 - rank)
    tokens = np.concatenate([np.arange(number * chunk, (number + 1) * chunk) for number in mine]).astype(np.int32)
    sampled = np.flatnonzero(np.isin(layout.predictors // chunk, mine)).astype(np.int32)
    return Part(
        layout=with_rows(layout, len(layout.node_starts) + length - layout.num_tokens),
        tokens=tokens,
        predictors=np.searchsorted(tokens, layout.predictors[sampled]).astype(np.int32),
        sampled=sampled,
    )


def cut_length(num_tokens: int, ranks: int, block: int) -> int:
    """Tokens of all parts together."""
    chunks = 2 * ranks * block
    return -(-num_tokens // chunks) * chunks


class Context:
    """The ranks that share each pass, as one of them sees them. All of them call every method, in the same order."""

    def __init__(self, ranks: int = 1, rank: int = 0, *, devices: Any = None, hosts: Any = None) -> None:
        """`devices` and `hosts` are their process groups, for tensors of passes and for what is said beside them; without
        these nothing is exchanged."""
        self.ranks, self.rank = ranks, rank
        self._devices, self._hosts = devices, hosts

    @classmethod
    def of(cls, accelerator: Accelerator, ranks: int, timeout: timedelta) -> Context:
        """Groups of `ranks` neighbours, of which there must be whole ones. Every rank calls it."""
        if ranks == 1:
            return ALONE
        found: Callable[..., Any] = torch.distributed.new_subgroups
        devices, _ = found(ranks, timeout=timeout)
        hosts, _ = found(ranks, timeout=timeout, backend="gloo")
        return cls(ranks, accelerator.process_index % ranks, devices=devices, hosts=hosts)

    @property
    def is_first(self) -> bool:
        """Whether sums over all ranks take this one's numbers: the ranks that share a pass have the same."""
        return self.rank == 0

    def gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's tokens, [1, key heads, L, D] each, to those of all ranks' tokens in the layout's order."""
        if self._devices is None:
            return key, value
        keys, values = _Gathered.apply(key, value, self)  # type: ignore[no-untyped-call]
        return keys, values

    def together(self, scored: Tensor, sampled: Tensor, count: int) -> Tensor:
        """[..., S] for all S = `count` sampled tokens, of which this rank scored P: `scored` [..., P], numbered `sampled` [P]."""
        whole: Tensor = _Together.apply(scored, sampled, count, self)  # type: ignore[no-untyped-call]
        return whole

    def least(self, value: float) -> float:
        """The smallest `value` of all ranks that share the pass."""
        if self._hosts is None:
            return value
        said = torch.tensor(value, dtype=torch.float64)
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=self._hosts)
        return float(said)

    def once(self, ask: Callable[[], T]) -> T:
        """What `ask` returns on the first of these ranks, which alone calls it. Raises, on all of them, the LearnerError that it raised."""
        if self._hosts is None:
            return ask()
        told: list[Any] = [None, None]
        if self.is_first:
            try:
                told[0] = ask()
            except LearnerError as error:
                told[1] = str(error)
        torch.distributed.broadcast_object_list(told, group=self._hosts, group_src=0)
        if told[1] is not None:
            raise LearnerError(told[1])
        answer: T = told[0]
        return answer

    def all_gather(self, own: Tensor) -> Tensor:
        """[n, ...] of [1, ...] of each rank."""
        parts = own.new_empty(self.ranks, *own.shape[1:])
        ALL_GATHER(parts, own.contiguous(), group=self._devices)
        return parts

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """[1, ...]: this rank's of the sum of [n, ...] over the ranks."""
        own = parts.new_empty(1, *parts.shape[1:])
        REDUCE_SCATTER(own, parts, group=self._devices)
        return own

    def all_reduce(self, values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values, group=self._devices)
        return values


ALONE = Context()


class _Gathered(torch.autograd.Function):
    """Keys and values at once: two nodes of a graph could be taken in another order by another rank."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        ctx.context = context
        return _in_order(context.all_gather(key)), _in_order(context.all_gather(value))

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        """Added up in FP32, as everything is that ranks add up."""
        key, value = (ctx.context.reduce_scatter(_by_rank(x, ctx.context.ranks)).to(x.dtype) for x in above)
        return key, value, None


class _Together(torch.autograd.Function):
    """Every rank has the same loss, so its own tokens' share of the gradient is there already."""

    @staticmethod
    def forward(ctx: Any, scored: Tensor, sampled: Tensor, count: int, context: Context) -> Tensor:
        ctx.save_for_backward(sampled)
        return context.all_reduce(scored.new_zeros(*scored.shape[:-1], count).index_copy_(-1, sampled, scored))

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        (sampled,) = ctx.saved_tensors
        return above[0].index_select(-1, sampled), None, None, None


def _in_order(parts: Tensor) -> Tensor:
    """[n, heads, L, D], of each rank its tokens, as [1, heads, n L, D] in the layout's order."""
    early, late = parts.chunk(2, dim=2)
    return torch.cat([*early, *reversed(late.unbind())], dim=1)[None]


def _by_rank(tokens: Tensor, ranks: int) -> Tensor:
    """The way back, in FP32."""
    chunks = tokens[0].chunk(2 * ranks, dim=1)
    size = chunks[0].shape[1]
    parts = tokens.new_empty(ranks, tokens.shape[1], 2 * size, tokens.shape[3], dtype=torch.float32)
    for part, early, late in zip(parts, chunks, reversed(chunks), strict=False):
        part[:, :size].copy_(early)
        part[:, size:].copy_(late)
    return parts
