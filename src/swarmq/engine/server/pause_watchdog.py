"""Watchdog for engines left paused: vLLM never ends a pause by itself, so if a learner dies during a push, agents keep waiting.

A restarted learner repairs the engine within seconds (`WeightPusher.ensure`). The watchdog handles learners that do not come
back, engines that a learner marked for a restart (condemned), and servers that do not answer.
"""

from __future__ import annotations

import structlog

from swarmq.errors import EngineError
from swarmq.weights.push.engine_control import EngineControl

log = structlog.get_logger()

UNRESPONSIVE_S = 300.0
"""Seconds without an answer and without a computed step after which a server counts as stuck."""


class PauseWatchdog:
    """Watchdog of one engine, polled by its owner: ends pauses that last longer than any push, and reports when a restart is
    needed."""

    def __init__(self, engine: EngineControl) -> None:
        self._engine = engine
        self.reason = ""
        """Reason why `needs_restart` returned True; empty before."""
        self._silent_since: float | None = None
        self._steps: float | None = None
        self._paused_since: float | None = None

    async def needs_restart(self, now: float) -> bool:
        """Resume the engine if it was left paused, and return whether it must be restarted. `now`: monotonic time in seconds."""
        try:
            status = await self._engine.status()
        except EngineError:
            return await self._check_silence(now)  # the server is dead (which its owner notices), busy, or stuck
        self._silent_since = None
        if status.is_condemned:
            return self._require_restart(f"was condemned by its learner ({status.label})")
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
            return self._require_restart(f"was left in the middle of an update: {error}")
        log.warning("paused_engine_resumed", engine=self._engine.url, reason="no learner ended its pause in time")
        self._paused_since = None
        return False

    async def _check_silence(self, now: float) -> bool:
        before, self._steps = self._steps, await self._engine.steps()
        if self._silent_since is None or self._steps not in (None, before):
            self._silent_since = now
        if now - self._silent_since <= UNRESPONSIVE_S:
            return False
        return self._require_restart(f"has not answered for {now - self._silent_since:.0f} s")

    def _require_restart(self, reason: str) -> bool:
        self.reason = reason
        log.warning("engine_restart_required", engine=self._engine.url, reason=reason)
        return True
