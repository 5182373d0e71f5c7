"""The optimizer `muon`: Muon for the matrices inside the layers, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from swarmq.config import Train

LEFT_TO_ADAMW = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of embeddings and language-model heads."""


def muon(parameters: Sequence[tuple[str, nn.Parameter]], train: Train) -> torch.optim.Optimizer:
    """Return Muon, whose updates are scaled to the size of AdamW's, so that both take the same learning rate (2502.16982)."""
    matrices = [p for name, p in parameters if p.ndim == 2 and not any(word in name for word in LEFT_TO_ADAMW)]
    taken = set(map(id, matrices))
    return MuonWithAdamW(matrices, [p for _, p in parameters if id(p) not in taken], train.learning_rate)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer, with one state and the parameter groups of both, Muon's first."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float) -> None:
        inner: list[torch.optim.Optimizer] = []
        if matrices:
            inner.append(torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if others:
            inner.append(torch.optim.AdamW(others, lr=lr, fused=True))
        self._inner = inner
        super().__init__([dict(group) for each in inner for group in each.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for each, group in zip(self._inner, self.param_groups, strict=True):
            # load_state_dict replaces both
            each.param_groups, each.state = [group], self.state
            each.step()
