"""The GPUs of this host that we may use, and their memory, as the driver's own tool tells; without loading anything."""

from __future__ import annotations

import os
import shutil
import subprocess

import msgspec

from swarmq.runtime.logs import log

QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
AS_THE_TOOL = "PCI_BUS_ID"
"""How the driver's tool counts; CUDA begins with the fastest."""
ASK_S = 30.0
MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of its memory."""

    total: int
    free: int


def visible_gpus() -> list[Gpu]:
    """In the order of `$CUDA_VISIBLE_DEVICES`; none where there is no driver.

    Where some are left out, the variable names the others from here on, so that their numbers are those of this list. What this process
    starts counts GPUs as the driver's tool does, unless `$CUDA_DEVICE_ORDER` is set.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    said = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=ASK_S, check=False)
    if said.returncode:
        return []
    os.environ.setdefault(ORDER, AS_THE_TOOL)
    gpus = chosen(said.stdout, os.environ.get(VISIBLE))
    known = {name: gpu for name, gpu in gpus.items() if gpu is not None}
    for name in gpus.keys() - known.keys():
        log.warning("gpu_left_out", gpu=name, why="nvidia-smi does not tell its memory, and no plan is made for it")
    if known and len(known) < len(gpus):
        os.environ[VISIBLE] = ",".join(known)
    return list(known.values())


def chosen(said: str, visible: str | None) -> dict[str, Gpu | None]:
    """By name, from the tool's lines; None where it does not tell the memory. `visible`: numbers or uuids separated by commas;
    None for all."""
    gpus: dict[str, Gpu | None] = {}
    for line in said.splitlines():
        index, uuid, *memory = (field.strip() for field in line.split(","))
        gpus[index] = gpus[uuid] = _gpu(*memory)
    wanted = (
        [name for name in gpus if name.isdecimal()]
        if visible is None
        else [name.strip() for name in visible.split(",")]
    )
    return {name: gpus[name] for name in wanted if name in gpus}


def _gpu(total: str, free: str) -> Gpu | None:
    """Of memory that the host shares, and of a GPU that is in trouble, the tool says `[N/A]` and the like."""
    if not total.isdecimal() or not free.isdecimal():
        return None
    return Gpu(total=int(total) * MIB, free=int(free) * MIB)
