"""A loop whose clock is a number: where nothing is ready, the next timer is due at once. Hours pass in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._wait = self._selector.select
        self._selector.select = self._skip

    def time(self) -> float:
        return self._now

    def _skip(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all tasks wait for something that cannot come"
        self._now += timeout
        return self._wait(0)


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
