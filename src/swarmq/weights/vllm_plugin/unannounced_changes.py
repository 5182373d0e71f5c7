"""Runs inside vLLM: weights that change while a version is served are in doubt from that moment on.

A learner labels its engine `updating-<version>` before it touches the weights (engine_control.py). Weights that somebody changes without
that label would be served under the old one, and trained on as if the learner had sent them. So the engine core takes the label
away itself: no token carries a version whose weights it was not sampled from, proxies record none that has such a label, and the
learner pushes again when it next looks.
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
"""Methods of workers after which the weights may be others."""

_log = logging.getLogger("vllm.swarmq")  # vLLM shows what is told below its own name


def register() -> None:
    """Watch the changes in this process, if it is an engine core; of a vLLM that labels nothing there is nothing to take away."""
    if hasattr(EngineCore.collective_rpc, "__wrapped__") or not hasattr(EngineCore, "set_weight_version"):
        return
    EngineCore.collective_rpc = _wrap_collective_rpc(EngineCore.collective_rpc)


def _wrap_collective_rpc(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def collective_rpc(self: EngineCore, method: Any, *rest: Any, **more: Any) -> Any:
        if method in CHANGING_METHODS and not (label := self.get_weight_version()).startswith(UPDATING):
            _log.warning("weights change under the label %r, which nobody announced: it is %r now", label, UNANNOUNCED)
            self.set_weight_version(UNANNOUNCED)
        return stock(self, method, *rest, **more)

    return collective_rpc
