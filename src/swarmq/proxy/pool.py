"""The engines of one policy: an episode stays with the engine that has its prefix cached; new ones go where least is open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from swarmq.engine.protocol import Engine

SHUN_S = 5.0
"""An engine that failed is asked last for this long."""


class Lane:
    """One engine and what we know of it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open_calls = 0
        self.failed_at = float("-inf")

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        self.open_calls += 1
        try:
            yield
        finally:
            self.open_calls -= 1

    def fail(self) -> None:
        self.failed_at = time.monotonic()


class Pool:
    def __init__(self, engines: Sequence[Engine]) -> None:
        self.lanes = [Lane(engine) for engine in engines]

    def order(self, favourite: Lane | None) -> list[Lane]:
        """Lanes in the order to try them."""
        now = time.monotonic()
        return sorted(
            self.lanes,
            key=lambda lane: (now - lane.failed_at < SHUN_S, lane is not favourite, lane.open_calls),
        )
