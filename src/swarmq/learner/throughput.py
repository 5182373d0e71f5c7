"""How much of a processor's arithmetic a step used: model FLOPs over what matrix products reach on this very device."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from swarmq.timeline import Cost, Layout

BACKWARD = 2
"""A backward pass costs two forward passes. What gradient checkpointing computes again is not counted."""


def model_flops(layouts: Sequence[Layout], cost: Cost, head: float) -> float:
    """Floating-point operations of forward and backward. `head`: forward, per token whose logits are computed."""
    forward = sum(cost.token * layout.num_tokens + head * layout.num_trained for layout in layouts)
    return (1 + BACKWARD) * (forward + cost.attention(layouts))


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square matrix product, the best of a few."""
    size, repeats = (8192, 10) if device.type == "cuda" else (256, 3)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        a @ b
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
