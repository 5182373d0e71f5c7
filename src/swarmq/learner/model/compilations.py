"""Log lines about compilations, because a step that compiles is long.

Layers are compiled for any length, yet the compiler chooses some of its code by the length at hand and compiles again for a length of
another range. Compiled code is cached on disk (TORCHINDUCTOR_CACHE_DIR), so it is mostly the first run on a machine that waits.
"""

from __future__ import annotations

import functools
import time

import structlog
from torch._dynamo import callback

log = structlog.get_logger()

LOGGED_S = 1.0
"""Least seconds of a compilation that is logged."""


@functools.cache
def log_compilations() -> None:
    """Log every long compilation of this process from now on: event `compiled`, with its seconds, and `forward` or `backward`."""
    began = time.monotonic()

    def start(_: callback.CallbackArgs) -> None:
        nonlocal began
        began = time.monotonic()

    def end(made: callback.CallbackArgs) -> None:
        seconds = time.monotonic() - began
        if seconds >= LOGGED_S:
            is_backward = made.callback_trigger is callback.CallbackTrigger.LAZY_BACKWARD
            log.info("compiled", seconds=round(seconds, 1), part="backward" if is_backward else "forward")

    callback.on_compile_start(start)
    callback.on_compile_end(end)
