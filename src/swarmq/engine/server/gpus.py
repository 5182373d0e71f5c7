"""The GPUs of this host that we may use, and their memory, as the driver's own tool tells; without loading anything."""

from __future__ import annotations

import os
import shutil
import subprocess

import msgspec

from swarmq.runtime.logs import log

QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
ORDER_ENV = "CUDA_DEVICE_ORDER"
NVIDIA_SMI_ORDER = "PCI_BUS_ID"
"""How the driver's tool counts; CUDA begins with the fastest."""
QUERY_TIMEOUT_S = 30.0
MIB = 1 << 20


class GpuCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of its memory."""

    total: int
    free: int


def find_visible_gpus() -> list[GpuCapacity]:
    """In the order of `$CUDA_VISIBLE_DEVICES`; none where there is no driver.

    Where some are left out, the variable names the others from here on, so that their numbers are those of this list. What this process
    starts counts GPUs as the driver's tool does, unless `$CUDA_DEVICE_ORDER` is set.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    said = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    if said.returncode:
        return []
    os.environ.setdefault(ORDER_ENV, NVIDIA_SMI_ORDER)
    gpus = parse_nvidia_smi(said.stdout, os.environ.get(VISIBLE_ENV))
    known = {name: gpu for name, gpu in gpus.items() if gpu is not None}
    for name in gpus.keys() - known.keys():
        log.warning(
            "gpu_left_out", gpu=name, reason="nvidia-smi does not report its memory, so nothing is placed on it"
        )
    if known and len(known) < len(gpus):
        os.environ[VISIBLE_ENV] = ",".join(known)
    return list(known.values())


def parse_nvidia_smi(said: str, visible: str | None) -> dict[str, GpuCapacity | None]:
    """By name, from the tool's lines; None where it does not tell the memory. `visible`: numbers or uuids separated by commas;
    None for all."""
    gpus: dict[str, GpuCapacity | None] = {}
    for line in said.splitlines():
        index, uuid, *memory = (field.strip() for field in line.split(","))
        gpus[index] = gpus[uuid] = _parse_memory(*memory)
    wanted = (
        [name for name in gpus if name.isdecimal()]
        if visible is None
        else [name.strip() for name in visible.split(",")]
    )
    return {name: gpus[name] for name in wanted if name in gpus}


def _parse_memory(total: str, free: str) -> GpuCapacity | None:
    """Of memory that the host shares, and of a GPU that is in trouble, the tool says `[N/A]` and the like."""
    if not total.isdecimal() or not free.isdecimal():
        return None
    return GpuCapacity(total=int(total) * MIB, free=int(free) * MIB)
