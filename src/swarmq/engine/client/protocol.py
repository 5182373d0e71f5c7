"""Interface to an inference engine: `VllmEngine` is the real one, `swarmq.testing.ScriptedEngine` the scripted one.

A completion takes three calls: `render` turns a chat request into token ids and sampling parameters, `generate` samples from
exactly the ids it is given, and `derender` parses sampled ids into a message where text alone is not enough (tool calls,
reasoning). Between `render` and `generate` the caller may replace the ids with other ids of the same text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from swarmq.errors import EngineAnswerError
from swarmq.messages import VersionSpan

Json = dict[str, Any]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """Name under which the engine serves its model."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request as token ids and sampling parameters."""

    token_ids: list[int]
    sampling: Json
    """vLLM's SamplingParams; defaults may be missing."""
    passthrough: Json = {}
    """Fields that `generate` needs unchanged (image features, reasoning-parser state)."""
    needs_parsing: bool = False
    """Whether an answer may contain tool calls or reasoning and must go through `derender`."""


class Logprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probability entry of one sampled token, for agents that request log-probabilities."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Json] = []


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts to which an engine routed consecutive tokens, of which the last one is that before the last sampled token."""

    num_tokens: int
    ids: bytes
    """Expert ids by token, layer and rank, as uint8 or little-endian uint16."""

    def of_last(self, count: int) -> bytes:
        """Return the ids of the last `count` tokens. Raises EngineAnswerError if there are fewer."""
        if count > self.num_tokens:
            raise EngineAnswerError(
                "routed_experts", f"the engine returned routed experts of {self.num_tokens} tokens, not of {count}"
            )
        size = len(self.ids) // self.num_tokens
        return self.ids[(self.num_tokens - count) * size :]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one choice since its last delta; without streaming, the whole output."""

    index: int
    text: str
    """Decoded text, without the end-of-turn token and without the stop string."""
    token_ids: list[int]
    """All new sampled tokens, including the end-of-turn token."""
    logprobs: list[float]
    """Natural log-probability of each token under the distribution that was sampled."""
    entries: list[Logprob] = []
    """Log-probabilities with token text and alternatives, if `generate` was called with `detailed`."""
    finish_reason: str | None = None
    """Why the choice ended: `stop`, `length` or, if repetition detection is on, `repetition`. Set only in its last delta."""
    stop_reason: str | int | None = None
    """Stop string or stop token that ended the choice; None for the end-of-turn token."""
    versions: tuple[VersionSpan, ...] = ()
    """Weight versions of all tokens of the choice. Set only in its last delta."""
    routed_experts: RoutedExperts | None = None
    """Experts of the tokens from the prompt's `routed_experts_prompt_start` on, if the engine returns them. Set only in the last delta."""


def merge(deltas: Sequence[Delta]) -> Delta:
    """Merge consecutive deltas of one choice."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return Delta(
        index=last.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        entries=[entry for delta in deltas for entry in delta.entries],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        versions=last.versions,
        routed_experts=last.routed_experts,
    )


class CompleteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete choice to derender, without end-of-turn tokens."""

    token_ids: Sequence[int]
    finish_reason: str


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports about itself; values that it does not report are empty."""

    vllm: str = ""
    """Version of vLLM, without a local part such as `+cpu`."""
    swarmq: str = ""
    """Version of swarmq's plug-in."""
    returns_routed_experts: bool = False
    """Whether answers have the experts of their tokens."""
    shape: dict[str, str] = {}
    """Field of the served model's config.json -> its value as JSON (hosts/model_files.py)."""


class Engine(Protocol):
    """An inference engine. Methods raise EngineRefusedError if the request is at fault, EngineError if the engine is."""

    url: str

    async def info(self) -> EngineInfo: ...

    async def identity(self) -> EngineIdentity: ...

    async def is_healthy(self) -> bool:
        """Return whether the engine answers; never raises."""

    async def weight_version(self) -> int | None:
        """Return the version of the served weights, or None if the engine does not report one."""

    async def render(self, chat: Json) -> RenderedPrompt:
        """Render a chat request, with its `model` filled in, to token ids and sampling parameters.

        If `chat` has a `prompt` (text or token ids), no chat template is applied.
        """

    def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        """Sample, and yield the deltas that have arrived since the last yield; without `stream`, yield once. Closing the
        generator cancels the request.

        `detailed`: whether deltas have `entries`.
        """

    async def derender(self, chat: Json, prompt_ids: Sequence[int], answers: Sequence[CompleteAnswer], /) -> list[Json]:
        """Parse complete answers into assistant messages."""

    async def derender_delta(
        self,
        chat: Json,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        /,
        *,
        finish_reason: str | None,
        state: Any,
    ) -> tuple[Json, Any]:
        """Parse the next tokens of one choice. Returns the message delta and the state to pass to the next call; the first call
        gets None as `state`."""

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`; special tokens are recognised, none are added."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
