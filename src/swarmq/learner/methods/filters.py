"""Filters: tokens of a micro-batch that are left out because engine and learner disagree about them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swarmq.config import LOSSES_WITHOUT_RATIO, Train
from swarmq.learner.methods.losses import MAX_LOG_RATIO, LossInputs


class FilterResult(NamedTuple):
    tokens: Tensor  # [S] bool, the tokens of `among` that pass all filters
    calls_out: Tensor  # scalar, number of model calls that are left out entirely
    tokens_out: Tensor  # scalar, number of tokens that are left out of other calls


def has_filters(train: Train) -> bool:
    """Return whether any filter applies; no filter applies to a loss without importance ratios."""
    return train.loss.name not in LOSSES_WITHOUT_RATIO and bool(train.row_k3_max or train.ratio_band)


def apply_filters(tokens: LossInputs, train: Train, among: Tensor) -> FilterResult | None:
    """Apply the filters to the tokens marked in `among` [S] bool, which marks whole model calls. Return None if no filter
    applies.

    First, calls are removed by their mean k3 = rho - log rho - 1, because the product of their ratios would remove all long
    calls; then tokens by the band of rho. The result does not depend on the layout, because every layout holds a call as a whole, unlike a
    row or an episode.
    """
    if not has_filters(train):
        return None
    gap = (tokens.logprobs.detach() - tokens.behavior_logprobs).clamp(max=MAX_LOG_RATIO)
    ratio, kept = gap.exp(), among
    bad_calls = torch.zeros(tokens.num_calls, dtype=torch.bool, device=gap.device)
    if train.row_k3_max:
        size, k3 = (
            torch.zeros(tokens.num_calls, device=gap.device).index_add_(0, tokens.calls, values * among)
            for values in (torch.ones_like(gap), ratio - gap - 1)
        )
        bad_calls = k3 / size.clamp(min=1) > train.row_k3_max
        kept = among & ~bad_calls[tokens.calls]
    in_band = kept
    if train.ratio_band is not None:
        low, high = train.ratio_band
        in_band = kept & (ratio >= low) & (ratio <= high)
    return FilterResult(in_band, bad_calls.sum(), (kept & ~in_band).sum())
