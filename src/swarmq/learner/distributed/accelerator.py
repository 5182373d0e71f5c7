"""The accelerator of a learner's ranks, created before a model is loaded; and the end of their process group, after training."""

from __future__ import annotations

import functools
import gc
import os
from datetime import timedelta
from typing import Any

import structlog
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

from swarmq.config import Train
from swarmq.learner.distributed.launcher_modes import refuse_modes
from swarmq.learner.distributed.processes import STORE_SOCKET_ENV, own_rank
from swarmq.learner.distributed.sharding import build_fsdp_plugin, check_collectives, is_sharding, shard_on_cpu
from swarmq.learner.memory import plan as memory_plan
from swarmq.learner.memory.ranks import check_rank_count, num_ranks

log = structlog.get_logger()

COMMAND_TIMEOUT = timedelta(days=7)
"""Maximum time that ranks wait for a command of rank 0, which may wait for rollouts for days. If a rank dies, all ranks end
sooner."""
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Timeout of collectives within a step or a checkpoint, twice the time that it takes to write a terabyte. If a GPU hangs, the
other ranks end after this time, and the next start resumes the run."""


def make_accelerator(train: Train, source: str = "") -> Accelerator:
    """Create the accelerator for the policy in `source`. The size of the policy decides whether it is sharded."""
    refuse_modes(os.environ, cuda=torch.cuda.is_available())
    serve_store()
    check_rank_count(train, num_ranks())
    shard = memory_plan.choose_sharding(source, train)
    log.info("sharding", full=shard.full, reason=shard.reason)
    plan = build_fsdp_plugin(train) if shard.full else None
    accelerator = Accelerator(
        mixed_precision=train.precision(cuda=torch.cuda.is_available()),
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plan,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # backward() divides by this number
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    if plan:
        # accelerate has set it, and the next accelerator would take it for a setting of the launcher
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        shard_on_cpu(accelerator, plan)
        check_collectives(train, accelerator.device)
    return accelerator


@functools.cache
def serve_store() -> Any:
    """Serve the store at which ranks meet, on the socket that swarmq's launcher opened, and return it. Return None on ranks
    other than 0 and under other launchers."""
    if STORE_SOCKET_ENV not in os.environ or own_rank() != 0:
        return None
    distributed: Any = torch.distributed  # the module does not export it to type checkers
    return distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=int(os.environ[STORE_SOCKET_ENV]),
    )


def can_stay_gathered(accelerator: Accelerator, train: Train, source: str) -> bool:
    """Return whether every rank has room to keep all layers of a sharded policy gathered between micro-batches.

    Raises LearnerError if the policy does not fit the free memory of this rank's GPU or of its host.
    """
    ranks, full, gpu = accelerator.num_processes, is_sharding(accelerator), None
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


def leave_group() -> None:
    """Leave the process group, if there are several ranks. No model or trainer may be in use.

    After a collective, a Gloo thread takes the GIL to release its caller's objects. Until then, a process that simply ends is
    aborted, and a DDP model that outlives all other holders of the group waits for that thread while it holds the GIL, forever.
    So models are freed first, and then the group is destroyed, which waits without the GIL.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()
