"""Comparison of engines' tokenizers by their token ids of a test text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

import structlog

from swarmq.engine.client.protocol import Engine
from swarmq.engine.client.vllm import VllmEngine
from swarmq.errors import EngineError

log = structlog.get_logger()

PROBE_TEXT = (
    'What is 17 + 25?\n\tdef f(x): return x ** 2  # Zwölf Boxkämpfer, 北京, 🙂 {"name": "tool", "arguments": {}}'
)
REQUEST_TIMEOUT_S = 10.0
"""Maximum seconds to wait for one engine's answer; short, because answers of several engines are awaited together."""


async def tokenize_with_all(
    urls: Sequence[str], text: str = PROBE_TEXT, *, secret: str = "", timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, list[int]]:
    """Return the token ids of `text` by engine url. Engines that do not answer are logged and left out. `secret`: secret
    that the engines require. `timeout_s`: maximum seconds to wait for an engine's answer."""
    async with AsyncExitStack() as opened:
        opener = partial(VllmEngine.open, deadline_s=timeout_s, secret=secret)
        engines = [await opened.enter_async_context(opener(url)) for url in urls]
        answers = zip(urls, await asyncio.gather(*(try_tokenize(engine, text) for engine in engines)), strict=True)
    return {url: ids for url, ids in answers if ids is not None}


async def fetch_max_model_len(url: str, *, secret: str = "") -> int | None:
    """Return the engine's context length in tokens, or None if it does not answer."""
    async with VllmEngine.open(url, deadline_s=REQUEST_TIMEOUT_S, secret=secret) as engine:
        with suppress(EngineError):
            return (await engine.info()).max_model_len
    return None


async def try_tokenize(engine: Engine, text: str = PROBE_TEXT) -> list[int] | None:
    """Return the engine's token ids of `text`; None, with a log line, if it does not answer."""
    try:
        return await engine.tokenize(text)
    except EngineError as error:
        log.info("tokenizers_not_compared", engine=engine.url, reason=str(error))
        return None


def check_same_token_ids(url: str, expected: Sequence[int], present: Mapping[str, Sequence[int]]) -> None:
    """Raise EngineError if one of the engines in `present` (url -> its token ids of `PROBE_TEXT`) has other token ids than
    `expected`, those of the engine at `url`. Markup tokens are compared later, where the model is loaded
    (learner/teachers/tokenizer_checks.py)."""
    for other, ids in present.items():
        if (how := describe_difference(expected, ids)) is not None:
            raise EngineError(
                f"the engine at {url} has another tokenizer than the one at {other}: {how}; start it with the same model"
            )


def describe_difference(expected: Sequence[int], ids: Sequence[int]) -> str | None:
    """Describe the first difference between two lists of token ids; None if they are equal."""
    if list(expected) == list(ids):
        return None
    at = next((n for n, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected)))
    return f"a test text differs from token {at} on, {list(expected[at : at + 4])} instead of {list(ids[at : at + 4])}"
