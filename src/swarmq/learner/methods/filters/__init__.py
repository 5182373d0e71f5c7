"""Filters: tokens of a micro-batch that are left out, for instance because engine and learner disagree about them. One file for each
built-in one, with a function of the file's name."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from swarmq.config import LOSSES_WITHOUT_RATIO, Train
from swarmq.learner.methods.losses import MAX_LOG_RATIO, LossInputs
from swarmq.learner.methods.registry import find_method


class FilterFunction(Protocol):
    """A filter. Returns which tokens are kept, [S] bool; only those in `among` [S] bool count, which marks whole model calls if it is the
    first filter.

    `tokens` has `logprobs` without gradient, `behavior_logprobs`, `advantages`, `calls` and `held`, and nothing else.
    """

    def __call__(self, tokens: LossInputs, among: Tensor, train: Train, /) -> Tensor: ...


class FilterResult(NamedTuple):
    tokens: Tensor  # [S] bool, the tokens of `among` that pass all filters
    calls_out: Tensor  # scalar, number of model calls that `row_k3_max` leaves out
    tokens_out: Tensor  # scalar, number of tokens that are left out of other calls


def list_filters(train: Train) -> list[str]:
    """Return the filters that apply, in their order; no filter applies to a loss without importance ratios."""
    if train.loss.name in LOSSES_WITHOUT_RATIO:
        return []
    named = {"row_k3_max": train.row_k3_max, "ratio_band": train.ratio_band, train.token_filter: train.token_filter}
    return [name for name, setting in named.items() if name and setting]


def apply_filters(tokens: LossInputs, train: Train, among: Tensor) -> FilterResult | None:
    """Apply the filters to the tokens marked in `among` [S] bool, which marks whole model calls. Return None if no filter
    applies."""
    if not (names := list_filters(train)):
        return None
    detached = tokens.logprobs.detach()
    inputs = tokens._replace(
        logprobs=detached,
        proximal=None,
        reference=None,
        teacher=None,
        entropies=None,
        candidates=None,
        teacher_candidates=None,
        spans=None,
    )
    kept = of_kept_calls = among
    for name in names:
        keep: FilterFunction = find_method("filter", name)
        kept = kept & keep(inputs, kept, train)
        if name == "row_k3_max":
            of_kept_calls = kept
    removed = torch.zeros(tokens.num_calls, dtype=torch.int64, device=among.device)
    removed.index_add_(0, tokens.calls, (among & ~of_kept_calls).long())
    return FilterResult(kept, (removed > 0).sum(), (of_kept_calls & ~kept).sum())


def compute_gap(tokens: LossInputs) -> Tensor:
    """Return log rho of each token, at most MAX_LOG_RATIO."""
    return (tokens.logprobs - tokens.behavior_logprobs).clamp(max=MAX_LOG_RATIO)
