"""What learning takes of a GPU's memory. Pure: numbers in, bytes out.

Bytes per trained parameter: FP32 master weight 4, gradient 4, AdamW's two moments 8; under autocast also its BF16 copy 2.
"""

from __future__ import annotations

import msgspec

from swarmq.config import Train

STATE_BYTES = 16
FROZEN_BYTES = 4
HALF_BYTES = 2
KEPT_BYTES = 2
"""Per token, hidden unit and layer: a layer's input in BF16, kept by gradient checkpointing."""
LAYER_BYTES = 70
"""Per token and hidden unit: everything inside one layer, in BF16."""
HEADROOM = 0.92
"""Of a GPU's memory may be planned with."""
GIB = 1 << 30


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model, without its weights."""

    parameters: int
    hidden: int
    layers: int


def learner_bytes(shape: Shape, train: Train, *, ranks: int = 1) -> int:
    """Of one GPU: state of its share of the parameters, and the largest pass."""
    half = HALF_BYTES if train.mixed_precision == "bf16" else 0
    copies = shape.parameters * half // ranks
    once = KEPT_BYTES * shape.layers + LAYER_BYTES if train.gradient_checkpointing else LAYER_BYTES * shape.layers
    wide = 1 if train.mixed_precision == "bf16" else 2
    return state_bytes(shape, train, ranks=ranks) + copies + wide * train.micro_batch_tokens * shape.hidden * once


def state_bytes(shape: Shape, train: Train, *, ranks: int = 1) -> int:
    """Of one GPU: what stays there between steps."""
    if train.cpu_offload:
        return 0
    return shape.parameters * (FROZEN_BYTES if train.lora else STATE_BYTES) // ranks
