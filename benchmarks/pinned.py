"""Cores for runs that are measured side by side: each run gets its own, and they start one after another."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

STAGGER_S = 3.0
"""Seconds between two starts, so that runs do not look for free ports at the same moment."""


class CorePool:
    """The cores of this process, divided among `jobs` runs."""

    def __init__(self, jobs: int, cores: int, *, stagger_s: float = STAGGER_S) -> None:
        available = sorted(os.sched_getaffinity(0))
        if jobs * cores > len(available):
            cores = max(1, len(available) // jobs)
            print(f"{len(available)} cores for {jobs} jobs: {cores} for each", flush=True)
        self._free: queue.Queue[list[int]] = queue.Queue()
        for number in range(jobs):
            self._free.put(available[number * cores : (number + 1) * cores])
        self._stagger_s, self._starting = stagger_s, threading.Lock()

    @contextmanager
    def pinned(self) -> Iterator[list[str]]:
        """Wait for free cores; yield the words before a command that runs on them."""
        cores = self._free.get()
        try:
            with self._starting:
                time.sleep(self._stagger_s)
            yield ["taskset", "-c", ",".join(map(str, cores))]
        finally:
            self._free.put(cores)
