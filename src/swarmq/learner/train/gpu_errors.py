"""Mapping of GPU errors to learner errors that say what happened and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import DistError

from swarmq.errors import LearnerError
from swarmq.learner.distributed.rank_monitor import RankMonitor

SAFE = "nothing is lost: the next start resumes from the newest checkpoint and the batch log"

# Libraries under torch, compilers and collectives raise plain RuntimeErrors that differ only in their texts.
FAILED = re.compile(r"CUDA (driver )?error|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_|Triton Error \[CUDA\]")
APART = re.compile(r"NCCL (error|communicator|operation)|\bnccl[A-Z]\w*Error|gloo/transport")
FULL = re.compile(r"out of memory|_STATUS_ALLOC_FAILED")


@contextmanager
def map_gpu_errors(doing: str) -> Iterator[None]:
    """Map errors of a GPU to LearnerError: too little memory, a failed GPU, or lost contact with other ranks. `doing`: prefix of
    the message."""
    try:
        yield
    except RuntimeError as error:  # base class of all of torch's errors
        if (explanation := _explain(error)) is None:
            raise
        raise LearnerError(f"{doing}: {explanation}") from error


def _explain(error: RuntimeError) -> str | None:
    """Return the explanation, or None for an error that does not come from a GPU."""
    text = str(error)
    if isinstance(error, DistError) or APART.search(text):
        who = RankMonitor.current.find_lost() if RankMonitor.current else ""
        return who or (
            f"the ranks lost each other: {_line(text, APART)}; {SAFE}. Another rank's log shows which rank failed first"
        )
    if not isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)) and not FAILED.search(text):
        return None
    if isinstance(error, torch.OutOfMemoryError) or FULL.search(text):
        return (
            f"the GPU has too little memory: {_line(text, FULL)}; {SAFE}. Before the next start, lower train.micro_batch_tokens or "
            "engine.gpu_memory_utilization, or set train.gradient_checkpointing, or train.context_parallel for long calls"
        )
    return (
        f"the GPU failed: {_line(text, FAILED)}; {SAFE}. Check it with nvidia-smi and the kernel log (Xid): a GPU that "
        "fails again must be reset or excluded (CUDA_VISIBLE_DEVICES)"
    )


def _line(text: str, mark: re.Pattern[str]) -> str:
    """Return the first line of the text that matches `mark`, else the first line."""
    lines = text.splitlines() or ["no reason given"]
    return next((line for line in lines if mark.search(line)), lines[0])
