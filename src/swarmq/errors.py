"""Every error swarmq raises on purpose, named by the boundary that failed.

A message says what was wrong, where, and what to do. Errors of other libraries are mapped to these once, in
the module that imports the library.
"""

from __future__ import annotations


class SwarmqError(Exception):
    """Base of all errors that swarmq raises on purpose."""


class ConfigError(SwarmqError):
    """A setting is unknown, out of range or of the wrong type; the message names its path."""


class MessageError(SwarmqError):
    """Bytes that are not one of our records, or a record whose fields contradict each other."""


class KeyRefusedError(SwarmqError):
    """An api key or invite is malformed, forged, expired or not valid for what was asked."""


class BrokerError(SwarmqError):
    """RabbitMQ refused, is missing, or did not answer in time."""


class BrokerLostError(BrokerError):
    """The broker session ended; what was in flight is unknown and must be sent again under the same key."""


class LoginRefusedError(BrokerError):
    """The broker refuses user or password."""


class UnconfirmedError(BrokerError):
    """The broker did not confirm in time; it may have the message all the same."""


class UnroutableError(BrokerError):
    """No queue takes this message: the run or policy name is wrong, or its queues were deleted."""


class EngineError(SwarmqError):
    """vLLM refused, is missing, or did not answer in time."""


class EngineAnswerError(EngineError):
    """The engine answered something that nothing can be learned from; `reason` is one word to count by.

    The next answer would hardly be another: somebody has to look at the engine.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def drop_traceback(error: BaseException) -> BaseException:
    """An error of ours without the places that it passed: its words say everything to who reads them. Any other as it is."""
    return error.with_traceback(None) if isinstance(error, SwarmqError) else error


class EngineRefusedError(EngineError):
    """The engine answered with an error of ours or the agent's making; `status` is its HTTP status."""

    def __init__(self, message: str, *, status: int, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class EpisodeError(SwarmqError):
    """An episode was used in a way its state forbids (unknown, already ended, no turns)."""


class AttemptTimeoutError(EpisodeError):
    """An agent's function did not return in time. The episode has failed; never a reward of 0."""


class OutcomeError(EpisodeError):
    """A reward or metric is missing, not a number, NaN or infinite."""


class TimelineError(SwarmqError):
    """An episode's turns cannot be made into token sequences; `reason` is one word to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClientError(SwarmqError):
    """A client was used where it cannot work: closed, after a fork, or from inside its own event loop."""


class JudgeError(SwarmqError):
    """A judge did not give a score: it is down, makes no sense, or its budget is spent. Never a reward of 0."""


class TaskError(SwarmqError):
    """A task, a data set or a worker's function cannot be used; the message names the place."""


class CollectorError(SwarmqError):
    """The collector cannot go on: its store is unusable, of another run, or held by another collector."""


class LearnerError(SwarmqError):
    """The learner cannot go on: model, batch log, checkpoint or run folder is unusable."""


class SetUpError(LearnerError):
    """What is set, or what is there to train, cannot be used, now or later: somebody has to change it first."""


class MissingExtraError(SwarmqError):
    """A command needs an optional part of swarmq; the message says which `pip install` brings it."""
