"""What a dialect hands in and gets back, whatever its form, and what has come of a choice in between."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Delta, Logprob
from swarmq.keys import Claims
from swarmq.messages import VersionSpan
from swarmq.proxy.deltas import LeadingBlanks, StopTrim
from swarmq.proxy.http_errors import RefusedError

Json = dict[str, Any]

UNSERVED = {
    "use_beam_search": "answers are sampled",
    "prompt_logprobs": "nobody asks the engine how likely a prompt is",
    "return_token_ids": "the recorded turn has the tokens",
    "return_tokens_as_token_ids": "the recorded turn has the tokens",
    "truncate_prompt_tokens": "a prompt is the whole conversation; send a shorter one",
    "echo": "the prompt is not sampled; the agent has it",
}
"""What would make another answer of it, and why it does not."""
IGNORED = (
    *("request_id", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "return_token_offsets"),
    *("mm_payload", "return_mm_kwargs"),
)
"""What makes no other answer, and does not count."""
OURS = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "user", "metadata", "store"),
        *UNSERVED,
        *IGNORED,
    }
)
"""Fields of a chat request that the proxy answers for itself or keeps from the engine."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that later requests may name instead of sending it again."""

    messages: list[Json]
    name: Callable[[str, Json], str]
    """Of the conversation through an answer, by the answer's call id and message."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect makes of a request."""

    chat: Json
    """As in OpenAI's chat completions."""
    kept: Kept | None = None
    names: Mapping[str, str] = {}
    """Field of `chat` -> what the agent calls it, where that is another name."""
    cuts: bool = False
    """Agents of the dialect have to say `max_tokens` and say more than there is: evaluation cuts it to the model's room."""
    left_out: tuple[str, ...] = ()
    """Types of the tools that only a provider could run."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whatever its dialect."""

    claims: Claims
    policy: str
    request_id: str
    chat: Json
    """As in OpenAI's chat completions; a `prompt` goes before its messages."""
    body: Json = {}
    """As it came."""
    kept: Kept | None = None
    names: Mapping[str, str] = {}
    cuts: bool = False
    left_out: tuple[str, ...] = ()
    """Parameters that nobody knows, and `tools.TYPE` for tools that only a provider could run."""
    stream: bool
    retry: int
    counts_retries: bool = False
    """Its library says with every request how often it was sent before."""
    observed: bool = False
    """Its client's process watches whether the answer arrives."""
    digest: str
    agent: str | None
    began_at: float
    """Unix time."""
    began: float
    """Monotonic."""


class Gained(msgspec.Struct, frozen=True, kw_only=True):
    """More of a choice, as a chat message delta."""

    index: int
    delta: Json
    logprobs: list[Logprob]
    """Where the agent asks for them."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A choice is complete and recorded."""

    index: int
    finish_reason: str
    stop_reason: str | int | None
    message: Json
    logprobs: list[Logprob]
    num_tokens: int
    num_reasoning_tokens: int = 0
    """Of the thoughts among them, without what marks them."""


class Choice:
    """What has come of one choice so far."""

    def __init__(self, index: int, stops: Sequence[str]) -> None:
        self.index = index
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.entries: list[Logprob] = []
        self.versions: tuple[VersionSpan, ...] = ()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.message: Json = {"role": "assistant", "content": ""}
        self.state: Any = None
        """Of the engine's derender."""
        self.trim = StopTrim(stops)
        self.hold_blanks = LeadingBlanks()
        self.first_token_s = 0.0

    def take(self, delta: Delta, elapsed_s: float) -> None:
        if not self.token_ids:
            self.first_token_s = elapsed_s
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.versions = delta.versions


def spoken(token_ids: Sequence[int], finish_reason: str | None, stop_reason: str | int | None) -> list[int]:
    """Without the token that ended the turn, which vLLM's parsers would take for text."""
    ended_by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
    return list(token_ids[:-1] if ended_by_token else token_ids)


def check_served(body: Json) -> None:
    """Raise RefusedError for what would make another answer than the one that is given."""
    for name, why in UNSERVED.items():
        if body.get(name) is not None and body[name] is not False:
            raise RefusedError(f"{name} is not served: {why}", code="unsupported_parameter", param=name)


def ignored(body: Json) -> list[str]:
    """What was asked for and does not count."""
    streamed = body.get("stream_options")
    every = ["continuous_usage_stats"] if isinstance(streamed, dict) and streamed.get("continuous_usage_stats") else []
    every += ["truncation"] if body.get("truncation") == "auto" else []
    return [name for name in IGNORED if body.get(name)] + every


def stops_of(chat: Json) -> tuple[str, ...]:
    """Stop strings that are to be cut off."""
    stop = chat.get("stop") or ()
    return () if chat.get("include_stop_str_in_output") else (stop,) if isinstance(stop, str) else tuple(stop)
