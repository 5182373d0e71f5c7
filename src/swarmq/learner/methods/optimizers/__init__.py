"""Optimizers. One file for each built-in one, with a function of the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from swarmq.config import Train


class OptimizerFunction(Protocol):
    """Maker of an optimizer of all `parameters`, which are named as in the model.

    Before each step the trainer sets `lr`, `betas` and `weight_decay` of every parameter group. Everything that the optimizer
    remembers must be in its `state_dict`, because checkpoints continue from it.
    """

    def __call__(self, parameters: Sequence[tuple[str, nn.Parameter]], train: Train, /) -> Optimizer: ...
