"""Ends pauses that nobody owns: vLLM has no lease on a pause, so a learner that dies in a push leaves its agents waiting.

The learner that is started again repairs the engine within seconds (`WeightPusher.ensure`). This is for when none comes,
for engines that a learner has condemned, and for servers that answer nobody any more.
"""

from __future__ import annotations

import structlog

from swarmq.errors import EngineError
from swarmq.weights.push.engine_control import EngineControl

log = structlog.get_logger()

UNRESPONSIVE_S = 300.0
"""A server that has not said how it is for so long, nor computed anything, does not come back by itself."""


class PauseWatchdog:
    """Resumes an engine whose pause lasts longer than any push can, and says when it must be restarted. Polled by its owner."""

    def __init__(self, engine: EngineControl) -> None:
        self._engine = engine
        self.reason = ""
        """Why it must be restarted."""
        self._silent_since: float | None = None
        self._steps: float | None = None
        self._paused_since: float | None = None

    async def needs_restart(self, now: float) -> bool:
        """Whether the engine is beyond help and must be restarted; `now` is of a monotonic clock, in seconds."""
        try:
            status = await self._engine.status()
        except EngineError:
            return await self._check_silence(now)  # dead, which who waits for the process will see, busy, or stuck
        self._silent_since = None
        if status.is_condemned:
            return self._require_restart(f"was given up by its learner ({status.label})")
        if not status.is_paused or status.is_asleep:
            self._paused_since = None
            return False
        if self._paused_since is None:
            self._paused_since = now
        if now - self._paused_since <= self._engine.timeouts.total_s:
            return False
        try:
            await self._engine.release()
        except EngineError as error:
            return self._require_restart(f"was left in an update: {error}")
        log.warning("engine was left paused, resumed it", engine=self._engine.url)
        self._paused_since = None
        return False

    async def _check_silence(self, now: float) -> bool:
        before, self._steps = self._steps, await self._engine.steps()
        if self._silent_since is None or self._steps not in (None, before):
            self._silent_since = now
        if now - self._silent_since <= UNRESPONSIVE_S:
            return False
        return self._require_restart(f"has answered nobody for {now - self._silent_since:.0f} s")

    def _require_restart(self, reason: str) -> bool:
        self.reason = reason
        log.warning("engine must be restarted", engine=self._engine.url, reason=reason)
        return True
