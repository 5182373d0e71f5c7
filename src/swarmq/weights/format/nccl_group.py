"""An NCCL group of the learner and all workers of one engine, through vLLM's NCCL wrapper on both ends.

If a member dies during a broadcast, the other GPUs wait for it, so the learner aborts after a timeout.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import torch

from swarmq.errors import EngineError

POLL_S = 0.001
RENDEZVOUS_TIMEOUT_S = 60
LEARNER_RANK = 0
"""The learner's rank; workers have ranks from 1 on."""


class NcclGroup:
    """One member's end of the group; `join_group` creates it."""

    def __init__(self, communicator: Any, device: torch.device) -> None:
        self._communicator = communicator
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def broadcast(self, buffer: torch.Tensor, *, timeout_s: float = 600.0) -> None:
        """Broadcast the learner's `buffer` into the buffers of all members. Raises EngineError on a timeout, which destroys the
        group."""
        self._stream.wait_stream(torch.cuda.current_stream())
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._communicator.broadcast(buffer, src=LEARNER_RANK, stream=self._stream)
            done.record()
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                self.destroy()
                raise EngineError(f"a broadcast of weights did not end within {timeout_s:g} s: its peer may be dead")
            time.sleep(POLL_S)

    def destroy(self) -> None:
        self._communicator.destroy()


@functools.cache
def get_nccl_version() -> str:
    """Return the version of the NCCL library that vLLM's wrapper loads in this process; "" if it finds none."""
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary  # noqa: PLC0415 - an extra, and slow

        return str(NCCLLibrary().ncclGetVersion())
    except Exception:
        return ""


def join_group(address: str, port: int, *, rank: int, world_size: int, device: torch.device) -> NcclGroup:
    """Join the group, and return when all members have joined. Rank 0, the learner, listens at `address`."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415 - an extra, and slow
    from vllm.distributed.utils import StatelessProcessGroup  # noqa: PLC0415

    try:
        met = StatelessProcessGroup.create(
            host=address, port=port, rank=rank, world_size=world_size, store_timeout=RENDEZVOUS_TIMEOUT_S
        )
        with _unpin_nccl_settings():
            communicator = PyNcclCommunicator(met, device=device)
    except Exception as error:  # sockets, stores and NCCL raise many kinds of errors
        raise EngineError(f"learner and engine did not meet at {address}:{port}: {error}") from error
    if communicator.disabled:
        raise EngineError("vLLM's communicator is disabled in this process, so its broadcasts would do nothing")
    return NcclGroup(communicator, device)


def _unpin_nccl_settings() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, unset the NCCL settings that vLLM (since 0.32) makes for its own communicators, because the other end
    would not have them."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env  # noqa: PLC0415 - an extra, and slow
    except ImportError:
        return contextlib.nullcontext()
    unpinned: contextlib.AbstractContextManager[Any] = unpinned_nccl_env()
    return unpinned
