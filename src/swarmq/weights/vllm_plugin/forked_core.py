"""Runs inside vLLM: lets a forked engine core do what a new process would, and forks that of the CPU build, which vLLM (0.32)
would spawn. On one GPU, launch.py asks vLLM to fork.

A spawned core imports torch and vLLM once more, which takes 10 s of processor time at every start. When the API server starts its core, it
uses no device, and has computed no tensor, so OpenMP has no threads that a fork would lose.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.engine import utils
from vllm.v1.engine.core import EngineCoreProc

from swarmq.weights.vllm_plugin import plugin

PATCH_MARK = "swarmq_forked"


def register() -> None:
    """Patch this process; it matters in an API server only. A core that another start method makes runs vLLM's own function."""
    stock = EngineCoreProc.run_engine_core
    if not hasattr(stock, PATCH_MARK):
        EngineCoreProc.run_engine_core = staticmethod(_wrap_run(stock))
    if current_platform.is_cpu():
        utils.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


def _wrap_run(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def run_engine_core(*rest: Any, **fields: Any) -> None:
        plugin.register()  # vLLM does so once in a process, and has done it before the fork
        signal.set_wakeup_fd(-1)  # that of the parent's event loop, which would take this process's signals for its own
        close_internet_sockets()  # the parent's port, which would stay open when the parent closes it
        stock(*rest, **fields)

    setattr(run_engine_core, PATCH_MARK, True)
    return run_engine_core


def close_internet_sockets() -> None:
    """Close all descriptors of this process that are sockets with a port."""
    for entry in Path("/proc/self/fd").iterdir():
        descriptor = int(entry.name)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:  # the descriptor of this listing
            continue
        if is_socket and _find_family(descriptor) in (socket.AF_INET, socket.AF_INET6):
            os.close(descriptor)


def _find_family(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        return copy.family
