"""All errors that swarmq raises on purpose, named by the boundary that failed.

A message says what is wrong, where, and what to do. The module that imports a library maps the library's errors to these.
"""

from __future__ import annotations


class SwarmqError(Exception):
    """Base of all errors that swarmq raises on purpose."""


class ConfigError(SwarmqError):
    """A setting is unknown, out of range or of the wrong type; the message names the setting's path."""


class MessageError(SwarmqError):
    """Bytes that are not one of our records, or a record whose fields contradict each other."""


class KeyRefusedError(SwarmqError):
    """An API key or invite is malformed, forged, expired or not valid for the request."""


class BrokerError(SwarmqError):
    """RabbitMQ refused, is missing, or did not answer in time."""


class BrokerLostError(BrokerError):
    """The broker session ended; messages in flight may or may not have arrived and must be sent again under the same key."""


class LoginRefusedError(BrokerError):
    """The broker refused the user or password."""


class UnconfirmedError(BrokerError):
    """The broker did not confirm a message in time, although it may have stored it."""


class UnroutableError(BrokerError):
    """No queue takes the message: the run or policy name is wrong, or its queues were deleted."""


class EngineError(SwarmqError):
    """vLLM refused, is missing, or did not answer in time."""


class EngineAnswerError(EngineError):
    """The engine's answer cannot be trained on, for instance because log-probabilities are missing; a retry would not help.

    `reason`: one word under which such answers are counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def drop_traceback(error: BaseException) -> BaseException:
    """Return the error. A SwarmqError is returned without its traceback, because its message is enough."""
    return error.with_traceback(None) if isinstance(error, SwarmqError) else error


class EngineRefusedError(EngineError):
    """The engine rejected the request; `status` is the HTTP status, `code` and `param` are OpenAI's error fields."""

    def __init__(self, message: str, *, status: int, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class EpisodeError(SwarmqError):
    """An episode was used in a way its state forbids (unknown, already ended, no turns)."""


class AttemptTimeoutError(EpisodeError):
    """An agent's function did not return in time. Its episode has failed and gets no reward."""


class AgentCommandError(EpisodeError):
    """A command that was run as an agent crashed, ran out of time or got no answer. Its episode has failed and gets no reward."""


class OutcomeError(EpisodeError):
    """A reward or metric is missing, not a number, NaN or infinite."""


class TimelineError(SwarmqError):
    """An episode's turns do not form token sequences; `reason` is one word under which such episodes are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClientError(SwarmqError):
    """A client was used where it cannot work: closed, after a fork, or from inside its own event loop."""


class JudgeError(SwarmqError):
    """A judge gave no score: its endpoint is down, its answer has no score, or its budget is spent."""


class EndpointError(SwarmqError):
    """A language model that helps (a judge, teacher or grader) gave no usable answer, or its budget is spent."""


class RewardError(SwarmqError):
    """A reward cannot be computed for a reason that says nothing about the agent: the expected answer, schema or tests are
    wrong, or the machine failed."""


class SandboxError(RewardError):
    """A sandbox is not available, or failed for a reason other than the program in it."""


class TaskError(SwarmqError):
    """A task, a data set or a worker's function cannot be used; the message names the place."""


class RolloutError(SwarmqError):
    """The rollout of an environment broke: a tool, a server or the model's endpoint failed. Never a reward."""


class HostError(SwarmqError):
    """A host's daemon refused a request, or cannot be reached. `status` is that of HTTP, 0 without an answer; `param` is the path of the
    wrong setting or field, `code` one word for the reason."""

    def __init__(self, message: str, *, status: int = 0, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class CollectorError(SwarmqError):
    """The collector cannot go on: its store is unusable, of another run, or held by another collector."""


class WorkerLostError(CollectorError):
    """A process that exchanges messages for the collector has ended."""


class FencedError(SwarmqError):
    """Another collector leads the run now; this one's last transaction is not valid."""


class StudyError(SwarmqError):
    """A study cannot be run: its file, ledger or folder is unusable, or what it says contradicts what was done."""


class FilesDifferError(StudyError):
    """A worker's copy of a study is not the leader's."""


class LearnerError(SwarmqError):
    """The learner cannot go on: model, batch log, checkpoint or run folder is unusable."""


class SetUpError(LearnerError):
    """The learner's settings or model cannot be used, and a restart will not help until somebody changes them."""


class MissingExtraError(SwarmqError):
    """A command needs an optional extra of swarmq; the message names the `pip install` command."""
