"""Policy losses per token. `theta` carries the gradient; everything else is constant.

theta, mu: log-probability under the learner's and the engine's weights; rho = exp(theta - mu); A: advantage.
`policy_loss` puts together what a step asks for: the loss by name, the correction for several steps per batch, the
divergence from a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from swarmq.config import Loss
from swarmq.learner.algorithms.loss_effects import Effect

CISPO_HIGH = 4.0
PPO_LOW, PPO_HIGH = 0.2, 0.28
GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4
MAX_LOG_RATIO = 20.0
"""exp() of more overflows what follows; such a token is broken whatever its ratio."""
PULL_REACH = 3.0
"""Nats, where `ratio_cap` is by default: a token that is further away is not pulled harder."""


class Tokens(NamedTuple):
    """The S trained tokens of a pass."""

    theta: Tensor  # [S] float32, with gradient
    mu: Tensor  # [S] float32
    advantages: Tensor  # [S] float32
    calls: Tensor  # [S] int64, which model call of the pass
    num_calls: int
    proximal: Tensor | None = None  # [S] float32, log-probability before the first optimizer step of this batch
    reference: Tensor | None = None  # [S] float32, under the reference model
    teacher: Tensor | None = None  # [S] float32, under the teacher
    held: Tensor | None = None  # [S] bool, sampled under a grammar: mu is normalised over the tokens that it allowed


class TokenLoss(NamedTuple):
    per_token: Tensor  # [S]
    effects: Tensor  # [S] int64, what became of the policy gradient (effects.py)
    advantages: Tensor | None  # [S] those that the loss used, constant; None where it uses none


def tis_mask(tokens: Tokens, loss: Loss) -> TokenLoss:
    """Truncated importance weight, masked where the probability already moved far enough (2602.04879)."""
    theta = tokens.theta.detach()
    moved = theta.exp() - tokens.mu.exp()
    masked = ((tokens.advantages > 0) & (moved > loss.mask_delta)) | (
        (tokens.advantages < 0) & (moved < -loss.mask_delta)
    )
    ratio = _ratio(theta, tokens.mu)
    weight = ratio.clamp(max=loss.ratio_cap) * ~masked
    pull = loss.logratio_penalty * _pull(tokens.theta - tokens.mu)
    if tokens.held is not None:
        pull = pull * ~tokens.held  # mu is another distribution's: to close the gap would raise what the grammar forced
    effects = ((ratio > loss.ratio_cap) * Effect.TRUNCATED).masked_fill(masked, Effect.MASKED)
    return TokenLoss(-weight * tokens.advantages * tokens.theta + pull, effects, tokens.advantages)


def _pull(gap: Tensor) -> Tensor:
    """Its square, and from PULL_REACH on the tangent."""
    near = gap.detach().clamp(-PULL_REACH, PULL_REACH)
    return near * (2 * gap - near)


def ppo_clip(tokens: Tokens, loss: Loss) -> TokenLoss:
    """Clipped ratio, wider upwards, with a second clip for A < 0 (1707.06347, 2503.14476)."""
    ratio = _ratio(tokens.theta, tokens.mu)
    limited = ratio.clamp(1 - _or(loss.clip_low, PPO_LOW), 1 + _or(loss.clip_high, PPO_HIGH))
    a = tokens.advantages
    objective = torch.minimum(ratio * a, limited * a)
    objective = torch.where(a < 0, torch.maximum(objective, loss.dual_clip * a), objective)
    clipped = (limited * a < ratio * a) | ((a < 0) & (ratio > loss.dual_clip))
    return TokenLoss(-objective, clipped * Effect.CLIPPED, a)


def cispo(tokens: Tokens, loss: Loss) -> TokenLoss:
    """Every token keeps a gradient, with its weight clipped from above (2506.13585)."""
    ratio = _ratio(tokens.theta.detach(), tokens.mu)
    high = 1 + _or(loss.clip_high, CISPO_HIGH)
    return _weighted(tokens, ratio, high)


def gspo(tokens: Tokens, loss: Loss) -> TokenLoss:
    """One ratio per sequence, the mean over its tokens in the exponent (2507.18071). A sequence is what one model call
    sampled: that is whole however turns are laid out."""
    size = torch.zeros(tokens.num_calls, dtype=tokens.mu.dtype, device=tokens.mu.device).index_add_(
        0, tokens.calls, torch.ones_like(tokens.mu)
    )
    total = torch.zeros_like(size).index_add_(0, tokens.calls, tokens.theta.detach() - tokens.mu)
    sequence = (total / size.clamp(min=1)).clamp(max=MAX_LOG_RATIO).exp()[tokens.calls]
    ratio = sequence * (tokens.theta - tokens.theta.detach()).exp()
    limited = ratio.clamp(1 - _or(loss.clip_low, GSPO_LOW), 1 + _or(loss.clip_high, GSPO_HIGH))
    a = tokens.advantages
    return TokenLoss(-torch.minimum(ratio * a, limited * a), (limited * a < ratio * a) * Effect.CLIPPED, a)


def reinforce(tokens: Tokens, loss: Loss) -> TokenLoss:
    """The policy gradient with a truncated importance weight."""
    return _weighted(tokens, _ratio(tokens.theta.detach(), tokens.mu), loss.ratio_cap)


def sft(tokens: Tokens, _: Loss) -> TokenLoss:
    """Cross-entropy on demonstrations."""
    return TokenLoss(-tokens.theta, torch.zeros_like(tokens.theta, dtype=torch.int64), None)


def distill(tokens: Tokens, loss: Loss) -> TokenLoss:
    """On-policy distillation: the policy gradient whose advantage is the teacher's log-probability less our own, an
    unbiased estimate of the reverse KL divergence's gradient."""
    assert tokens.teacher is not None
    return reinforce(tokens._replace(advantages=tokens.teacher - tokens.theta.detach()), loss)


LOSSES: dict[str, Callable[[Tokens, Loss], TokenLoss]] = {
    "tis_mask": tis_mask,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
    "sft": sft,
    "distill": distill,
}

WITHOUT_RATIO = {"sft"}
"""Losses that do not ask with what probability a token was sampled."""


def policy_loss(tokens: Tokens, loss: Loss) -> TokenLoss:
    """The loss of `loss.name` and all that belongs to it.

    With `proximal` the loss compares with those weights instead of the engine's, and each token is weighted by
    min(exp(proximal - mu), ratio_cap) for having been sampled by the engine (decoupled PPO, 2505.24298).
    """
    if tokens.proximal is None or loss.name in WITHOUT_RATIO:
        result = LOSSES[loss.name](tokens, loss)
    else:
        behaviour = _ratio(tokens.proximal, tokens.mu).clamp(max=loss.ratio_cap)
        result = LOSSES[loss.name](tokens._replace(mu=tokens.proximal), loss)
        result = result._replace(per_token=behaviour * result.per_token)
    if tokens.reference is None:
        return result
    return result._replace(per_token=result.per_token + loss.kl * divergence(tokens, loss))


def divergence(tokens: Tokens, loss: Loss) -> Tensor:
    """k3 from the reference, [S]: e^d - d - 1 with d = reference - theta, for tokens the engine sampled."""
    assert tokens.reference is not None
    d = (tokens.reference - tokens.theta).clamp(max=MAX_LOG_RATIO)
    weight = _ratio(tokens.theta.detach(), tokens.mu).clamp(max=loss.ratio_cap)
    return weight * (d.exp() - d - 1)


def _weighted(tokens: Tokens, ratio: Tensor, cap: float) -> TokenLoss:
    """The policy gradient, weighted by the ratio up to `cap`."""
    a = tokens.advantages
    return TokenLoss(-ratio.clamp(max=cap) * a * tokens.theta, (ratio > cap) * Effect.TRUNCATED, a)


def _ratio(theta: Tensor, mu: Tensor) -> Tensor:
    return (theta - mu).clamp(max=MAX_LOG_RATIO).exp()


def _or(setting: float | None, default: float) -> float:
    return default if setting is None else setting
