"""Common parts of chat completions and completions: the head of an answer, its usage, and a stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from swarmq.proxy.active_call import ActiveCall
from swarmq.proxy.dialects.base import answer_id, data_event, options
from swarmq.proxy.http_errors import Refusal
from swarmq.proxy.requests import ChoiceResult

Json = dict[str, Any]

_encoder = msgspec.json.Encoder()


def head(begun: ActiveCall, kind: str) -> Json:
    return {
        "id": answer_id(begun),
        "object": kind,
        "created": int(begun.request.began_at),
        "model": begun.request.policy,
    }


def usage(begun: ActiveCall, choices: Sequence[ChoiceResult]) -> Json:
    sampled = sum(choice.num_tokens for choice in choices)
    prompt = begun.prompt_tokens
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    thought = sum(choice.num_reasoning_tokens for choice in choices)
    return {**counts, "completion_tokens_details": {"reasoning_tokens": thought}} if thought else counts


class ChunkWriter:
    """Base of a `Writer` of chunks. Each dialect adds `gain`, and `end`, which stores the choice in `ended`."""

    def __init__(self, begun: ActiveCall, kind: str) -> None:
        self.begun = begun
        self.ended: list[ChoiceResult] = []
        self._head = head(begun, kind)
        self._opening = b"data: " + msgspec.json.encode(self._head)[:-1] + b',"choices":['
        """Beginning of all chunks."""

    def begin(self) -> bytes:
        return b""

    def close(self) -> bytes:
        last = b"data: [DONE]\n\n"
        if options(self.begun.request.body, "stream_options").get("include_usage"):
            return data_event({**self._head, "choices": [], "usage": usage(self.begun, self.ended)}) + last
        return last

    def fail(self, refusal: Refusal) -> bytes:
        return data_event(refusal.body)

    def chunk(self, choice: Json) -> bytes:
        """Return a chunk with one choice."""
        return self._opening + _encoder.encode(choice) + b"]}\n\n"
