"""The loss `reinforce`."""

from __future__ import annotations

from swarmq.config import Loss
from swarmq.learner.methods.losses import LossInputs, TokenLoss, compute_ratio, weight_by_ratio


def reinforce(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the policy gradient with a truncated importance weight."""
    return weight_by_ratio(tokens, compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs), loss.ratio_cap)
