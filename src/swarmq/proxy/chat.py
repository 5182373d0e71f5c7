"""The dialect of OpenAI's chat completions: requests in, JSON and server-sent events out."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import structlog

from swarmq.engine.protocol import Logprob
from swarmq.keys import Claims
from swarmq.messages import new_id
from swarmq.proxy.calls import Call, Ended, Gained
from swarmq.proxy.completion import Begun, Completions
from swarmq.proxy.meter import Meter
from swarmq.proxy.recorder import call_id
from swarmq.proxy.refusals import RefusedError, refusal_of
from swarmq.proxy.sampling import check_limits

Json = dict[str, Any]
log = structlog.get_logger()

_canonical = msgspec.json.Encoder(order="deterministic")
MAX_RETRIES_TOLD = 1000
AGENT = re.compile(r"[\w.:/-]{1,64}")
"""What an agent may call itself."""


def parse(body: bytes, claims: Claims, *, retry: str | None, agent: str | None) -> Call:
    """Raises RefusedError for a body that cannot be meant, or a model that the key does not permit."""
    chat = _object(body)
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise RefusedError("messages must be a list of at least one message", param="messages")
    if not isinstance(chat.get("stream", False) or False, bool):
        raise RefusedError("stream must be true or false", param="stream")
    if not isinstance(chat.get("stream_options") or {}, dict):
        raise RefusedError("stream_options must be an object", param="stream_options")
    check_limits(chat)
    model = chat.get("model")
    if model not in claims.policies:
        known = ", ".join(claims.policies)
        raise RefusedError(
            f"model {model!r} is not one of this key's policies: {known}",
            status=404, code="model_not_found", param="model",
        )  # fmt: skip
    if agent is not None and not AGENT.fullmatch(agent):
        raise RefusedError(f"x-swarmq-agent must match {AGENT.pattern}", param="x-swarmq-agent")
    return Call(
        claims=claims,
        policy=str(model),
        request_id=new_id(),
        chat=chat,
        stream=bool(chat.get("stream")),
        retry=min(int(retry), MAX_RETRIES_TOLD) if retry and retry.isdecimal() else 0,
        digest=hashlib.sha256(_canonical.encode(chat)).hexdigest(),
        agent=agent or claims.agent,
        began_at=time.time(),
        began=time.monotonic(),
    )


def headers(begun: Begun) -> dict[str, str]:
    call = begun.call
    told = {
        "x-request-id": call.request_id,
        "x-swarmq-call-id": ", ".join(call_id(call.request_id, i) for i in range(_num_choices(begun))),
    }
    return {**told, "x-swarmq-overridden": ", ".join(begun.overridden)} if begun.overridden else told


def completion(begun: Begun, choices: Sequence[Ended]) -> bytes:
    """The body of an answer that is not streamed."""
    return msgspec.json.encode(
        {
            "id": _completion_id(begun),
            "object": "chat.completion",
            "created": int(begun.call.began_at),
            "model": begun.call.chat["model"],
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice.message),
                    "logprobs": _logprobs(begun, choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": _usage(begun, choices),
        }
    )


async def events(completions: Completions, begun: Begun, meter: Meter) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. What fails in the middle is an error event, the last one."""
    options = begun.call.chat.get("stream_options") or {}
    base = {
        "id": _completion_id(begun),
        "object": "chat.completion.chunk",
        "created": int(begun.call.began_at),
        "model": begun.call.chat["model"],
    }
    ended: list[Ended] = []
    greeted: set[int] = set()
    try:
        async with aclosing(completions.stream(begun)) as gains:
            async for gain in gains:
                if gain.index not in greeted:
                    greeted.add(gain.index)
                    yield _event({**base, "choices": [_greeting(gain.index)]})
                if isinstance(gain, Ended):
                    ended.append(gain)
                    yield _event({**base, "choices": [_ending(gain)]})
                elif gain.delta or begun.call.chat.get("logprobs"):
                    yield _event({**base, "choices": [_gaining(begun, gain)]})
    except Exception as error:
        refusal = refusal_of(error)
        meter.errors += 1
        log.warning("stream_failed", status=refusal.status, error=str(error), exc_info=refusal.status == 500)
        yield _event(refusal.body)
        return
    if options.get("include_usage"):
        yield _event({**base, "choices": [], "usage": _usage(begun, ended)})
    yield b"data: [DONE]\n\n"


def _object(body: bytes) -> Json:
    try:
        chat = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RefusedError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(chat, dict):
        raise RefusedError("the body must be a JSON object", code="invalid_json")
    return chat


def _num_choices(begun: Begun) -> int:
    return begun.call.chat.get("n") or 1


def _completion_id(begun: Begun) -> str:
    """The call id where there is one, so that an agent can name the call it credits."""
    request_id = begun.call.request_id
    return call_id(request_id, 0) if _num_choices(begun) == 1 else request_id


def _message(message: Json) -> Json:
    return {**message, "content": message["content"] or (None if message.get("tool_calls") else ""), "refusal": None}


def _greeting(index: int) -> Json:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _gaining(begun: Begun, gain: Gained) -> Json:
    delta = {key: value for key, value in gain.delta.items() if key != "role"}
    return {
        "index": gain.index,
        "delta": delta,
        "logprobs": _logprobs(begun, gain.logprobs),
        "finish_reason": None,
    }


def _ending(ended: Ended) -> Json:
    return {
        "index": ended.index,
        "delta": {},
        "logprobs": None,
        "finish_reason": ended.finish_reason,
        "stop_reason": ended.stop_reason,
    }


def _logprobs(begun: Begun, logprobs: Sequence[Logprob]) -> Json | None:
    chat = begun.call.chat
    if not chat.get("logprobs"):
        return None
    top = chat.get("top_logprobs") or 0
    return {"content": [msgspec.structs.replace(entry, top_logprobs=entry.top_logprobs[:top]) for entry in logprobs]}


def _usage(begun: Begun, choices: Sequence[Ended]) -> Json:
    sampled = sum(choice.num_tokens for choice in choices)
    prompt = begun.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
