"""How busy a GPU was: the driver's own figure, the share of the last moments in which a kernel ran, looked at often."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, NamedTuple, Self

POLL_S = 0.1


class Look(NamedTuple):
    at: float
    """Unix time."""
    busy: float
    """0 to 1."""
    used_bytes: int
    gpu: int = 0


def visible(count: int) -> list[int]:
    """Of a host's `count` GPUs, those that programs started from here see, by the host's numbers."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(count)) if chosen is None else [int(number) for number in chosen.split(",") if number]


def check() -> None:
    """Raise RuntimeError if nobody can look at a GPU."""
    try:
        import pynvml  # noqa: PLC0415 - there is none without a GPU

        pynvml.nvmlInit()
    except Exception as error:
        raise RuntimeError(f"nobody can look at the GPU ({error}): install nvidia-ml-py") from error


class GpuWatch:
    """`with GpuWatch() as watch:` looks at all GPUs until the end; without a GPU, or NVML, there are no looks."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def busy(self, *spans: tuple[float, float], gpu: int = 0) -> float | None:
        """Mean over these times, in Unix time; None when nobody could look."""
        looks = [
            look.busy for look in self.looks if look.gpu == gpu and any(begin <= look.at <= end for begin, end in spans)
        ]
        return sum(looks) / len(looks) if looks else None

    def most_used_gib(self) -> float:
        return max((look.used_bytes for look in self.looks), default=0) / (1 << 30)

    def _run(self) -> None:
        with contextlib.suppress(ImportError):
            import pynvml  # noqa: PLC0415 - there is none without a GPU

            nvml: Any = pynvml
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlInit()
                gpus = [nvml.nvmlDeviceGetHandleByIndex(n) for n in visible(nvml.nvmlDeviceGetCount())]
                while not self._stop.wait(POLL_S):
                    for number, gpu in enumerate(gpus):
                        busy = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
                        self.looks.append(Look(time.time(), busy, nvml.nvmlDeviceGetMemoryInfo(gpu).used, number))
