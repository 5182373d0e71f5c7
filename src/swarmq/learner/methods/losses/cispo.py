"""The loss `cispo`."""

from __future__ import annotations

from swarmq.config import Loss
from swarmq.learner.methods.losses import LossInputs, TokenLoss, compute_ratio, or_default, weight_by_ratio

HIGH = 4.0


def cispo(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the clipped importance weight times A, which leaves every token a gradient (2506.13585)."""
    ratio = compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs)
    return weight_by_ratio(tokens, ratio, 1 + or_default(loss.clip_high, HIGH))
