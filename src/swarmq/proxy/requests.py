"""Records of a request on its way through the proxy, whatever its dialect, and of its choices."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Delta, Logprob, RoutedExperts
from swarmq.keys import Claims
from swarmq.messages import Image, Sampling, Timings, VersionSpan
from swarmq.proxy.deltas import LeadingBlanks, StopTrim
from swarmq.proxy.episodes.conversation_graph import EMPTY_HISTORY, EMPTY_PROMPT, HistoryKeys, Stitched
from swarmq.proxy.http_errors import RefusedError

Json = dict[str, Any]

UNSUPPORTED = {
    "use_beam_search": "answers are sampled token by token",
    "prompt_logprobs": "the engine computes no log-probabilities of prompts",
    "return_token_ids": "the recorded turn has the tokens",
    "return_tokens_as_token_ids": "the recorded turn has the tokens",
    "truncate_prompt_tokens": "a prompt is the whole conversation; send a shorter one",
    "echo": "the prompt is not sampled; the agent has it",
}
"""Parameters that would change the answer -> reason for which they are not supported."""
IGNORED = (
    *("request_id", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "return_token_offsets"),
    *("mm_payload", "return_mm_kwargs"),
)
"""Parameters that would not change the answer and are ignored."""
PROXY_FIELDS = frozenset(
    {
        *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "user", "metadata", "store"),
        *UNSUPPORTED,
        *IGNORED,
    }
)
"""Fields of a chat request that the proxy handles itself or keeps from the engine."""


class NamedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that later requests may name instead of sending it again."""

    messages: list[Json]
    name: Callable[[str, Json], str]
    """Function from an answer's call id and message to the name of the conversation."""


class DialectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A dialect's translation of a request."""

    chat: Json
    """The request in the form of OpenAI's chat completions."""
    conversation: NamedConversation | None = None
    names: Mapping[str, str] = {}
    """Field of `chat` -> the agent's name of it, if that differs."""
    cuts: bool = False
    """Whether evaluation cuts `max_tokens` to the model's room, because agents of the dialect must set it."""
    left_out: tuple[str, ...] = ()
    """Types of tools that only a provider could run."""


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """One request, whatever its dialect, from its route to its recorded turns.

    The fields of the last part are filled in when an engine was chosen and has begun to answer.
    """

    claims: Claims
    policy: str
    request_id: str
    chat: Json
    """The request in the form of OpenAI's chat completions. If it has a `prompt`, that is sampled from, and its messages only say
    which conversation the prompt continues."""
    body: Json = {}
    """The request as it was sent."""
    conversation: NamedConversation | None = None
    """The conversation that later requests may name."""
    names: Mapping[str, str] = {}
    """Field of `chat` -> the agent's name of it, if that differs."""
    cuts: bool = False
    """Whether evaluation cuts `max_tokens` to the model's room, because agents of the dialect must set it."""
    left_out: tuple[str, ...] = ()
    """Names of unknown parameters that were left out, and `tools.TYPE` for tools that only a provider could run."""
    stream: bool
    retry: int
    counts_retries: bool = False
    """Whether the client library counts its retries in every request."""
    observed: bool = False
    """Whether the client observes which answers arrive."""
    request_digest: str
    agent: str | None
    began_at: float
    """Unix time at which the request began."""
    began: float
    """Time in seconds on the monotonic clock at which the request began."""

    history: HistoryKeys = EMPTY_HISTORY
    """The conversation before the answer."""
    stitched: Stitched = EMPTY_PROMPT
    """The prompt, and how it continues earlier turns."""
    images: tuple[Image, ...] = ()
    """Images of the prompt that the continued turn does not have; empty unless the turn is trained."""
    fresh: bytes = b""
    """Packed int32: the prompt tokens of a fresh rendering."""
    sampling: Sampling = Sampling()
    """Sampling parameters in effect."""
    overridden: tuple[str, ...] = ()
    """Names of parameters that the run overrides."""

    @property
    def messages(self) -> list[Json]:
        """Chat messages of the request."""
        messages: list[Json] = self.chat["messages"]
        return messages

    @property
    def num_choices(self) -> int:
        """Number of choices that the request asks for."""
        return self.chat.get("n") or 1

    def call_id(self, index: int) -> str:
        """Return the call id of a choice."""
        return f"{self.request_id}.{index}"


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A delta of a choice in the form of a chat message."""

    index: int
    delta: Json
    logprobs: list[Logprob]
    """Log-probabilities for the agent, if it asks for them."""


class ChoiceResult(msgspec.Struct, frozen=True, kw_only=True):
    """A complete choice: what is recorded as a turn, and what the dialect answers with."""

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    message: Json
    timings: Timings
    entries: Sequence[Logprob] = ()
    """Log-probabilities for the agent, if it asks for them."""
    num_reasoning_tokens: int = 0
    """Number of reasoning tokens among `token_ids`, without their markers."""
    routed_experts: RoutedExperts | None = None
    """Experts to record with the turn; None: the turn records none."""

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids)

    @property
    def is_cut(self) -> bool:
        """Whether the message lacks a stop string that was sampled."""
        return isinstance(self.stop_reason, str)


class ChoiceState:
    """The state of a choice that is being sampled."""

    def __init__(self, index: int, stops: Sequence[str]) -> None:
        self.index = index
        self.token_ids: array[int] = array("i")
        self.logprobs: array[float] = array("f")
        self.entries: list[Logprob] = []
        self.versions: tuple[VersionSpan, ...] = ()
        self.routed_experts: RoutedExperts | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.message: Json = {"role": "assistant", "content": ""}
        self.state: Any = None
        """State of the engine's streaming parser."""
        self.trim = StopTrim(stops)
        self.hold_blanks = LeadingBlanks()
        self.first_token_s = 0.0

    def take(self, delta: Delta, elapsed_s: float) -> None:
        if not self.token_ids:
            self.first_token_s = elapsed_s
        self.token_ids.fromlist(delta.token_ids)
        self.logprobs.fromlist(delta.logprobs)
        self.entries += delta.entries
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.versions = delta.versions
        self.routed_experts = delta.routed_experts


def strip_end_token(token_ids: Sequence[int], finish_reason: str | None, stop_reason: str | int | None) -> list[int]:
    """Return the tokens without the token that ended the turn, which vLLM's parsers would take for text."""
    ended_by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
    return list(token_ids[:-1] if ended_by_token else token_ids)


def check_supported(body: Json) -> None:
    """Raise RefusedError for parameters that would change the answer and are not supported."""
    for name, why in UNSUPPORTED.items():
        if body.get(name) is not None and body[name] is not False:
            raise RefusedError(f"{name} is not served: {why}", code="unsupported_parameter", param=name)


def list_ignored_parameters(body: Json) -> list[str]:
    """Return the names of the request's parameters that are ignored."""
    streamed = body.get("stream_options")
    every = ["continuous_usage_stats"] if isinstance(streamed, dict) and streamed.get("continuous_usage_stats") else []
    every += ["truncation"] if body.get("truncation") == "auto" else []
    return [name for name in IGNORED if body.get(name)] + every


def stop_strings(chat: Json) -> tuple[str, ...]:
    """Return the stop strings that are cut off from the answer."""
    stop = chat.get("stop") or ()
    return () if chat.get("include_stop_str_in_output") else (stop,) if isinstance(stop, str) else tuple(stop)
