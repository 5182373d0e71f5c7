"""GPU memory shared between two processes: CUDA IPC handles like torch's, but sent as JSON instead of pickle.

A buffer must exist as long as another process has it open; torch counts these processes. Both ends need the same version of
torch.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

HANDLE_START = 7
"""Index of the first IPC field in torch's description of a tensor; the fields before it (shape, dtype, device) are known to both
ends."""


def get_gpu_uuid(device: torch.device | None = None) -> str:
    """Return the uuid of the physical GPU, the same in every process; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(device or torch.cuda.current_device()).uuid)


def export_handle(buffer: torch.Tensor) -> list[Any]:
    """Return a handle to `buffer` [bytes] uint8 on a GPU. The caller must wait for the kernels that write the buffer before it
    sends the handle."""
    _, description = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in description[HANDLE_START:]]


def open_handle(handle: list[Any], size_bytes: int, device: torch.device) -> torch.Tensor:
    """Open another process's buffer as [size_bytes] uint8. Raises RuntimeError if this process may not open it."""
    parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle]
    index: Any = device.index  # vLLM's workers always have one
    layout = ((size_bytes,), (1,), 0)
    buffer: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, *layout, torch.UntypedStorage, torch.uint8, index, *parts
    )
    return buffer
