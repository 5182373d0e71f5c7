"""The engines of a policy, as the learner's loop sees them: they sleep while it computes, and get its weights.

    load, step        sleep ... wake        engines that share the learner's GPUs, one user of the memory at a time
    after a step      push                  none has to take the weights: training goes on
    while waiting     ensure                engines that were restarted, or that a push left behind
    after a restart   repair                engines that a killed learner left in a push

Rank 0 alone has a pusher. Without one (other ranks, a policy without engines) nothing here does anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import structlog

from swarmq.errors import EngineError
from swarmq.learner.store import records
from swarmq.learner.store.writer_lock import Fence
from swarmq.weights.format.packing import NamedTensors, Weight

log = structlog.get_logger()


class PushTimings(Protocol):
    """Seconds of one weight push."""

    @property
    def pause_s(self) -> float: ...
    @property
    def pauses(self) -> dict[str, float]: ...
    @property
    def total_s(self) -> float: ...
    @property
    def replaced(self) -> tuple[str, ...]: ...


class WeightPusherProtocol(Protocol):
    """Brings weights to the engines of a policy. All but `sleep` and `wake` raise EngineError when none took them."""

    @property
    def failing(self) -> Mapping[str, str]:
        """Engine url -> why it does not serve the newest version that it was offered."""

    def push(self, named_tensors: NamedTensors, version: int) -> Any: ...
    def ensure(self, named_tensors: NamedTensors, version: int) -> PushTimings: ...
    def repair(self, named_tensors: NamedTensors, version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Weights(Protocol):
    """What is pushed: the trainer's weights of `version`."""

    version: int

    def weights_to_push(self) -> Iterable[tuple[str, Weight]]: ...


class WarningSink(Protocol):
    """Takes what people should hear of."""

    def tell(self, message: records.ToIO) -> None: ...


class EngineUpdates:
    """Raises LearnerError, before an engine is touched, when another learner has taken this one's place."""

    def __init__(self, pusher: WeightPusherProtocol | None, *, policy: str, take_turns: bool, fence: Fence) -> None:
        """`take_turns`: engines give their memory back while the learner computes."""
        self._pusher, self._policy, self._take_turns, self._fence = pusher, policy, take_turns, fence
        self._current = False
        """Whether engines took the current weights, as far as this process knows."""
        self._failing: frozenset[str] = frozenset()
        """Urls that people were told of."""

    @property
    def behind(self) -> bool:
        """Whether there are engines, and none is known to serve the current weights."""
        return self._pusher is not None and not self._current

    def sleep(self) -> None:
        """Those that take turns with the learner give their memory back."""
        if self._take_turns and self._pusher:
            self._fence.check()
            self._pusher.sleep()

    def wake(self) -> None:
        if self._take_turns and self._pusher:
            self._fence.check()  # engines that are paused may be in the other learner's push
            self._pusher.wake()

    def push(self, weights: Weights, to: WarningSink, *, replayed: bool) -> dict[str, Any]:
        """The step's figures of the push, in seconds: `push_s`, `pause_s` and, by engine, `pauses`.

        An engine that cannot be reached does not stop the training: it is brought up to date while waiting. Weights that a replay
        makes again are not pushed: after a restart the engines may be ahead of them.
        """
        self._fence.check()
        self._current = False
        if self._pusher is None or replayed:
            return _not_pushed(0.0)
        to.tell(records.PhaseChange(phase="pushing"))
        began = time.monotonic()
        try:
            report = self._pusher.push(weights.weights_to_push(), weights.version)
        except EngineError as error:
            log.warning("push_failed", version=weights.version, error=str(error))
            to.tell(records.Warn(text=f"weights {weights.version} of {self._policy} not pushed: {error}"))
            return _not_pushed(time.monotonic() - began)
        finally:
            self._tell_failing(to)
        self._current = True
        return {"push_s": time.monotonic() - began, "pause_s": report.pause_s, "pauses": report.pauses}

    def ensure(self, weights: Weights, to: WarningSink, *, again: bool) -> None:
        """Engines that were restarted, or that a failed push left behind, get the current weights. `again`: also where all had
        them when this was last asked."""
        if self._pusher is None or (self._current and not again):
            return
        self._fence.check()
        try:
            report = self._pusher.ensure(weights.weights_to_push(), weights.version)
            self._current = True
            for url in report.replaced:
                to.tell(
                    records.Warn(
                        text=f"somebody else had changed the weights of {url}: it has those of {self._policy} again"
                    )
                )
        except EngineError as error:
            log.warning("engines_not_current", version=weights.version, error=str(error))
        finally:
            self._tell_failing(to)

    def repair(self, weights: Weights) -> None:
        """Engines that a learner left in a push when it was killed serve the checkpoint's weights while this one replays."""
        if self._pusher is None:
            return
        self._fence.check()
        try:
            self._pusher.repair(weights.weights_to_push(), weights.version)
        except EngineError as error:
            log.warning("engines_not_repaired", version=weights.version, error=str(error))

    def _tell_failing(self, to: WarningSink) -> None:
        """Once when an engine falls behind, and once when it no longer is."""
        assert self._pusher
        failing = self._pusher.failing
        for url in sorted(failing.keys() - self._failing):
            text = (
                f"{url} does not take the weights of {self._policy}, what is sampled there goes stale: {failing[url]}"
            )
            to.tell(records.Warn(text=text))
        for url in sorted(self._failing - failing.keys()):
            to.tell(records.Warn(text=f"{url} serves the newest weights of {self._policy} again, or has left"))
        self._failing = frozenset(failing)


def _not_pushed(push_s: float) -> dict[str, Any]:
    return {"push_s": push_s, "pause_s": 0.0, "pauses": {}}
