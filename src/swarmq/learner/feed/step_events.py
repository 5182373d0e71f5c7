"""Step events that survive outages: each is retried, in order, until the run's event file has room and the broker is reachable.

The batch feeder itself writes the file, because listeners miss events while the broker is away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import msgspec

from swarmq.broker import Broker
from swarmq.messages import Event
from swarmq.runtime.files import LineFile
from swarmq.runtime.logs import log

MAX_WAITING = 1000
"""Largest number of waiting events; older events are discarded."""


class StepEvents:
    def __init__(self, path: Path, broker: Broker) -> None:
        self._lines, self._broker = LineFile(path), broker
        self._unwritten, self._unpublished = deque[Event](maxlen=MAX_WAITING), deque[Event](maxlen=MAX_WAITING)
        self._publishing = asyncio.Lock()
        self._failing = False

    async def add(self, event: Event) -> None:
        self._unwritten.append(event)
        self._unpublished.append(event)
        await self.settle()

    async def settle(self) -> None:
        """Write and publish the waiting events as far as possible now."""
        try:
            self._write()
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("step_not_recorded_yet", path=str(self._lines.path), reason=str(error))
            self._failing = True
        async with self._publishing:
            while self._unpublished and await self._broker.emit(self._unpublished[0]):
                self._unpublished.popleft()

    def _write(self) -> None:
        while self._unwritten:
            self._lines.append(msgspec.json.encode(self._unwritten[0]))
            self._unwritten.popleft()
