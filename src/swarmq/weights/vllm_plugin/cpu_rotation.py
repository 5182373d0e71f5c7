"""Runs inside vLLM: fixes positions in multi-head latent attention (DeepSeek, GLM-4.7-Flash) on a CPU.

Its queries [T, heads, size] are slices of larger heads. vLLM's kernel (0.32) takes them for whole ones, so log-probabilities are off by
nats. This patch rotates such queries with torch; those of all other models go to the kernel, as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

Rotated = tuple[torch.Tensor, torch.Tensor | None]
PATCH_MARK = "swarmq_rotates"


def register() -> None:
    """Patch this process if it computes on a CPU."""
    stock = RotaryEmbedding.forward_cpu
    if current_platform.is_cpu() and not hasattr(stock, PATCH_MARK):
        RotaryEmbedding.forward_cpu = _wrap(stock)


def _wrap(stock: Callable[..., Rotated]) -> Callable[..., Rotated]:
    @functools.wraps(stock)
    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Rotated:
        rotate = stock if query.ndim == 2 else RotaryEmbedding.forward_native
        return rotate(self, positions, query, key)

    setattr(forward_cpu, PATCH_MARK, True)
    return forward_cpu
