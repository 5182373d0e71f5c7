"""Ends pauses that nobody owns: vLLM has no lease on a pause, so a learner that dies in a push leaves its agents waiting.

The learner that is started again repairs the engine within seconds (`WeightPusher.ensure`). This is for when none comes.
"""

from __future__ import annotations

import structlog

from swarmq.engine.control import EngineControl
from swarmq.errors import EngineError

log = structlog.get_logger()


class PauseWatch:
    """Looked at now and then; it acts when a pause has lasted longer than any push can."""

    def __init__(self, engine: EngineControl) -> None:
        self._engine = engine
        self._paused_since: float | None = None

    async def look(self, now: float) -> bool:
        """Whether the engine is beyond help and must be restarted; `now` is of a monotonic clock, in seconds."""
        try:
            paused = (await self._engine.status()).paused
        except EngineError:
            return False  # dead or busy: who waits for the process will see
        if not paused:
            self._paused_since = None
            return False
        if self._paused_since is None:
            self._paused_since = now
        if now - self._paused_since <= self._engine.timeouts.total_s:
            return False
        try:
            await self._engine.release()
        except EngineError as error:
            log.warning("engine left in an update", engine=self._engine.url, reason=str(error))
            return True
        log.warning("engine was left paused, resumed it", engine=self._engine.url)
        self._paused_since = None
        return False
