"""The loss `sft`."""

from __future__ import annotations

from swarmq.config import Loss
from swarmq.learner.methods.losses import LossInputs, TokenLoss


def sft(tokens: LossInputs, _: Loss) -> TokenLoss:
    """Return the cross-entropy on demonstrations."""
    return TokenLoss.whole(-tokens.logprobs)
