"""The loss `distill`."""

from __future__ import annotations

from swarmq.config import Loss
from swarmq.learner.methods.losses import LossInputs, TokenLoss
from swarmq.learner.methods.losses.reinforce import reinforce


def distill(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the policy gradient whose advantage is the teacher's log-probability minus the learner's, an unbiased estimate of
    the gradient of the reverse KL divergence (on-policy distillation)."""
    assert tokens.teacher is not None
    return reinforce(tokens._replace(advantages=tokens.teacher - tokens.logprobs.detach()), loss)
