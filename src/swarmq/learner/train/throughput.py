"""Model FLOPs utilization of a step: its model FLOPs over the measured rate of matrix products on the same device."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmq.timeline import Cost, Layout


def count_model_flops(layouts: Sequence[Layout], cost: Cost, head: float) -> float:
    """Return the floating-point operations of forward and backward pass, without recomputation by gradient checkpointing.
    `head`: operations of the language-model head per token whose logits are computed, in both passes."""
    return cost.training(layouts) + head * sum(layout.num_trained for layout in layouts)


def count_head_flops(weight: Tensor) -> float:
    """Return the floating-point operations of the language-model head per token, in forward and backward pass."""
    return (3 if weight.requires_grad else 2) * 2.0 * weight.numel()


@functools.cache
def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured rate of a large square matrix product in floating-point operations per second, the best of several
    runs."""
    # smaller matrices would give a lower rate than a model's products reach
    size, repeats = (8192, 10) if device.type == "cuda" else (1024, 5)
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
