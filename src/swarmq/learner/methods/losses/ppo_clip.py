"""The loss `ppo_clip`."""

from __future__ import annotations

import torch

from swarmq.config import Loss
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.methods.losses import LossInputs, TokenLoss, compute_ratio, or_default

LOW, HIGH = 0.2, 0.28


def ppo_clip(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the clipped ratio times A, wider upwards, with a second clip for A < 0 (1707.06347, 2503.14476)."""
    ratio = compute_ratio(tokens.logprobs, tokens.behavior_logprobs)
    limited = ratio.clamp(1 - or_default(loss.clip_low, LOW), 1 + or_default(loss.clip_high, HIGH))
    a = tokens.advantages
    objective = torch.minimum(ratio * a, limited * a)
    objective = torch.where(a < 0, torch.maximum(objective, loss.dual_clip * a), objective)
    clipped = (limited * a < ratio * a) | ((a < 0) & (ratio > loss.dual_clip))
    return TokenLoss(-objective, clipped * LossEffect.CLIPPED, a)
