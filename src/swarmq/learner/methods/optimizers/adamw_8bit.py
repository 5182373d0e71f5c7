"""The optimizer `adamw_8bit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from swarmq.config import Train


def adamw_8bit(parameters: Sequence[tuple[str, nn.Parameter]], train: Train) -> Optimizer:
    """Return AdamW whose two moments have eight bits in parameters of at least 4,096 numbers (2110.02861), by bitsandbytes."""
    from bitsandbytes.optim.adamw import AdamW8bit  # noqa: PLC0415 - an extra

    class PlainState(AdamW8bit):
        def state_dict(self) -> dict[str, Any]:
            # bitsandbytes nests tensors to hide them from FSDP, and loads them in either form
            return Optimizer.state_dict(self)

    made: Optimizer = PlainState([parameter for _, parameter in parameters], lr=train.learning_rate)  # type: ignore[no-untyped-call]
    return made
