"""The accelerator of a learner's ranks, created before a model is loaded."""

from __future__ import annotations

import os
from datetime import timedelta

import structlog
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

from swarmq.config import Train
from swarmq.learner.distributed.launcher_modes import refuse_modes
from swarmq.learner.distributed.rendezvous import join_group
from swarmq.learner.distributed.send_from_rank0 import send_model_files
from swarmq.learner.distributed.sharding import build_fsdp_plugin, is_sharding, replicate_shards, shard_on_cpu
from swarmq.learner.memory import plan as memory_plan
from swarmq.learner.memory.estimate import list_frozen_models
from swarmq.learner.memory.ranks import check_rank_count, num_ranks, num_sharding_ranks

log = structlog.get_logger()

COMMAND_TIMEOUT = timedelta(days=7)
"""Maximum time that ranks wait for a command of rank 0, which may wait for rollouts for days. If a rank dies, all ranks end
sooner."""


def make_accelerator(train: Train, source: str = "") -> Accelerator:
    """Create the accelerator for the policy in `source`. The size of the policy decides whether it is sharded."""
    refuse_modes(os.environ, cuda=torch.cuda.is_available())
    check_rank_count(train, num_ranks())
    if torch.cuda.is_available() and num_ranks() > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_group()
    for each in filter(None, (source, *list_frozen_models(train, source).values(), train.teacher_tokenizer)):
        send_model_files(each)
    shard = memory_plan.choose_sharding(source, train)
    log.info("sharding", full=shard.full, reason=shard.reason)
    plan = build_fsdp_plugin(train) if shard.full else None
    accelerator = Accelerator(
        mixed_precision=train.precision(cuda=torch.cuda.is_available()),
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plan,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # backward() divides by this number
    )
    if plan:
        # accelerate has set it, and the next accelerator would take it for a setting of the launcher
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        shard_on_cpu(accelerator, plan)
        if (ranks := num_sharding_ranks(train)) < num_ranks():
            replicate_shards(accelerator, ranks)
    return accelerator


def can_stay_gathered(accelerator: Accelerator, train: Train, source: str) -> bool:
    """Return whether every rank has room to keep all layers of a sharded policy gathered between micro-batches.

    Raises LearnerError if the policy does not fit the free memory of this rank's GPU or of its host.
    """
    ranks, full, gpu = num_sharding_ranks(train), is_sharding(accelerator), None
    if accelerator.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(accelerator.device)
        gpu = memory_plan.GpuMemory(total=total, free=free)
        log.info("memory", fits=memory_plan.check_gpu(source, train, ranks=ranks, full=full, gpu=gpu))
    memory_plan.check_host(source, train, full=full, cuda=gpu is not None)
    if not full:
        return False
    roomy = torch.tensor(
        [memory_plan.has_room_for_whole(source, train, ranks=ranks, gpu=gpu)], device=accelerator.device
    )
    held = bool(accelerator.gather(roomy).all())  # all ranks must decide alike, or they wait for each other forever
    log.info("sharded_layers", stay_gathered=held)
    return held
