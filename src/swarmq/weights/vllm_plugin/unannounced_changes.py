"""Runs inside vLLM: marks weights as in doubt if they change while a version is served.

A learner labels its engine `updating-<version>` before it changes the weights (engine_control.py). Weights changed by anybody
else would be served under the old label and trained on as if the learner had sent them. So the engine core replaces the label
itself: no token carries a version whose weights did not sample it, proxies record no token under the new label, and the learner
pushes again at its next check.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.core import EngineCore

from swarmq.weights.format.conventions import UNANNOUNCED, UPDATING

if TYPE_CHECKING:
    from collections.abc import Callable

CHANGING_METHODS = ("update_weights", "reset_weights")
"""Worker methods that may change the weights."""

_log = logging.getLogger("vllm.swarmq")  # vLLM shows only messages of loggers below its own


def register() -> None:
    """Watch for changes if this process is an engine core whose vLLM labels weights."""
    if hasattr(EngineCore.collective_rpc, "__wrapped__") or not hasattr(EngineCore, "set_weight_version"):
        return
    EngineCore.collective_rpc = _wrap_collective_rpc(EngineCore.collective_rpc)


def _wrap_collective_rpc(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def collective_rpc(self: EngineCore, method: Any, *rest: Any, **more: Any) -> Any:
        if method in CHANGING_METHODS and not (label := self.get_weight_version()).startswith(UPDATING):
            _log.warning(
                "weights change under the label %r without an announcement, so the label becomes %r", label, UNANNOUNCED
            )
            self.set_weight_version(UNANNOUNCED)
        return stock(self, method, *rest, **more)

    return collective_rpc
