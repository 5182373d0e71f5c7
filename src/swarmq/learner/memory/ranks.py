"""The ranks of a learner, and the settings that depend on their number. Imports no torch."""

from __future__ import annotations

import os

from swarmq.config import Train
from swarmq.errors import SetUpError
from swarmq.runtime.wording import count_of


def num_ranks() -> int:
    """Return the number of ranks of this learner."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_ranks() -> range:
    """Return the indices of the ranks on this process's host."""
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks())))


def num_sharding_ranks(train: Train) -> int:
    """Return the number of ranks that share one sharded copy of a model."""
    return len(get_local_ranks()) if train.sharding == "hybrid" else num_ranks()


def check_rank_count(train: Train, ranks: int) -> None:
    """Raise LearnerError unless the number of ranks is a multiple of `train.context_parallel`."""
    if ranks % train.context_parallel:
        raise SetUpError(
            f"train.context_parallel: {train.context_parallel} ranks share each pass, but the learner has {count_of(ranks, 'rank')}: give it a "
            "multiple of that number (GPUs under `swarmq up`; --num-gpus or accelerate launch --num_processes if it is started by "
            "hand), or set train.context_parallel to a number that divides its ranks"
        )


def check_offload(train: Train, ranks: int) -> None:
    """Raise LearnerError if `train.cpu_offload` is set and there is only one rank."""
    if ranks == 1 and train.cpu_offload:
        raise SetUpError(
            "train.cpu_offload: a single rank keeps the whole model on its GPU and cannot offload; give the learner two ranks or more "
            "(GPUs under `swarmq up`; --num-gpus or accelerate launch --num_processes if it is started by hand), "
            "or leave train.cpu_offload out"
        )
