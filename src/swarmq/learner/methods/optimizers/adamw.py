"""The optimizer `adamw`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swarmq.config import Train


def adamw(parameters: Sequence[tuple[str, nn.Parameter]], train: Train) -> torch.optim.Optimizer:
    """Return AdamW (1711.05101)."""
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=train.learning_rate, fused=True)
