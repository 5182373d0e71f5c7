"""What learning takes of a GPU's memory, and of the host's. Pure: numbers in, bytes out.

Bytes per trained parameter: FP32 master weight 4, gradient 4, AdamW's two moments 8; under autocast also its BF16 copy 2; where
several ranks hold the whole model each, gradients are added up over them in buckets, 4. What adapters are trained in is
there once, in the type that layers compute in, and no parameter of it is trained.
Beside them: models that judge (a reference, a teacher that no engine serves), and the buffer that weights are pushed from.

Models are loaded in host memory, in FP32 or what they are kept in: by every rank that holds the whole of them, else by rank 0 for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarmq.config import Train

STATE_BYTES = 16
BUCKET_BYTES = 4
FROZEN_BYTES = 4
HALF_BYTES = 2
WHOLE_BYTES = 4
MOMENTS_BYTES = 8
KEPT_BYTES = 2
"""Per token, hidden unit and layer: a layer's input in BF16, kept by gradient checkpointing."""
LAYER_BYTES = 70
"""Per token and hidden unit: everything inside one layer, in BF16."""
GATHERED_BYTES = 10
"""Per token of the whole pass and hidden unit, where ranks share it: one layer's keys and values in BF16, and their gradients in
BF16 and FP32, if they are half as wide as hidden states."""
HEADROOM = 0.92
"""Share of a GPU's memory that may be planned with."""
GPU_SHARE = "SWARMQ_LEARNER_GPU_SHARE"
"""Environment variable: the share of its GPU's memory that a learner may fill with what it could do without."""
GIB = 1 << 30


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model, without its weights."""

    parameters: int
    hidden: int
    layers: int
    fans: int
    """Inputs and outputs of every matrix in the layers, added up: so many parameters have adapters of rank 1."""


def or_less(train: Train) -> str:
    """The last resort of an error that says what to do where a model does not fit."""
    offloaded = "train.sharding = 'full' with train.cpu_offload on two GPUs or more"
    return f"or set {offloaded}" if train.lora else f"or set train.lora, or {offloaded}"


def judges(train: Train, initial: str) -> dict[str, str]:
    """The frozen models that the learner holds: `reference`, by default the initial model, and `teacher`; each only where
    `train` has a use for it. The initial model under adapters is not among them, nor is a teacher that an engine serves."""
    loads = train.loss.kl and (train.reference or not train.lora)
    reference = {"reference": train.reference or initial} if loads else {}
    return reference | ({"teacher": train.teacher} if train.teacher and not train.teacher_url else {})


def learner_bytes(
    shape: Shape, train: Train, *, ranks: int = 1, full: bool = True, judged_by: Sequence[int] | None = None
) -> int:
    """Of one GPU: state of its share of the parameters, and the largest pass.

    `ranks` share the model out, or hold the whole of it each where the sharding is not `full`.
    `judged_by`: parameters of each frozen model; by default they are as large as the policy.
    """
    half = train.precision(cuda=True) == "bf16"
    copies = shape.parameters * HALF_BYTES // (ranks if full else 1) if half and not train.lora else 0
    units = shape.hidden * -(-train.micro_batch_tokens // train.context_parallel)
    layer, kept = layer_bytes(units, train.context_parallel), KEPT_BYTES * units
    once = kept * shape.layers + layer if train.gradient_checkpointing else layer * shape.layers
    wide = 1 if half else 2
    state = state_bytes(shape, train, ranks=ranks, full=full, judged_by=judged_by)
    return state + copies + wide * once


def layer_bytes(units: int, ranks: int = 1) -> int:
    """What one layer computes for `units` (hidden size times tokens of this rank), on one of the `ranks` that share the pass."""
    return units * (LAYER_BYTES + (GATHERED_BYTES * ranks if ranks > 1 else 0))


def whole_bytes(shape: Shape, train: Train) -> int:
    """Of a GPU with a share of the parameters, where layers stay gathered: all weights as computed with, gradients in FP32."""
    computed_with = HALF_BYTES if train.precision(cuda=True) == "bf16" else WHOLE_BYTES
    return shape.parameters * computed_with + _trained(shape, train) * WHOLE_BYTES


def state_bytes(
    shape: Shape, train: Train, *, ranks: int = 1, full: bool = True, judged_by: Sequence[int] | None = None
) -> int:
    """Of one GPU: what stays there between steps.

    The buffer of pushes is a policy's whole weights. Ranks that share a policy out do without where there is no room:
    weights go by file then.
    """
    parts = ranks if full else 1
    if train.cpu_offload and parts > 1:
        return 0
    whole = HALF_BYTES * shape.parameters if parts == 1 else 0
    if ranks > parts:
        whole += BUCKET_BYTES * _trained(shape, train)
    frozen = sum(judged_by if judged_by is not None else [shape.parameters] * len(judges(train, "")))
    return (_own_bytes(shape, train, cuda=True) + FROZEN_BYTES * frozen) // parts + whole


def host_bytes(
    shape: Shape, train: Train, *, here: range, ranks: int, full: bool, cuda: bool, judged_by: Sequence[int]
) -> int:
    """Of the memory of a host that has the ranks `here` of all `ranks`, at the most: when models are loaded, or when a
    checkpoint is written. Other arguments as `learner_bytes` has them.

    Rank 0 of those that share a policy out also gathers its weights for engines and, for checkpoints, in FP32 and the optimizer's
    moments, one after the other. What adapters add is merged for checkpoints in FP32, whoever holds the model.
    """
    gathering = full and 0 in here
    writing = gathering or (0 in here and train.lora)
    saved = (WHOLE_BYTES if train.lora else MOMENTS_BYTES) * shape.parameters if writing else 0
    kept = (HALF_BYTES if train.precision(cuda=cuda) == "bf16" else WHOLE_BYTES) * shape.parameters if gathering else 0
    if not cuda or (full and train.cpu_offload):
        own = _own_bytes(shape, train, cuda=cuda)
        kept += (own + FROZEN_BYTES * sum(judged_by)) * len(here) // (ranks if full else 1)
    copies = int(gathering) if full else len(here) if cuda else 0  # which stay what they are on a CPU
    loaded = max([_loaded_bytes(shape, train, cuda=cuda), *(WHOLE_BYTES * each for each in judged_by)])
    return kept + max(loaded * copies, saved)


def _loaded_bytes(shape: Shape, train: Train, *, cuda: bool) -> int:
    """Of the policy as its folder has it: what adapters are trained in is loaded as layers compute in it."""
    half = train.lora is not None and train.precision(cuda=cuda) == "bf16"
    return (HALF_BYTES if half else WHOLE_BYTES) * shape.parameters


def _own_bytes(shape: Shape, train: Train, *, cuda: bool) -> int:
    """Of the policy between steps."""
    under = _loaded_bytes(shape, train, cuda=cuda) if train.lora else 0
    return under + STATE_BYTES * _trained(shape, train)


def _trained(shape: Shape, train: Train) -> int:
    """Parameters; with adapters, those that every matrix in the layers would have, whichever `train.lora.modules` names."""
    return train.lora.rank * shape.fans if train.lora else shape.parameters
