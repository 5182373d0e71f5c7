"""Memory that training needs on a GPU and on the host. Pure: numbers in, bytes out.

Bytes per trained parameter: 4 for the FP32 master weight, 4 for the gradient, 8 for AdamW's two moments (2 if they have eight bits);
under autocast 2 for a BF16 copy; 4 for the buckets in which gradients are reduced, if several ranks hold the whole model each. With
adapters, the frozen base model takes its size in the compute dtype.

Further memory: frozen models (a reference, a teacher that no engine serves, the model under a critic), and the buffer from which weights are pushed.
Models are loaded into host memory in FP32 or their stored dtype, by rank 0 for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarmq.config import Train

TRAINED_BYTES = 8
"""Bytes per trained parameter of the master weight and its gradient."""
BUCKET_BYTES = 4
FROZEN_BYTES = 4
HALF_BYTES = 2
WHOLE_BYTES = 4
MOMENTS_BYTES = 8
QUANTISED_MOMENTS_BYTES = 2
KEPT_BYTES = 2
"""Bytes per token, hidden unit and layer that gradient checkpointing keeps: a layer's input in BF16."""
LAYER_BYTES = 70
"""Bytes per token and hidden unit of everything inside one layer, in BF16."""
GATHERED_BYTES = 10
"""Additional bytes per token of the whole pass and hidden unit, if ranks share the pass: keys and values of one layer in BF16, and
their gradients in BF16 and FP32; keys and values are assumed half as wide as hidden states."""
HEADROOM = 0.92
"""Maximum share of a GPU's memory that plans may use."""
GPU_SHARE_ENV = "SWARMQ_LEARNER_GPU_SHARE"
"""Environment variable with the share of a GPU's memory that a learner may fill with recomputable activations."""
GIB = 1 << 30


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, without its weights."""

    parameters: int
    hidden: int
    layers: int
    fans: int
    """Sum of inputs and outputs over all matrices in the layers; equals the number of parameters of adapters of rank 1."""


def suggest_less(train: Train) -> str:
    """Return the last piece of advice in the error for a model that does not fit."""
    offloaded = "train.sharding = 'full' with train.cpu_offload on two GPUs or more"
    return f"or set {offloaded}" if train.lora else f"or set train.lora, or {offloaded}"


def list_frozen_models(train: Train, initial: str) -> dict[str, str]:
    """Return the frozen models that the learner holds, by role: `reference`, `teacher`, and `critic`, the model under the critic's
    adapters, if `train` uses them; reference and critic are by default the initial model. The initial model under the policy's adapters
    and a served teacher are not among them."""
    loads = train.loss.needs_reference and (train.reference or not train.lora)
    reference = {"reference": train.reference or initial} if loads else {}
    critic = {"critic": train.critic.model or initial} if train.needs_critic else {}
    return reference | critic | ({"teacher": train.teacher} if train.teacher and not train.has_served_teacher else {})


def learner_bytes(
    shape: ModelShape, train: Train, *, ranks: int = 1, full: bool = True, judge_sizes: Sequence[int] | None = None
) -> int:
    """Return the bytes that training takes on one GPU: the state of its share of the parameters, and the largest micro-batch.

    `full`: whether the ranks shard the model; otherwise each holds the whole model. `judge_sizes`: number of parameters of each
    frozen model, by default that of the policy.
    """
    half = train.precision(cuda=True) == "bf16"
    copies = shape.parameters * HALF_BYTES // (ranks if full else 1) if half and not train.lora else 0
    units = shape.hidden * -(-train.micro_batch_tokens // train.context_parallel)
    layer, kept = layer_bytes(units, train.context_parallel), KEPT_BYTES * units
    once = kept * shape.layers + layer if train.gradient_checkpointing else layer * shape.layers
    wide = 1 if half else 2
    state = state_bytes(shape, train, ranks=ranks, full=full, judge_sizes=judge_sizes)
    return state + copies + wide * once


def layer_bytes(units: int, ranks: int = 1) -> int:
    """Return the bytes of one layer's computation for `units` (hidden size times tokens of this rank), on one of the `ranks`
    that share the pass."""
    return units * (LAYER_BYTES + (GATHERED_BYTES * ranks if ranks > 1 else 0))


def whole_bytes(shape: ModelShape, train: Train) -> int:
    """Return the bytes that a GPU needs, besides its shard, to keep all layers gathered: all weights in the compute dtype, and
    gradients in FP32."""
    computed_with = HALF_BYTES if train.precision(cuda=True) == "bf16" else WHOLE_BYTES
    return shape.parameters * computed_with + _count_trained_parameters(shape, train) * WHOLE_BYTES


def state_bytes(
    shape: ModelShape, train: Train, *, ranks: int = 1, full: bool = True, judge_sizes: Sequence[int] | None = None
) -> int:
    """Return the bytes on one GPU that are allocated between steps.

    The buffer for weight pushes, which holds all weights of the policy, is counted only without sharding: ranks that shard do
    without it if there is no room, and push weights by file. Arguments as for `learner_bytes`.
    """
    parts = ranks if full else 1
    if train.cpu_offload and parts > 1:
        return 0
    whole = HALF_BYTES * shape.parameters if parts == 1 else 0
    if ranks > parts:
        whole += BUCKET_BYTES * _count_trained_parameters(shape, train)
    frozen = sum(judge_sizes if judge_sizes is not None else [shape.parameters] * len(list_frozen_models(train, "")))
    return (_count_state_bytes(shape, train, cuda=True) + FROZEN_BYTES * frozen) // parts + whole


def host_bytes(
    shape: ModelShape, train: Train, *, here: range, ranks: int, full: bool, cuda: bool, judge_sizes: Sequence[int]
) -> int:
    """Return the largest number of bytes that the ranks `here`, among `ranks` ranks, take on a host while models are loaded or a
    checkpoint is written. Other arguments as for `learner_bytes`.

    Rank 0 of a sharded policy also gathers its weights for engines and, for checkpoints, its weights in FP32 and then the
    optimizer's moments. Adapters are merged in FP32 for checkpoints, sharded or not.
    """
    gathering = full and 0 in here
    writing = gathering or (0 in here and train.lora)
    saved = (WHOLE_BYTES if train.lora else MOMENTS_BYTES) * shape.parameters if writing else 0
    kept = (HALF_BYTES if train.precision(cuda=cuda) == "bf16" else WHOLE_BYTES) * shape.parameters if gathering else 0
    if not cuda or (full and train.cpu_offload):
        own = _count_state_bytes(shape, train, cuda=cuda)
        kept += (own + FROZEN_BYTES * sum(judge_sizes)) * len(here) // (ranks if full else 1)
    copies = int(0 in here and (full or cuda))  # on a CPU, a whole model is trained where it was loaded
    loaded = max([_count_loaded_bytes(shape, train, cuda=cuda), *(WHOLE_BYTES * each for each in judge_sizes)])
    return kept + max(loaded * copies, saved)


def _count_loaded_bytes(shape: ModelShape, train: Train, *, cuda: bool) -> int:
    """Return the bytes of the policy as loaded from its folder; the base of adapters is loaded in the compute dtype."""
    half = train.lora is not None and train.precision(cuda=cuda) == "bf16"
    return (HALF_BYTES if half else WHOLE_BYTES) * shape.parameters


def _count_state_bytes(shape: ModelShape, train: Train, *, cuda: bool) -> int:
    """Return the bytes of the policy between steps."""
    under = _count_loaded_bytes(shape, train, cuda=cuda) if train.lora else 0
    moments = QUANTISED_MOMENTS_BYTES if train.optimizer == "adamw_8bit" else MOMENTS_BYTES
    return under + (TRAINED_BYTES + moments) * _count_trained_parameters(shape, train)


def _count_trained_parameters(shape: ModelShape, train: Train) -> int:
    """Return the number of trained parameters. With adapters, every matrix in the layers is counted as if it had an adapter, whatever
    `train.lora.modules` names."""
    return train.lora.rank * shape.fans if train.lora else shape.parameters
