"""Runs inside vLLM: fixes the temperature of drafts on a CPU, and steps in which no request has one.

Without Triton, vLLM (0.32) expands the temperatures of a batch to its drafts into a copy that it discards, so drafts are judged, and their
tokens sampled, at whatever temperature lies in memory. This patch expands them with torch. And vLLM looks for the largest top-k of all drafts
where there are none, which ends the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def register() -> None:
    """Patch this process if it computes on a CPU."""
    if current_platform.is_cpu() and rejection_sampler.expand_batch_to_tokens is not expand:
        rejection_sampler.expand_batch_to_tokens = expand
        rejection_sampler.apply_sampling_constraints = _wrap_constraints(rejection_sampler.apply_sampling_constraints)


def expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Replace vLLM's `expand_batch_to_tokens`: return each request's value once for each of its drafts [num_tokens].

    `cu_num_tokens`: number of drafts up to and including each request's. Values `replace_from` become `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


def _wrap_constraints(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def apply_sampling_constraints(logits: torch.Tensor, *rest: Any, **fields: Any) -> torch.Tensor:
        return stock(logits, *rest, **fields) if len(logits) else logits

    return apply_sampling_constraints
