"""What a GPU says when it fails, told as what happened to the run and what to do about it. Mapped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import DistError

from swarmq.errors import LearnerError

SAFE = "nothing is lost: the next start goes on from the newest checkpoint and the batch log"


@contextmanager
def gpu_errors(doing: str) -> Iterator[None]:
    """Raises LearnerError for a GPU that has too little memory, has failed, or whose neighbours do not answer."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LearnerError(
            f"{doing}: the GPU has too little memory: {_first_line(error)}; {SAFE}. Before it, lower "
            "train.micro_batch_tokens or engine.gpu_memory_utilization, or set train.gradient_checkpointing"
        ) from error
    except torch.AcceleratorError as error:
        raise LearnerError(
            f"{doing}: the GPU failed: {_first_line(error)}; {SAFE}. Look at it with nvidia-smi and the kernel's log "
            "(Xid): one that fails again is to be reset or left out (CUDA_VISIBLE_DEVICES)"
        ) from error
    except DistError as error:
        raise LearnerError(
            f"{doing}: the ranks lost each other: {_first_line(error)}; {SAFE}. Another rank's log says which one failed first"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
