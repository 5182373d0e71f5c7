"""Policy losses per token. `logprobs` carries the gradient; everything else is constant.

logprobs, behavior_logprobs: log-probability under the learner's and the engine's weights;
rho = exp(logprobs - behavior_logprobs); A: advantage.

`policy_loss` combines what a step asks for: the loss by name, the correction for several steps per batch, and the divergence
from a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from swarmq.config import Loss
from swarmq.learner.algorithms.loss_effects import LossEffect

CISPO_HIGH = 4.0
PPO_LOW, PPO_HIGH = 0.2, 0.28
GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4
MAX_LOG_RATIO = 20.0
"""Limit of log-ratios: exp() of a larger one overflows in later computations, and the token is broken in any case."""
PENALTY_SQUARE_REACH = 3.0
"""Log-ratio in nats (log of the default `ratio_cap`) beyond which the penalty of `tis_mask` grows linearly instead of
quadratically."""


class LossInputs(NamedTuple):
    """Inputs of a loss for the S trained tokens of a micro-batch."""

    logprobs: Tensor  # [S] float32, with gradient
    behavior_logprobs: Tensor  # [S] float32
    advantages: Tensor  # [S] float32
    calls: Tensor  # [S] int64, which model call of the pass
    num_calls: int
    proximal: Tensor | None = None  # [S] float32, log-probability before the first optimizer step of this batch
    reference: Tensor | None = None  # [S] float32, under the reference model
    teacher: Tensor | None = None  # [S] float32, under the teacher
    held: Tensor | None = (
        None  # [S] bool, sampled under a grammar: behavior_logprobs is normalised over the tokens that the grammar allowed
    )


class TokenLoss(NamedTuple):
    per_token: Tensor  # [S]
    effects: Tensor  # [S] int64, effect on the policy gradient (loss_effects.py)
    advantages: Tensor | None  # [S] advantages that the loss used, detached; None if it uses none


def tis_mask(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the `tis_mask` loss: truncated importance weight, masked where the probability already moved far enough
    (2602.04879)."""
    logprobs = tokens.logprobs.detach()
    moved = logprobs.exp() - tokens.behavior_logprobs.exp()
    masked = ((tokens.advantages > 0) & (moved > loss.mask_delta)) | (
        (tokens.advantages < 0) & (moved < -loss.mask_delta)
    )
    ratio = _compute_ratio(logprobs, tokens.behavior_logprobs)
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


def ppo_clip(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the `ppo_clip` loss: clipped ratio, wider upwards, with a second clip for A < 0 (1707.06347, 2503.14476)."""
    ratio = _compute_ratio(tokens.logprobs, tokens.behavior_logprobs)
    limited = ratio.clamp(1 - _or_default(loss.clip_low, PPO_LOW), 1 + _or_default(loss.clip_high, PPO_HIGH))
    a = tokens.advantages
    objective = torch.minimum(ratio * a, limited * a)
    objective = torch.where(a < 0, torch.maximum(objective, loss.dual_clip * a), objective)
    clipped = (limited * a < ratio * a) | ((a < 0) & (ratio > loss.dual_clip))
    return TokenLoss(-objective, clipped * LossEffect.CLIPPED, a)


def cispo(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the `cispo` loss: clipped importance weight that leaves every token a gradient (2506.13585)."""
    ratio = _compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs)
    high = 1 + _or_default(loss.clip_high, CISPO_HIGH)
    return _weight_by_ratio(tokens, ratio, high)


def gspo(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the `gspo` loss: one ratio per sequence, the exponential of the mean log-ratio over its tokens (2507.18071). A
    sequence is one model call, which is whole in every layout."""
    size = torch.zeros(
        tokens.num_calls, dtype=tokens.behavior_logprobs.dtype, device=tokens.behavior_logprobs.device
    ).index_add_(0, tokens.calls, torch.ones_like(tokens.behavior_logprobs))
    total = torch.zeros_like(size).index_add_(0, tokens.calls, tokens.logprobs.detach() - tokens.behavior_logprobs)
    sequence = (total / size.clamp(min=1)).clamp(max=MAX_LOG_RATIO).exp()[tokens.calls]
    ratio = sequence * (tokens.logprobs - tokens.logprobs.detach()).exp()
    limited = ratio.clamp(1 - _or_default(loss.clip_low, GSPO_LOW), 1 + _or_default(loss.clip_high, GSPO_HIGH))
    a = tokens.advantages
    return TokenLoss(-torch.minimum(ratio * a, limited * a), (limited * a < ratio * a) * LossEffect.CLIPPED, a)


def reinforce(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the `reinforce` loss: the policy gradient with a truncated importance weight."""
    return _weight_by_ratio(tokens, _compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs), loss.ratio_cap)


def sft(tokens: LossInputs, _: Loss) -> TokenLoss:
    """Return the `sft` loss: cross-entropy on demonstrations."""
    return TokenLoss(-tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.int64), None)


def distill(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the `distill` loss: the policy gradient whose advantage is the teacher's log-probability minus the learner's, an
    unbiased estimate of the gradient of the reverse KL divergence (on-policy distillation)."""
    assert tokens.teacher is not None
    return reinforce(tokens._replace(advantages=tokens.teacher - tokens.logprobs.detach()), loss)


LOSSES: dict[str, Callable[[LossInputs, Loss], TokenLoss]] = {
    "tis_mask": tis_mask,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
    "sft": sft,
    "distill": distill,
}

WITHOUT_RATIO = {"sft"}
"""Losses without importance ratios."""


def policy_loss(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the loss `loss.name` with its corrections.

    With `proximal` log-probabilities, the loss compares the learner's weights with the proximal weights instead of the
    engine's. Each token is then weighted by min(exp(proximal - behavior_logprobs), ratio_cap), because the engine sampled it
    (decoupled PPO, 2505.24298).
    """
    if tokens.proximal is None or loss.name in WITHOUT_RATIO:
        result = LOSSES[loss.name](tokens, loss)
    else:
        behaviour = _compute_ratio(tokens.proximal, tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
        result = LOSSES[loss.name](tokens._replace(behavior_logprobs=tokens.proximal), loss)
        result = result._replace(per_token=behaviour * result.per_token)
    if tokens.reference is None:
        return result
    return result._replace(per_token=result.per_token + loss.kl * estimate_divergence(tokens, loss))


def estimate_divergence(tokens: LossInputs, loss: Loss) -> Tensor:
    """Return the k3 estimate of the divergence from the reference, [S]: e^d - d - 1 with d = reference - logprobs."""
    assert tokens.reference is not None
    d = (tokens.reference - tokens.logprobs).clamp(max=MAX_LOG_RATIO)
    weight = _compute_ratio(tokens.logprobs.detach(), tokens.behavior_logprobs).clamp(max=loss.ratio_cap)
    return weight * (d.exp() - d - 1)


def _weight_by_ratio(tokens: LossInputs, ratio: Tensor, cap: float) -> TokenLoss:
    """Return the policy-gradient loss, weighted by the ratio, which is truncated at `cap`."""
    a = tokens.advantages
    return TokenLoss(-ratio.clamp(max=cap) * a * tokens.logprobs, (ratio > cap) * LossEffect.TRUNCATED, a)


def _compute_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    return (logprobs - behavior_logprobs).clamp(max=MAX_LOG_RATIO).exp()


def _or_default(setting: float | None, default: float) -> float:
    return default if setting is None else setting
