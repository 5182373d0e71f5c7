"""Brokers to break, and logs to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import structlog

from support.broker import discarded
from swarmq.broker.node.process import PrivateNode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PrivateNode]:
    """A private node for one file of tests; each leaves it as it was."""
    async with discarded(PrivateNode(tmp_path_factory.mktemp("node"))) as node:
        yield node


class LogWatch:
    """Every log event, and a way to wait for one."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._more = asyncio.Event()

    def __call__(self, _logger: Any, level: str, event: dict[str, Any]) -> Any:
        self.events.append({**event, "level": level})
        self._more.set()
        raise structlog.DropEvent

    async def seen(self, text: str, **fields: Any) -> dict[str, Any]:
        while True:
            for event in self.events:
                if event["event"] == text and fields.items() <= event.items():
                    return event
            self._more.clear()
            await self._more.wait()

    def count(self, text: str) -> int:
        return sum(event["event"] == text for event in self.events)


@pytest.fixture
def logs() -> Iterator[LogWatch]:
    before = structlog.get_config()["processors"]
    watch = LogWatch()
    structlog.configure(processors=[watch])
    yield watch
    structlog.configure(processors=before)
