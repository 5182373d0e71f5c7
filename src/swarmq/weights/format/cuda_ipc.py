"""Memory of one GPU shared between two processes: CUDA IPC, as torch does it, written as JSON instead of a pickle.

A buffer must outlive every process that has opened it; torch counts them. Both ends need the same version of torch.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

HANDLE_START = 7
"""Of torch's description of a tensor: what comes before says its shape, type and device, which both ends know."""


def get_gpu_uuid(device: torch.device | None = None) -> str:
    """The physical GPU, by a name that every process gives it; empty where there is none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(device or torch.cuda.current_device()).uuid)


def export_handle(buffer: torch.Tensor) -> list[Any]:
    """A handle to `buffer` [bytes] uint8 on a GPU. Its owner waits for the kernels that write it before sending this."""
    _, description = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in description[HANDLE_START:]]


def open_handle(handle: list[Any], size_bytes: int, device: torch.device) -> torch.Tensor:
    """The buffer of another process, [size_bytes] uint8. Raises RuntimeError when this process may not open it."""
    parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
    index: Any = device.index  # vLLM's workers always have one
    layout = ((size_bytes,), (1,), 0)
    buffer: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, *layout, torch.UntypedStorage, torch.uint8, index, *parts
    )
    return buffer
