"""Division of a batch into micro-batches and ranks. Pure, numpy only.

Weights and advantages are set per episode first. Then turns are laid out over all episodes at once, as packed rows or as trees,
whichever is less work (swarmq.timeline.layout_plan), so that shared beginnings are found before the work is divided among
ranks. Every rank computes the same plan and takes its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmq.config import Train
from swarmq.learner.batching.sampling_checks import is_comparable
from swarmq.learner.methods.advantages.gae import Estimates
from swarmq.learner.methods.credit import TurnAdvantages, compute_advantages, group_by_slot
from swarmq.learner.methods.loss_weights import normalization_units, token_weight
from swarmq.messages import Rollout
from swarmq.timeline import (
    Cost,
    FoldedEpisodes,
    ImageTable,
    Layout,
    LayoutPlan,
    ResolvedTurn,
    make_resolved_turn,
    pad_rows,
    plan_layouts,
    plan_rows,
    resolve,
)

FloatArray = NDArray[np.float32]

IMBALANCE = 1.05
"""Factor by which a rank's micro-batches may exceed an even share, because splits repeat tokens and packing leaves gaps."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the model that affect the layout."""

    cost: Cost
    rows_only: str | None = None
    """Reason why the model cannot compute trees; None if it can."""
    row_pass: int | None = None
    """Number of tokens that keep the device busy, if larger micro-batches of packed rows are slower; None if they are not."""


class ValueTargets(msgspec.Struct, frozen=True, kw_only=True):
    """What the critic learns from the S sampled tokens of a micro-batch."""

    values: FloatArray  # [S] the critic's, before the batch is trained
    returns: FloatArray  # [S]
    known: NDArray[np.bool_]  # [S] whether the token has a return
    total: int
    """Number of tokens with which the critic is trained in this optimizer step, on all ranks."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One forward and backward pass, with the weights of its S sampled tokens."""

    layout: Layout
    advantages: FloatArray  # [S]
    weights: FloatArray  # [S] before the division by the batch's units; 0 where there is nothing to learn
    temperatures: FloatArray  # [S]
    calls: NDArray[np.int64]  # [S] which model call of this pass sampled the token
    num_calls: int
    held: NDArray[np.bool_]  # [S] sampled under a grammar
    plain: NDArray[np.bool_]  # [S] whether engine and learner must agree under equal weights (`is_comparable`)
    places: NDArray[np.int64]  # [S] index among all sampled tokens of the episodes, counted turn by turn
    value_targets: ValueTargets | None = None

    @property
    def idle(self) -> bool:
        return int(self.layout.episodes[0]) < 0


class BatchTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all turns with an advantage, in the whole batch and on all ranks, before filters."""

    tokens: int
    episodes: int

    def of(self, normalisation: str) -> int:
        return max(self.tokens if normalization_units(normalisation) == "tokens" else self.episodes, 1)


class RankBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a batch, and the layouts of the whole batch."""

    passes: list[MicroBatch]
    """Micro-batches of this rank, as many as every other rank has."""
    plan: LayoutPlan
    """Layouts of all ranks."""
    num_episodes: int
    totals: BatchTotals


def count_credited_tokens(episode: Rollout, credit: TurnAdvantages) -> int:
    """Return the number of sampled tokens of the turns that have an advantage."""
    turns = zip(episode.turns, credit[episode.episode_id], strict=True)
    return sum(turn.num_sampled for turn, value in turns if value is not None)


def build_rank_batch(
    episodes: Sequence[Rollout],
    train: Train,
    traits: ModelProfile,
    *,
    rank: int = 0,
    world: int = 1,
    credit: TurnAdvantages | None = None,
) -> RankBatch:
    """Build the part of `rank` among `world` ranks.

    `credit`: advantages of the whole batch, if `episodes` are only a part of the batch. Raises TimelineError for a turn longer
    than `train.micro_batch_tokens`.
    """
    images = ImageTable()
    most, replays = train.micro_batch_tokens, train.routing_replay
    resolved = [resolve(one.turns, max_length=most, images=images, routing=replays) for one in episodes]
    folded = FoldedEpisodes(resolved)
    whole = _plan_layouts(folded, train, traits, train.micro_batch_tokens)
    if world > 1:
        whole = _plan_layouts(
            folded, train, traits, _choose_even_budget(whole.tokens, world, train.micro_batch_tokens, resolved)
        )
    mine = _deal_layouts(whole.layouts, world)
    weigh = MicroBatchBuilder(episodes, train, credit)
    passes = [weigh(msgspec.structs.replace(layout, images=images.images)) for layout in mine[rank]]
    passes += [make_idle_micro_batch()] * (max(map(len, mine)) - len(passes))
    return RankBatch(
        passes=_equalize_rows(passes, mine) if traits.rows_only else passes,
        plan=whole,
        num_episodes=len(episodes),
        totals=weigh.totals,
    )


def make_idle_micro_batch() -> MicroBatch:
    """Return a micro-batch that trains nothing, for a rank with fewer micro-batches than another."""
    (layout,) = plan_rows([[make_resolved_turn([0], [0], [0.0])]], budget=2)
    nothing = np.zeros(1, np.float32)
    return MicroBatch(
        layout=msgspec.structs.replace(layout, episodes=np.full(1, -1, np.int32)),
        advantages=nothing,
        weights=nothing,
        temperatures=np.ones(1, np.float32),
        calls=np.zeros(1, np.int64),
        num_calls=1,
        held=np.zeros(1, np.bool_),
        plain=np.zeros(1, np.bool_),
        places=np.zeros(1, np.int64),
    )


def reweight(work: RankBatch, train: Train, tokens: Sequence[int]) -> RankBatch:
    """Return the batch with token weights recomputed for `tokens` [num_episodes], the number of trained tokens of each episode."""
    weights = np.array(
        [
            token_weight(train.normalisation, episode_tokens=count, constant_length=train.constant_length)
            for count in tokens
        ],
        np.float32,
    )
    return msgspec.structs.replace(
        work,
        passes=[
            msgspec.structs.replace(one, weights=np.where(one.weights > 0, weights[one.layout.episodes], 0))
            for one in work.passes
        ],
    )


def set_estimates(work: RankBatch, found: Estimates) -> RankBatch:
    """Return the batch with the advantages, and the critic's targets, that were estimated for its N sampled tokens."""
    total = int(found.known.sum())

    def estimated(one: MicroBatch) -> MicroBatch:
        values, advantages, returns = (
            array[one.places].astype(np.float32) for array in (found.values, found.advantages, found.returns)
        )
        known = found.known[one.places]
        return msgspec.structs.replace(
            one,
            advantages=np.where(known, advantages, one.advantages),
            value_targets=ValueTargets(values=values, returns=returns, known=known, total=total),
        )

    return msgspec.structs.replace(work, passes=[estimated(one) for one in work.passes])


def exclude_episodes(work: RankBatch, episodes: Sequence[int]) -> RankBatch:
    """Return the batch with weights, advantages and log-probabilities of these episodes (indices) set to 0, because some of these
    numbers are not finite."""

    def cleaned(one: MicroBatch) -> MicroBatch:
        out = np.isin(one.layout.episodes, episodes)
        logprobs, advantages, weights = (
            np.where(out, 0, values).astype(np.float32) for values in (one.layout.logprobs, one.advantages, one.weights)
        )
        layout = msgspec.structs.replace(one.layout, logprobs=logprobs)
        plain = one.plain & ~out
        return msgspec.structs.replace(one, layout=layout, advantages=advantages, weights=weights, plain=plain)

    return msgspec.structs.replace(work, passes=[cleaned(one) for one in work.passes])


class MicroBatchBuilder:
    """Builder of micro-batches from layouts and the weights of every turn of a batch."""

    def __init__(self, episodes: Sequence[Rollout], train: Train, credit: TurnAdvantages | None = None) -> None:
        by_id = credit or compute_advantages(group_by_slot(episodes), train)
        turns = [len(episode.turns) for episode in episodes]
        self.first = np.cumsum([0, *turns])[:-1]
        """Episode -> index of its first turn among all turns."""
        counts = [count_credited_tokens(episode, by_id) for episode in episodes]
        self.totals = BatchTotals(tokens=sum(counts), episodes=sum(count > 0 for count in counts))
        weights = [
            token_weight(train.normalisation, episode_tokens=count, constant_length=train.constant_length)
            for count in counts
        ]
        given = [a for e in episodes for a in by_id[e.episode_id]]
        self.weights = np.where([a is None for a in given], 0.0, np.repeat(weights, turns)).astype(np.float32)
        self.advantages = np.array([a or 0.0 for a in given], np.float32)
        every = [turn for episode in episodes for turn in episode.turns]
        self.starts = np.cumsum([0, *(turn.num_sampled for turn in every)])[:-1]
        """Turn -> number of tokens that were sampled in the turns before it."""
        self.temperatures = np.array([turn.sampling.temperature for turn in every], np.float32)
        self.held = np.array([bool(turn.sampling.grammar) for turn in every], np.bool_)
        self.plain = np.array([is_comparable(turn) for turn in every], np.bool_)

    def __call__(self, layout: Layout) -> MicroBatch:
        turn = self.first[layout.episodes] + layout.turns
        which, calls = np.unique(turn, return_inverse=True)
        return MicroBatch(
            layout=layout,
            advantages=self.advantages[turn],
            weights=self.weights[turn],
            temperatures=self.temperatures[turn],
            calls=calls.astype(np.int64),
            num_calls=len(which),
            held=self.held[turn],
            plain=self.plain[turn],
            places=(self.starts[turn] + layout.offsets).astype(np.int64),
        )


def _plan_layouts(folded: FoldedEpisodes, train: Train, traits: ModelProfile, budget: int) -> LayoutPlan:
    if train.layout != "auto":
        return plan_layouts(
            folded,
            budget,
            cost=traits.cost,
            only=train.layout,
            because="train.layout asks for it",
            row_pass=traits.row_pass,
        )
    if traits.rows_only:
        why = f"trees are not available: {traits.rows_only}"
        return plan_layouts(folded, budget, cost=traits.cost, only="rows", because=why, row_pass=traits.row_pass)
    return plan_layouts(folded, budget, cost=traits.cost, row_pass=traits.row_pass)


def _choose_even_budget(tokens: int, world: int, budget: int, episodes: Sequence[Sequence[ResolvedTurn]]) -> int:
    """Return the maximum number of tokens per micro-batch with which every rank gets equally many of about the same size."""
    rounds = math.ceil(tokens / (world * budget))
    longest = max(len(turn) for turns in episodes for turn in turns)
    return min(budget, max(longest, math.ceil(IMBALANCE * tokens / (world * rounds))))


def _equalize_rows(passes: Sequence[MicroBatch], dealt: Sequence[Sequence[Layout]]) -> list[MicroBatch]:
    """Pad each micro-batch to the largest number of rows on any rank.

    Rows that are computed one by one gather sharded layers each, and a rank that waits for another rank's collective would wait
    forever.
    """
    rows = [
        max(len(layout.node_starts) for layout in side)
        for side in zip_longest(*dealt, fillvalue=make_idle_micro_batch().layout)
    ]
    return [
        msgspec.structs.replace(one, layout=pad_rows(one.layout, count))
        for one, count in zip(passes, rows, strict=True)
    ]


def _deal_layouts(layouts: Sequence[Layout], world: int) -> list[list[Layout]]:
    """Assign layouts to ranks, the largest first, each to the rank with the fewest tokens so far."""
    loads = [0] * world
    parts: list[list[Layout]] = [[] for _ in range(world)]
    for layout in sorted(layouts, key=lambda each: -each.num_tokens):
        lightest = loads.index(min(loads))
        loads[lightest] += layout.num_tokens
        parts[lightest].append(layout)
    return parts
