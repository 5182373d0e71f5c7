"""Sampling settings that are in effect: the job's settings with the changes made while the run is up.

The collector repeats the changes in its `state` event, so a proxy that missed one, or has just started, learns them within
seconds. A delay does no harm, because every turn records its sampling parameters.
"""

from __future__ import annotations

import msgspec
import structlog

from swarmq import live_settings
from swarmq.config import SamplingDefaults, SwarmJob
from swarmq.keys import Claims
from swarmq.messages import Change, Event

log = structlog.get_logger()


class LiveSampling:
    """The sampling settings in effect at this proxy."""

    def __init__(self, file: SwarmJob) -> None:
        self._file = self.job = file
        self.number = 0

    def sampling(self, policy: str, kind: str) -> SamplingDefaults:
        """Return the sampling settings of an episode of this kind; an empty kind means that the client named none."""
        setting, own = self.job.policies[policy].sampling, self.job.kinds.get(kind)
        limit = _least(setting.max_tokens, own.max_tokens if own else None)
        return msgspec.structs.replace(setting, max_tokens=limit or None)

    def episode_tokens(self, claims: Claims) -> int:
        """Return the maximum number of tokens that the episode may sample: the lower limit of its key and of its kind; 0: no limit."""
        own = self.job.kinds.get(claims.kind)
        return _least(claims.max_tokens, own.episode_tokens if own else None)

    def episode_calls(self, claims: Claims) -> int:
        """Return the maximum number of model calls that the episode may make: the lower limit of its key and of its kind; 0: no limit."""
        own = self.job.kinds.get(claims.kind)
        return _least(claims.max_calls, own.episode_calls if own else None)

    def handle_event(self, event: Event) -> None:
        """Apply the changes of settings in an event of the run, if there are any."""
        if event.source != "collector" or event.name != "state" or event.fields.get("control", 0) == self.number:
            return
        changes = msgspec.convert(event.fields.get("changes", []), list[Change])
        self.job, self.number = live_settings.apply_changes(self._file, changes), event.fields["control"]
        log.info("settings", control=self.number)


def _least(*limits: int | None) -> int:
    return min((limit for limit in limits if limit), default=0)
