"""The visible GPUs of this host and their memory, read from nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import msgspec

from swarmq.config import EngineSettings
from swarmq.errors import ConfigError
from swarmq.runtime.logs import log

QUERY = ("--query-gpu=index,uuid,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
ORDER_ENV = "CUDA_DEVICE_ORDER"
NVIDIA_SMI_ORDER = "PCI_BUS_ID"
"""GPU order of nvidia-smi; CUDA's default order begins with the fastest."""
QUERY_TIMEOUT_S = 30.0
MIB = 1 << 20
FP8_CAPABILITY = 8.9
"""Smallest compute capability with FP8 matrix products (Ada; Hopper has 9.0)."""


class GpuCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Total and free memory of a GPU in bytes, and what it computes."""

    total: int
    free: int
    compute_capability: float | None = None
    """CUDA compute capability, such as 9.0; None if nvidia-smi does not report it."""

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU multiplies FP8 matrices; True if unknown."""
        return self.compute_capability is None or self.compute_capability >= FP8_CAPABILITY


def check_fp8(path: str, engine: EngineSettings, gpus: Mapping[int, GpuCapacity]) -> None:
    """Raise ConfigError for an FP8 engine without a GPU that has FP8. `path`: of the settings. `gpus`: those of the engine, by number."""
    asked = [name for name in ("quantization", "kv_cache_dtype") if getattr(engine, name) == "fp8"]
    without = next((number for number, gpu in gpus.items() if not gpu.has_fp8), None)
    if not asked or (gpus and without is None):
        return
    here = (
        f"GPU {without} has compute capability {gpus[without].compute_capability:g}, and FP8 needs {FP8_CAPABILITY:g}"
        if without is not None
        else "this host has no GPU for the engine"
    )
    raise ConfigError(f"{path}.{asked[0]} = 'fp8', but {here}: leave the setting out, or choose another host")


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
        index, uuid, total, free, *capability = (field.strip() for field in line.split(","))
        gpus[index] = gpus[uuid] = _parse_gpu(total, free, *capability)
    wanted = (
        [name for name in gpus if name.isdecimal()]
        if visible is None
        else [name.strip() for name in visible.split(",")]
    )
    return {name: gpus[name] for name in wanted if name in gpus}


def _parse_gpu(total: str, free: str, capability: str = "") -> GpuCapacity | None:
    """Return a GPU's capacity, or None if nvidia-smi prints no number (`[N/A]` for shared memory or a faulty GPU)."""
    if not total.isdecimal() or not free.isdecimal():
        return None
    known = float(capability) if capability.replace(".", "", 1).isdecimal() else None
    return GpuCapacity(total=int(total) * MIB, free=int(free) * MIB, compute_capability=known)
