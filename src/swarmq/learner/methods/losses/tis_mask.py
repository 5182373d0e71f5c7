"""The loss `tis_mask`."""

from __future__ import annotations

from torch import Tensor

from swarmq.config import Loss
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.methods.losses import LossInputs, TokenLoss, compute_ratio

PENALTY_SQUARE_REACH = 3.0
"""Log-ratio in nats (log of the default `ratio_cap`) beyond which the penalty grows linearly instead of quadratically."""


def tis_mask(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the truncated importance weight times A, masked where the probability already moved far enough (2602.04879)."""
    logprobs = tokens.logprobs.detach()
    moved = logprobs.exp() - tokens.behavior_logprobs.exp()
    masked = ((tokens.advantages > 0) & (moved > loss.mask_delta)) | (
        (tokens.advantages < 0) & (moved < -loss.mask_delta)
    )
    ratio = compute_ratio(logprobs, tokens.behavior_logprobs)
    weight = ratio.clamp(max=loss.ratio_cap) * ~masked
    pull = loss.logratio_penalty * _penalize_log_ratio(tokens.logprobs - tokens.behavior_logprobs)
    if tokens.held is not None:
        # behavior_logprobs is normalised otherwise: closing the gap would raise tokens that the grammar forced
        pull = pull * ~tokens.held
    effects = ((ratio > loss.ratio_cap) * LossEffect.TRUNCATED).masked_fill(masked, LossEffect.MASKED)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs + pull, effects, tokens.advantages)


def _penalize_log_ratio(gap: Tensor) -> Tensor:
    """Return the square of the gap, continued by its tangent beyond PENALTY_SQUARE_REACH."""
    near = gap.detach().clamp(-PENALTY_SQUARE_REACH, PENALTY_SQUARE_REACH)
    return near * (2 * gap - near)
