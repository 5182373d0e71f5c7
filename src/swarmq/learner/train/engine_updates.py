"""Updates of the policy's engines by the learner: sleep, weight pushes, repair.

  load, step        sleep ... wake        engines that share the learner's GPUs, whose memory only one can use at a time
  after a step      push                  training goes on even if no engine takes the weights
  while waiting     ensure                for engines that were restarted, or that a push left behind
  after a restart   repair                for engines that a killed learner left in the middle of a push

Only rank 0 has a pusher. Without a pusher (other ranks, a policy without engines) the methods do nothing.
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
    """Durations of one weight push in seconds."""

    @property
    def pause_s(self) -> float: ...
    @property
    def pauses(self) -> dict[str, float]: ...
    @property
    def total_s(self) -> float: ...
    @property
    def replaced(self) -> tuple[str, ...]: ...


class WeightPusherProtocol(Protocol):
    """Interface of a weight pusher. All methods but `sleep` and `wake` raise EngineError if no engine took the weights."""

    @property
    def failing(self) -> Mapping[str, str]:
        """Engine URL -> reason why the engine does not serve the newest version."""

    def push(self, named_tensors: NamedTensors, version: int) -> Any: ...
    def ensure(self, named_tensors: NamedTensors, version: int) -> PushTimings: ...
    def repair(self, named_tensors: NamedTensors, version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class Weights(Protocol):
    """Weights to push, at `version`."""

    version: int

    def weights_to_push(self) -> Iterable[tuple[str, Weight]]: ...


class WarningSink(Protocol):
    """Receiver of the trainer's messages, such as FeederLink."""

    def send(self, message: records.ToIO) -> None: ...


class EngineUpdates:
    """Updates of the engines of one policy. Methods that touch an engine first raise LearnerError if another learner has taken
    the lock."""

    def __init__(self, pusher: WeightPusherProtocol | None, *, policy: str, take_turns: bool, fence: Fence) -> None:
        """`take_turns`: engines release their GPU memory while the learner computes."""
        self._pusher, self._policy, self._take_turns, self._fence = pusher, policy, take_turns, fence
        self._current = False
        """Whether engines took the present weights, as far as this process knows."""
        self._failing: frozenset[str] = frozenset()
        """URLs of engines whose failure was reported."""

    @property
    def behind(self) -> bool:
        """Whether there are engines and none is known to serve the present weights."""
        return self._pusher is not None and not self._current

    def sleep(self) -> None:
        """Let engines that take turns with the learner release their memory."""
        if self._take_turns and self._pusher:
            self._fence.check()
            self._pusher.sleep()

    def wake(self) -> None:
        if self._take_turns and self._pusher:
            self._fence.check()  # paused engines may be in another learner's push
            self._pusher.wake()

    def push(self, weights: Weights, to: WarningSink, *, replayed: bool) -> dict[str, Any]:
        """Push the weights. Returns the event fields `push_s`, `pause_s` and, by engine, `pauses`, all in seconds, and
        `push_method`.

        An unreachable engine does not stop training: it is updated later, while the learner waits for a batch. Replayed weights are not pushed,
        because after a restart the engines may be ahead of them.
        """
        self._fence.check()
        self._current = False
        if self._pusher is None or replayed:
            return _not_pushed(0.0)
        to.send(records.PhaseChange(phase="pushing"))
        began = time.monotonic()
        try:
            report = self._pusher.push(weights.weights_to_push(), weights.version)
        except EngineError as error:
            log.warning("push_failed", version=weights.version, reason=str(error))
            to.send(records.Warn(text=f"weights {weights.version} of {self._policy} not pushed: {error}"))
            return _not_pushed(time.monotonic() - began)
        finally:
            self._warn_of_failing(to)
        self._current = True
        method = ", ".join(sorted(set(report.methods.values())))
        seconds = {"push_s": time.monotonic() - began, "pause_s": report.pause_s, "pauses": report.pauses}
        return {**seconds, "push_method": method}

    def ensure(self, weights: Weights, to: WarningSink, *, again: bool) -> None:
        """Push the present weights to engines that were restarted, or that a failed push left behind. `again`: check engines
        even if all of them had the weights at the last check."""
        if self._pusher is None or (self._current and not again):
            return
        self._fence.check()
        try:
            report = self._pusher.ensure(weights.weights_to_push(), weights.version)
            self._current = True
            for url in report.replaced:
                to.send(
                    records.Warn(
                        text=f"the weights of {url} were changed by another process: the weights of {self._policy} are restored"
                    )
                )
        except EngineError as error:
            log.warning("engines_not_current", version=weights.version, reason=str(error))
        finally:
            self._warn_of_failing(to)

    def repair(self, weights: Weights) -> None:
        """Load the checkpoint's weights into engines that a killed learner left in the middle of a push, before this learner
        replays."""
        if self._pusher is None:
            return
        self._fence.check()
        try:
            self._pusher.repair(weights.weights_to_push(), weights.version)
        except EngineError as error:
            log.warning("engines_not_repaired", version=weights.version, reason=str(error))

    def _warn_of_failing(self, to: WarningSink) -> None:
        """Warn once when an engine falls behind, and report once when it has caught up."""
        assert self._pusher
        failing = self._pusher.failing
        for url in sorted(failing.keys() - self._failing):
            text = f"{url} does not take the weights of {self._policy}, so its samples become stale: {failing[url]}"
            to.send(records.Warn(text=text))
        for url in sorted(self._failing - failing.keys()):
            to.send(records.Warn(text=f"{url} serves the newest weights of {self._policy} again, or has left"))
        self._failing = frozenset(failing)


def _not_pushed(push_s: float) -> dict[str, Any]:
    return {"push_s": push_s, "pause_s": 0.0, "pauses": {}}
