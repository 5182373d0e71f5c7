"""Decides, before a policy is loaded, whether it fits its GPUs and host, and whether ranks hold it whole or shard it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import msgspec
import structlog
import torch

from swarmq.config import Train
from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.memory import host
from swarmq.learner.memory.estimate import (
    GIB,
    HEADROOM,
    ModelShape,
    host_bytes,
    learner_bytes,
    list_frozen_models,
    suggest_less,
    whole_bytes,
)
from swarmq.learner.memory.host import HostRoom
from swarmq.learner.memory.outline import build_outline, load_config, name_setting_in_errors
from swarmq.learner.memory.ranks import check_offload, get_local_ranks, num_ranks, num_sharding_ranks
from swarmq.runtime.wording import count_of

log = structlog.get_logger()


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a GPU in bytes."""

    total: int
    free: int


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    full: bool
    reason: str


@cache
def load_shape(source: str) -> ModelShape:
    """Return the sizes of a model. Raises LearnerError if there is no such model."""
    config: Any = load_config(source)
    lm = build_outline(source, config)
    text = config.get_text_config()
    ends = [lm.get_input_embeddings().weight, lm.get_output_embeddings().weight]
    matrices = [
        (name, p.shape) for name, p in lm.named_parameters() if p.ndim > 1 and not any(p is end for end in ends)
    ]
    return ModelShape(
        parameters=sum(p.numel() for p in lm.parameters()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        fans=sum(_count_fans(name, matrix) for name, matrix in matrices),
    )


def _count_fans(name: str, matrix: Sequence[int]) -> int:
    """Return the inputs plus outputs of a matrix, twice for stacked experts with fused gates, because PEFT gives these the rank
    of two matrices."""
    *stacked, fan_out, fan_in = matrix
    return math.prod(stacked) * (fan_out + fan_in) * (2 if stacked and "gate_up" in name else 1)


def adapt_to_single_rank(train: Train) -> Train:
    """Return the settings with which a single rank repeats a step of several ranks (replay, doctor): no offload, and no sharing
    of micro-batches."""
    return msgspec.structs.replace(train, cpu_offload=False, context_parallel=1) if num_ranks() == 1 else train


def choose_sharding(source: str, train: Train) -> Sharding:
    """Decide whether the ranks shard the model. Raises LearnerError if `train.cpu_offload` is set and impossible."""
    ranks = num_sharding_ranks(train)
    check_offload(train, ranks)
    if train.cpu_offload and not torch.cuda.is_available():
        raise SetUpError(
            "train.cpu_offload: torch finds no GPU here, so everything is in host memory anyway; leave train.cpu_offload out, "
            "or check why the GPU is not found (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        )
    if ranks == 1 or train.sharding == "none":
        return Sharding(full=False, reason="one rank" if ranks == 1 else "each rank holds the whole model")
    if train.sharding == "hybrid":
        return Sharding(
            full=True,
            reason=f"train.sharding asks for it: {count_of(num_ranks() // ranks, 'replica')} on {ranks} ranks each",
        )
    if train.sharding == "full":
        return Sharding(full=True, reason="train.sharding asks for it")
    if not torch.cuda.is_available():
        return Sharding(full=False, reason="no GPU whose memory could be short")
    gpu = torch.cuda.get_device_properties(0).total_memory
    needed = learner_bytes(
        load_shape(source), train, ranks=ranks, full=False, judge_sizes=_list_frozen_sizes(source, train)
    )
    text = f"the whole model takes {needed / GIB:.0f} of a GPU's {gpu / GIB:.0f} GiB"
    return Sharding(full=needed > HEADROOM * gpu, reason=text)


def check_gpu(source: str, train: Train, *, ranks: int, full: bool, gpu: GpuMemory) -> str:
    """Check that `ranks` ranks fit their GPUs, and return a text with the needed and free memory. `full`: whether the ranks shard
    the model.

    Raises LearnerError if they do not fit, with the missing memory and what to change.
    """
    return check_shape(
        load_shape(source), train, ranks=ranks, full=full, gpu=gpu, judge_sizes=_list_frozen_sizes(source, train)
    )


def has_room_for_whole(source: str, train: Train, *, ranks: int, gpu: GpuMemory | None) -> bool:
    """Return whether a GPU has room for all weights and the whole gradient between the passes of a step, besides one rank's
    shard.

    `gpu`: None for ranks without a GPU.
    """
    if train.cpu_offload:
        return False
    if gpu is None:
        return True
    shape = load_shape(source)
    needed = learner_bytes(shape, train, ranks=ranks, judge_sizes=_list_frozen_sizes(source, train)) + whole_bytes(
        shape, train
    )
    return needed <= gpu.free


def check_shape(
    shape: ModelShape,
    train: Train,
    *,
    ranks: int,
    full: bool = True,
    gpu: GpuMemory,
    judge_sizes: Sequence[int] | None = None,
) -> str:
    """Check a model of these sizes as `check_gpu` does. `judge_sizes` as in `learner_bytes`."""
    needed = learner_bytes(shape, train, ranks=ranks, full=full, judge_sizes=judge_sizes)
    others = gpu.total - gpu.free
    text = f"the learner takes about {needed / GIB:.1f} of {gpu.free / GIB:.1f} free GiB (other processes take {others / GIB:.1f})"
    if needed <= gpu.free:
        return text
    raise LearnerError(
        f"a model of {shape.parameters / 1e9:.1f} B parameters does not fit: {text}, {(needed - gpu.free) / GIB:.1f} are "
        f"missing; lower engine.gpu_memory_utilization or train.micro_batch_tokens, take more GPUs (--num-gpus), {suggest_less(train)}"
        + (
            "; a reference (train.loss.kl), teacher (train.teacher) or critic (train.critic) takes memory, too"
            if list_frozen_models(train, "")
            else ""
        )
    )


def check_host(source: str, train: Train, *, full: bool, cuda: bool, rooms: Sequence[HostRoom] | None = None) -> None:
    """Check that this host's ranks can load their models and write checkpoints, and warn if memory is short at present. Only the
    first rank of each host checks.

    `rooms`: memory limits, measured by default. Raises LearnerError if the memory cannot suffice, with what is missing and what
    to change, because the kernel would kill the process without a message.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    here, shape, judge_sizes = get_local_ranks(), load_shape(source), _list_frozen_sizes(source, train)
    taking = partial(
        host_bytes, shape, train, here=here, ranks=num_sharding_ranks(train), cuda=cuda, judge_sizes=judge_sizes
    )
    needed = taking(full=full)
    instead = "raise the limit of the container, or use a host with more memory"
    if taking(full=True) < needed:
        instead += "; or set train.sharding = 'full'"
    if full and train.cpu_offload:
        instead += "; or leave train.cpu_offload out, or spread the ranks over several hosts"
    if judge_sizes:
        instead += "; a reference (train.loss.kl), teacher (train.teacher) or critic (train.critic) takes memory, too"
    for room in host.measure_rooms() if rooms is None else rooms:
        total = f"of {room.total / GIB:.1f}"
        text = f"{count_of(len(here), 'rank on this host takes', 'ranks on this host take')} about {needed / GIB:.1f} GiB of host memory; {room.source} has "
        if room.bound is not None and needed > room.bound:
            raise LearnerError(
                f"a model of {shape.parameters / 1e9:.1f} B parameters does not fit the host: {text}{room.bound / GIB:.1f} "
                f"{total} for them, {(needed - room.bound) / GIB:.1f} are missing; {instead}"
            )
        if needed > room.free:
            reason = f"{text}{room.free / GIB:.1f} {total} free, {(needed - room.free) / GIB:.1f} are missing: the kernel may kill a rank"
            log.warning("host_memory_short", reason=reason, action=instead)


def _list_frozen_sizes(source: str, train: Train) -> list[int]:
    return [_load_frozen_shape(role, judge).parameters for role, judge in list_frozen_models(train, source).items()]


def _load_frozen_shape(role: str, source: str) -> ModelShape:
    with name_setting_in_errors(f"train.{role}"):
        return load_shape(source)
