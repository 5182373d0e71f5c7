"""The loss `gspo`."""

from __future__ import annotations

import torch

from swarmq.config import Loss
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.methods.losses import MAX_LOG_RATIO, LossInputs, TokenLoss, or_default

LOW, HIGH = 3e-4, 4e-4


def gspo(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the loss with one clipped ratio per sequence, the exponential of the mean log-ratio over its tokens (2507.18071).
    A sequence is one model call, which is whole in every layout."""
    size = torch.zeros(
        tokens.num_calls, dtype=tokens.behavior_logprobs.dtype, device=tokens.behavior_logprobs.device
    ).index_add_(0, tokens.calls, torch.ones_like(tokens.behavior_logprobs))
    total = torch.zeros_like(size).index_add_(0, tokens.calls, tokens.logprobs.detach() - tokens.behavior_logprobs)
    sequence = (total / size.clamp(min=1)).clamp(max=MAX_LOG_RATIO).exp()[tokens.calls]
    ratio = sequence * (tokens.logprobs - tokens.logprobs.detach()).exp()
    limited = ratio.clamp(1 - or_default(loss.clip_low, LOW), 1 + or_default(loss.clip_high, HIGH))
    a = tokens.advantages
    return TokenLoss(-torch.minimum(ratio * a, limited * a), (limited * a < ratio * a) * LossEffect.CLIPPED, a)
