"""Runs inside vLLM: brings it the weight-transfer backend `swarmq`, a quicker way for log-probabilities, and labels for weights
that change unannounced; ends it with its parent.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes.
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
ENGINE_ENV = "SWARMQ_ENGINE"
"""Set in the environment of the vLLM servers that we start."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make the backend and the columns known to this process of vLLM; one that vLLM started is also tied to its life."""
    from swarmq.weights.vllm_plugin import chunked_prefill, logprob_columns, unannounced_changes  # noqa: PLC0415 - they import vLLM, as the line below does

    logprob_columns.register()
    unannounced_changes.register()
    chunked_prefill.register()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415

    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - there is no public look-up
        WeightTransferEngineFactory.register_engine(BACKEND, "swarmq.weights.vllm_plugin.receiver", "WeightReceiver")
    if sys.platform == "linux" and os.environ.get(ENGINE_ENV):
        _end_with_parent()


def _end_with_parent() -> None:
    """Have the kernel kill this process when the API server is killed: vLLM's engine core would live on for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it died before the call
        os._exit(1)
