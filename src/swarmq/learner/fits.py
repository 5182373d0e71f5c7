"""What a policy takes of a GPU's memory, and what follows: whole on every rank, sharded, or an error before it is loaded.

Bytes per trained parameter: FP32 master weight 4, gradient 4, AdamW's two moments 8; under autocast also its BF16 copy 2.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.model import load_config

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


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of its memory."""

    total: int
    free: int


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    full: bool
    reason: str


def shape_of(source: str) -> Shape:
    """Raises LearnerError when there is no such model."""
    config: Any = load_config(source)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    return Shape(
        parameters=sum(p.numel() for p in lm.parameters()), hidden=text.hidden_size, layers=text.num_hidden_layers
    )


def learner_bytes(shape: Shape, train: Train, *, ranks: int = 1) -> int:
    """Of one GPU: state of its share of the parameters, and the largest pass."""
    per_parameter = FROZEN_BYTES if train.lora else STATE_BYTES
    half = HALF_BYTES if train.mixed_precision == "bf16" else 0
    held = shape.parameters * (per_parameter + half) // ranks
    once = KEPT_BYTES * shape.layers + LAYER_BYTES if train.gradient_checkpointing else LAYER_BYTES * shape.layers
    wide = 1 if train.mixed_precision == "bf16" else 2
    return held + wide * train.micro_batch_tokens * shape.hidden * once


def shard(source: str, train: Train) -> Sharding:
    """Whether the ranks of this process's world share out the model."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or train.sharding == "none" or train.lora:
        return Sharding(full=False, reason="one rank" if ranks == 1 else "each rank holds the whole model")
    if train.sharding == "full":
        return Sharding(full=True, reason="train.sharding asks for it")
    if not torch.cuda.is_available():
        return Sharding(full=False, reason="no GPU whose memory could be short")
    gpu = torch.cuda.get_device_properties(0).total_memory
    needed = learner_bytes(shape_of(source), train)
    said = f"the whole takes {needed / GIB:.0f} GiB of a GPU's {gpu / GIB:.0f}"
    return Sharding(full=needed > HEADROOM * gpu, reason=said)


def check(shape: Shape, train: Train, *, ranks: int, gpu: Gpu) -> str:
    """How `ranks` that share out a model fit their GPUs, in words.

    Raises LearnerError where they do not, saying how much is missing and what to change.
    """
    needed = learner_bytes(shape, train, ranks=ranks)
    others = gpu.total - gpu.free
    said = f"the learner takes about {needed / GIB:.1f} of {gpu.free / GIB:.1f} GiB, {others / GIB:.1f} are taken by others"
    if needed <= gpu.free:
        return said
    raise LearnerError(
        f"a model of {shape.parameters / 1e9:.1f} B parameters does not fit: {said}, {(needed - gpu.free) / GIB:.1f} are "
        "missing; lower engine.gpu_memory_utilization or train.micro_batch_tokens, take more GPUs (--num-gpus), "
        "or set train.cpu_offload or train.lora"
    )
