"""Policy losses per token: what a loss gets and returns. One file for each built-in loss, with a function of the file's name.

logprobs, behavior_logprobs: log-probability under the learner's and the engine's weights;
rho = exp(logprobs - behavior_logprobs); A: advantage. `logprobs` carries the gradient; everything else is constant.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from swarmq.config import Loss
from swarmq.learner.methods.loss_effects import LossEffect

MAX_LOG_RATIO = 20.0
"""Limit of log-ratios: exp() of a larger one overflows in later computations, and the token is broken in any case."""


class LossInputs(NamedTuple):
    """Inputs of a loss for the S trained tokens of a micro-batch. The tokens of a model call are all there, in their order."""

    logprobs: Tensor  # [S] float32, with gradient
    behavior_logprobs: Tensor  # [S] float32
    advantages: Tensor  # [S] float32
    calls: Tensor  # [S] int64, which model call of the pass
    num_calls: int
    proximal: Tensor | None = None  # [S] float32, log-probability before the first optimizer step of this batch
    reference: Tensor | None = None  # [S] float32, under the reference model
    teacher: Tensor | None = None  # [S] float32, under the teacher
    entropies: Tensor | None = (
        None  # [S] float32, of the learner's distribution of each token, in nats, without gradient
    )
    candidates: Tensor | None = (
        None  # [S, K] float32, with gradient: log-probability of each of the teacher's K likeliest tokens
    )
    teacher_candidates: Tensor | None = None  # [S, K] float32, the same under the teacher; -inf where it names fewer
    spans: Tensor | None = (
        None  # [S] int64: tokens of one span of text, whose `teacher` values only count in sum (teacher_tokenizer)
    )
    held: Tensor | None = (
        None  # [S] bool, sampled under a grammar: behavior_logprobs is normalised over the tokens that the grammar allowed
    )


class TokenLoss(NamedTuple):
    per_token: Tensor  # [S]
    effects: Tensor  # [S] int64, effect on the policy gradient (loss_effects.py)
    advantages: Tensor | None  # [S] advantages that the loss used, detached; None if it uses none

    @classmethod
    def whole(cls, per_token: Tensor, advantages: Tensor | None = None) -> TokenLoss:
        """Return the result of a loss that neither masks, clips nor truncates any token."""
        return cls(per_token, torch.zeros_like(per_token, dtype=torch.int64), advantages)


class LossFunction(Protocol):
    """A loss. It returns the same for a token whatever other model calls are in the micro-batch, and keeps no state."""

    def __call__(self, tokens: LossInputs, loss: Loss, /) -> TokenLoss: ...


def compute_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    return (logprobs - behavior_logprobs).clamp(max=MAX_LOG_RATIO).exp()


def weight_by_ratio(tokens: LossInputs, ratio: Tensor, cap: float) -> TokenLoss:
    """Return the policy-gradient loss, weighted by the ratio, which is truncated at `cap`."""
    a = tokens.advantages
    return TokenLoss(-ratio.clamp(max=cap) * a * tokens.logprobs, (ratio > cap) * LossEffect.TRUNCATED, a)


def or_default(setting: float | None, default: float) -> float:
    return default if setting is None else setting
