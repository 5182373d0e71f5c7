"""The loss that a step asks for: the loss by name, the correction for several steps per batch, the divergence from a
reference, and the entropy bonus."""

from __future__ import annotations

import torch
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
    if loss.reward_kl:
        tokens = tokens._replace(advantages=tokens.advantages - loss.reward_kl * estimate_divergence_to_go(tokens))
    if tokens.proximal is None or loss.name in LOSSES_WITHOUT_RATIO:
        result = compute(tokens, loss)
    else:
        behaviour = compute_ratio(tokens.proximal, tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
        result = compute(tokens._replace(behavior_logprobs=tokens.proximal), loss)
        result = result._replace(per_token=behaviour * result.per_token)
    if loss.kl:
        result = result._replace(per_token=result.per_token + loss.kl * estimate_divergence(tokens, loss))
    if loss.entropy_bonus:
        result = result._replace(per_token=result.per_token - loss.entropy_bonus * estimate_entropy(tokens, loss))
    return result


def estimate_divergence_to_go(tokens: LossInputs) -> Tensor:
    """Return, for each token, the sum of behavior_logprobs - reference over the rest of its model call, itself included, [S]: an
    estimate of the divergence of all that follows in the call (k1), which REINFORCE++ subtracts from rewards (2501.03262)."""
    assert tokens.reference is not None
    order = tokens.calls.argsort(stable=True)
    calls = tokens.calls[order]
    gaps = (tokens.behavior_logprobs - tokens.reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[order].double()
    until = gaps.cumsum(0)
    of_call = torch.zeros(tokens.num_calls, dtype=gaps.dtype, device=gaps.device).index_add_(0, calls, gaps)
    to_go = of_call.cumsum(0)[calls] - until + gaps
    return torch.empty_like(gaps).scatter_(0, order, to_go).to(tokens.advantages.dtype)


def estimate_entropy(tokens: LossInputs, loss: Loss) -> Tensor:
    """Return the entropy of each token's distribution, [S], weighted by min(rho, ratio_cap), with a gradient that is in expectation
    the entropy's: -(logprobs + H) d logprobs, for a token sampled from this distribution."""
    assert tokens.entropies is not None
    logprobs = tokens.logprobs.detach()
    weight = compute_ratio(logprobs, tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
    return weight * (tokens.entropies - (logprobs + tokens.entropies) * (tokens.logprobs - logprobs))


def estimate_divergence(tokens: LossInputs, loss: Loss) -> Tensor:
    """Return the k3 estimate of the divergence from the reference, [S]: e^d - d - 1 with d = reference - logprobs."""
    assert tokens.reference is not None
    d = (tokens.reference - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
    weight = compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
    return weight * (d.exp() - d - 1)
