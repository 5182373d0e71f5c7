"""The GPUs of this host that we may use, and their memory, as the driver's own tool tells; without loading anything."""

from __future__ import annotations

import os
import shutil
import subprocess

import msgspec

QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
ASK_S = 30.0
MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of its memory."""

    total: int
    free: int


def visible_gpus() -> list[Gpu]:
    """In the order of `$CUDA_VISIBLE_DEVICES`; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    said = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=ASK_S, check=False)
    return chosen(said.stdout, os.environ.get("CUDA_VISIBLE_DEVICES")) if said.returncode == 0 else []


def chosen(said: str, visible: str | None) -> list[Gpu]:
    """From the tool's lines. `visible`: numbers or uuids separated by commas; None for all."""
    gpus: dict[str, Gpu] = {}
    for line in said.splitlines():
        index, uuid, total, free = (field.strip() for field in line.split(","))
        gpus[index] = gpus[uuid] = Gpu(total=int(total) * MIB, free=int(free) * MIB)
    wanted = [name for name in gpus if name.isdecimal()] if visible is None else visible.split(",")
    return [gpus[name.strip()] for name in wanted if name.strip() in gpus]
