"""Errors in the form that OpenAI's clients expect: an honest status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar.exceptions import HTTPException, MethodNotAllowedException

from swarmq.errors import (
    BrokerError,
    EngineAnswerError,
    EngineError,
    EngineRefusedError,
    KeyRefusedError,
    MessageError,
    OutcomeError,
    SwarmqError,
)

RETRY_AFTER_S = 2
"""Seconds that agents' client libraries are told to wait if the engine or the broker does not answer."""


class RefusedError(SwarmqError):
    """A request that cannot be answered, for a reason on the agent's side."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = "invalid_value",
        param: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class DeadlineError(SwarmqError):
    """A call has exceeded its time limit."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int = RETRY_AFTER_S
    final: bool = False
    """Whether a retry would not help, although the fault is not the agent's."""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.final:
            return {"x-should-retry": "false"}  # read by OpenAI's and Anthropic's libraries
        return {"retry-after": str(self.retry_after_s)} if self.status in {429, 503} else {}


def too_long(prompt_tokens: int, most: int, *, wanted: int = 0) -> RefusedError:
    """Return the error for a prompt that is too long, in the words by which client libraries know that a conversation must
    become shorter. `most`: context length of the model in tokens; `wanted`: tokens wanted for the answer."""
    answer = f" and {wanted} for the answer" if wanted else ""
    return RefusedError(
        f"This model's maximum context length is {most} tokens. However, the request has {prompt_tokens} in the prompt{answer}: "
        "shorten the conversation" + (" or ask for a shorter answer" if wanted else ""),
        code="context_length_exceeded", param="messages",
    )  # fmt: skip


def foreign_episode_error(episode_id: str) -> RefusedError:
    return RefusedError(
        f"episode {episode_id} was begun by another client: begin one of your own", status=403, code="episode_foreign"
    )


def to_refusal(error: Exception) -> Refusal:
    """Map an error to a response. Faults of the agent are explained; for other faults the response says only what to do, and
    the log has the details."""
    match error:
        case RefusedError():
            refusal = _client_fault(error.status, str(error), error.code, error.param)
            return msgspec.structs.replace(refusal, retry_after_s=error.retry_after_s)
        case KeyRefusedError():
            return _client_fault(401, str(error), "invalid_api_key")
        case EngineRefusedError():
            return _client_fault(error.status, str(error), error.code, error.param)
        case DeadlineError():
            return _server_fault(504, str(error), "deadline_exceeded")
        case EngineAnswerError():
            message = (
                "the engine's answer cannot be used, and another attempt would hardly help; the operator is warned"
            )
            refusal = _server_fault(502, message, "engine_answer_unusable")
            return msgspec.structs.replace(refusal, final=True)
        case EngineError():
            return _server_fault(503, "the model's engine is not available; try again", "engine_unavailable")
        case BrokerError():
            return _server_fault(503, "the answer could not be recorded; try again", "broker_unavailable")
        case OutcomeError():
            return _client_fault(400, str(error), "invalid_outcome")
        case MessageError():
            return _client_fault(400, str(error), "turn_too_large")
        case MethodNotAllowedException():
            takes = (error.headers or {}).get("allow", "other methods")
            return _client_fault(405, f"this path takes only {takes}", "method_not_allowed")
        case HTTPException():
            return _client_fault(error.status_code, error.detail, None)
        case _:
            return _server_fault(500, "the proxy failed; its log says why", "internal_error")


def _client_fault(status: int, message: str, code: str | None, param: str | None = None) -> Refusal:
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    return Refusal(status=status, message=message, type=kind, code=code, param=param)


def _server_fault(status: int, message: str, code: str) -> Refusal:
    return Refusal(status=status, message=message, type="server_error", code=code)
