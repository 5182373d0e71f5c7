"""The event loop of processes that spend their time on sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop, where it is installed: a message of RabbitMQ then costs a fifth less."""
    try:
        from uvloop import new_event_loop  # noqa: PLC0415 - an extra
    except ImportError:
        from asyncio import new_event_loop  # type: ignore[assignment]  # noqa: PLC0415
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)
