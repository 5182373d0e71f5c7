"""The loss `distill`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarmq.config import Loss
from swarmq.learner.methods.losses import LossInputs, TokenLoss
from swarmq.learner.methods.losses.reinforce import reinforce

ABSENT = -100.0
"""Log-probability of a candidate that the teacher does not name, under both models: it adds nothing to any divergence."""
MAX_LOG_SUM = -1e-7
"""Limit of the log of the candidates' summed probability, so that the rest keeps a finite logarithm (as in TRL)."""


def distill(tokens: LossInputs, loss: Loss) -> TokenLoss:
    """Return the policy gradient whose advantage is the teacher's log-probability minus the learner's, an unbiased estimate of
    the gradient of the reverse KL divergence (on-policy distillation); if the teacher has another tokenizer, of spans of text. With `top_k`, the divergence over the teacher's likeliest tokens
    and the rest."""
    if loss.top_k:
        return TokenLoss.whole(compare_candidates(tokens, loss.distill_beta))
    assert tokens.teacher is not None
    gaps = tokens.teacher - tokens.logprobs.detach()
    if tokens.spans is not None:
        # the log-probability of a span is the sum over its tokens, and the gradient of that sum reaches each of them
        gaps = torch.zeros_like(gaps).index_add_(0, tokens.spans, gaps)[tokens.spans]
    return reinforce(tokens._replace(advantages=gaps), loss)


def compare_candidates(tokens: LossInputs, beta: float) -> Tensor:
    """Return, for each token, the generalized Jensen-Shannon divergence (2306.13649) of the distributions q of the teacher and p of the
    learner over the teacher's candidates and the rest: KL(q, p) for beta = 0, KL(p, q) for beta = 1, else
    beta KL(q, m) + (1 - beta) KL(p, m) with m = (1 - beta) p + beta q."""
    assert tokens.candidates is not None
    assert tokens.teacher_candidates is not None
    there = tokens.teacher_candidates > -math.inf
    p, q = (_add_rest(torch.where(there, each, ABSENT)) for each in (tokens.candidates, tokens.teacher_candidates))
    if beta == 0:
        return _divergence(q, p)
    if beta == 1:
        return _divergence(p, q)
    mixture = torch.logaddexp(p + math.log1p(-beta), q + math.log(beta))
    return beta * _divergence(q, mixture) + (1 - beta) * _divergence(p, mixture)


def _add_rest(logprobs: Tensor) -> Tensor:
    """Return [S, K + 1] log-probabilities with that of all other tokens together."""
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_SUM)
    return torch.cat([logprobs, (-total.expm1()).log()], -1)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
