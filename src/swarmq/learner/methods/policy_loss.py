"""The loss that a step asks for: the loss by name, the correction for several steps per batch, and the divergence from a
reference."""

from __future__ import annotations

from torch import Tensor

from swarmq.config import LOSSES_WITHOUT_RATIO, Loss
from swarmq.learner.methods.losses import MAX_LOG_RATIO, LossFunction, LossInputs, TokenLoss, compute_ratio
from swarmq.learner.methods.registry import find_method


def policy_loss(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the loss `loss.name` with its corrections.

    With `proximal` log-probabilities, the loss compares the learner's weights with the proximal weights instead of the
    engine's. Each token is then weighted by min(exp(proximal - behavior_logprobs), ratio_cap), because the engine sampled it
    (decoupled PPO, 2505.24298).
    """
    compute: LossFunction = find_method("loss", loss.name)
    if tokens.proximal is None or loss.name in LOSSES_WITHOUT_RATIO:
        result = compute(tokens, loss)
    else:
        behaviour = compute_ratio(tokens.proximal, tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
        result = compute(tokens._replace(behavior_logprobs=tokens.proximal), loss)
        result = result._replace(per_token=behaviour * result.per_token)
    if tokens.reference is None:
        return result
    return result._replace(per_token=result.per_token + loss.kl * estimate_divergence(tokens, loss))


def estimate_divergence(tokens: LossInputs, loss: Loss) -> Tensor:
    """Return the k3 estimate of the divergence from the reference, [S]: e^d - d - 1 with d = reference - logprobs."""
    assert tokens.reference is not None
    d = (tokens.reference - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
    weight = compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
    return weight * (d.exp() - d - 1)
