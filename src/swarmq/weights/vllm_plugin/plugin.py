"""Runs inside vLLM: registers the weight-transfer backend `swarmq` and the patches of this package, and ends vLLM's processes
with their parent.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in each of its processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

BACKEND = "swarmq"
WORKER_EXTENSION = "swarmq.weights.vllm_plugin.worker_extension.WorkerExtension"
MIDDLEWARE = "swarmq.weights.vllm_plugin.middleware.SecretMiddleware"
START = "swarmq.weights.vllm_plugin.start"
"""Module that runs a module of vLLM without collecting garbage during its imports."""
ENGINE_ENV = "SWARMQ_ENGINE"
"""Environment variable that marks vLLM servers started by swarmq."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register backend and patches in this process; a process that vLLM started also ends with its parent."""
    from swarmq.weights.vllm_plugin import (  # noqa: PLC0415 - they import vLLM, as the line below does
        chunked_prefill,
        cpu_drafts,
        cpu_rotation,
        cpu_routed_experts,
        drafts,
        forked_core,
        logprob_columns,
        unannounced_changes,
    )

    logprob_columns.register()
    unannounced_changes.register()
    chunked_prefill.register()
    cpu_drafts.register()
    drafts.register()
    cpu_routed_experts.register()
    cpu_rotation.register()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415

    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - there is no public look-up
        WeightTransferEngineFactory.register_engine(BACKEND, "swarmq.weights.vllm_plugin.receiver", "WeightReceiver")
    if sys.platform == "linux" and os.environ.get(ENGINE_ENV):
        forked_core.register()
        _end_with_parent()


def _end_with_parent() -> None:
    """Make the kernel kill this process when the API server dies; vLLM's engine core would otherwise run forever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # the parent died before the call
        os._exit(1)
