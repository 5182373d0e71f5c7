"""The visible GPUs of this host and their memory, read from nvidia-smi."""

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
"""GPU order of nvidia-smi; CUDA's default order begins with the fastest."""
QUERY_TIMEOUT_S = 30.0
MIB = 1 << 20


class GpuCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Total and free memory of a GPU in bytes."""

    total: int
    free: int


def find_visible_gpus() -> list[GpuCapacity]:
    """Return the visible GPUs in the order of `$CUDA_VISIBLE_DEVICES`; none without a driver.

    GPUs of unknown memory are left out. `$CUDA_VISIBLE_DEVICES` is then set to the returned GPUs, so that child processes number
    GPUs as in the returned list. Child processes order GPUs like nvidia-smi unless `$CUDA_DEVICE_ORDER` is set.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    result = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False)
    if result.returncode:
        return []
    os.environ.setdefault(ORDER_ENV, NVIDIA_SMI_ORDER)
    gpus = parse_nvidia_smi(result.stdout, os.environ.get(VISIBLE_ENV))
    known = {name: gpu for name, gpu in gpus.items() if gpu is not None}
    for name in gpus.keys() - known.keys():
        log.warning(
            "gpu_left_out", gpu=name, reason="nvidia-smi does not report its memory, so nothing is placed on it"
        )
    if known and len(known) < len(gpus):
        os.environ[VISIBLE_ENV] = ",".join(known)
    return list(known.values())


def parse_nvidia_smi(output: str, visible: str | None) -> dict[str, GpuCapacity | None]:
    """Parse nvidia-smi's lines into capacity by GPU name; None for unknown memory. `visible`: comma-separated indices or uuids;
    None: all."""
    gpus: dict[str, GpuCapacity | None] = {}
    for line in output.splitlines():
        index, uuid, *memory = (field.strip() for field in line.split(","))
        gpus[index] = gpus[uuid] = _parse_memory(*memory)
    wanted = (
        [name for name in gpus if name.isdecimal()]
        if visible is None
        else [name.strip() for name in visible.split(",")]
    )
    return {name: gpus[name] for name in wanted if name in gpus}


def _parse_memory(total: str, free: str) -> GpuCapacity | None:
    """Return a GPU's capacity, or None if nvidia-smi prints no number (`[N/A]` for shared memory or a faulty GPU)."""
    if not total.isdecimal() or not free.isdecimal():
        return None
    return GpuCapacity(total=int(total) * MIB, free=int(free) * MIB)
