"""What swarmq needs of an inference engine. `VllmEngine` is the real one, `swarmq.testing.ScriptedEngine` the scripted one.

A completion is three calls: `render` turns a chat request into token ids and sampling parameters, `generate` samples
from exactly the ids it is given, and `derender` turns sampled ids back into a message where text alone does not do
(tool calls, reasoning). Between the first and the second the caller may put other, equally spelled ids.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from swarmq.messages import VersionSpan

Json = dict[str, Any]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    """The name the engine serves its model under."""
    max_model_len: int
    """Prompt and answer together, in tokens."""


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request as the engine would run it."""

    token_ids: list[int]
    sampling: Json
    """vLLM's SamplingParams; defaults may be left out."""
    passthrough: Json = {}
    """What `generate` wants back unchanged (image features, the state of a reasoning parser)."""
    needs_parsing: bool = False
    """An answer may hold tool calls or reasoning, so that it must go through `derender`."""


class Logprob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled token as an agent who asks for log-probabilities sees it."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[Json] = []


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice gained; without streaming, the whole of it."""

    index: int
    text: str
    """Decoded, without the end-of-turn token and without a stop string that was met."""
    token_ids: list[int]
    """Every sampled token, the end-of-turn token included."""
    logprobs: list[float]
    """One per token, natural log, of the distribution that was sampled."""
    entries: list[Logprob] = []
    """The same with the tokens' text and alternatives, where that was asked for."""
    finish_reason: str | None = None
    """`stop`, `length` or `repetition` (where that was to be detected), in the last delta of a choice."""
    stop_reason: str | int | None = None
    """The stop string or stop token that was met; None for the end-of-turn token."""
    versions: tuple[VersionSpan, ...] = ()
    """Over all tokens of the choice; in its last delta."""


class CompleteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete choice to derender. No token may be left of the end-of-turn kind."""

    token_ids: Sequence[int]
    finish_reason: str


class Engine(Protocol):
    """Every method raises EngineRefusedError (the request is at fault) or EngineError (the engine is)."""

    url: str

    async def info(self) -> EngineInfo: ...

    async def is_healthy(self) -> bool:
        """Whether it answers at all; never raises."""

    async def weight_version(self) -> int | None:
        """Of the weights it serves right now; None where it does not say."""

    async def render(self, chat: Json) -> RenderedPrompt:
        """Token ids and sampling parameters of a chat request; its `model` is filled in.

        Where it has a `prompt` (text or token ids), that is the prompt as it stands, without a template.
        """

    def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        """Sample. Yields what has arrived since the last look, once for all without `stream`. Closing it cancels.

        `detailed`: with `entries`.
        """

    async def derender(self, chat: Json, prompt_ids: Sequence[int], answers: Sequence[CompleteAnswer], /) -> list[Json]:
        """The assistant messages that complete answers spell, parsed."""

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
        """The message delta of one choice's next tokens, and the state to pass with the ones after; None to begin."""

    async def tokenize(self, text: str) -> list[int]:
        """Ids of text, special tokens recognised, none added."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out."""
