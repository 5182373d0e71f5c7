"""The filter `row_k3_max`."""

from __future__ import annotations

import torch
from torch import Tensor

from swarmq.config import Train
from swarmq.learner.methods.filters import compute_gap
from swarmq.learner.methods.losses import LossInputs


def row_k3_max(tokens: LossInputs, among: Tensor, train: Train) -> Tensor:
    """Keep model calls by their mean k3 = rho - log rho - 1, because the product of their ratios would leave out all long calls. Every
    layout holds a call as a whole, unlike a row or an episode."""
    gap = compute_gap(tokens)
    size, k3 = (
        torch.zeros(tokens.num_calls, dtype=gap.dtype, device=gap.device).index_add_(0, tokens.calls, values * among)
        for values in (torch.ones_like(gap), gap.exp() - gap - 1)
    )
    return ~(k3 / size.clamp(min=1) > train.row_k3_max)[tokens.calls]
