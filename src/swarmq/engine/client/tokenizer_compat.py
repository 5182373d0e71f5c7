"""Whether two tokenizers mean the same by a token id: compared on one text."""

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
"""For one answer: whoever asks has others to see to."""


async def tokenize_with_all(urls: Sequence[str], text: str = PROBE_TEXT, *, secret: str = "") -> dict[str, list[int]]:
    """Engine url -> its ids of `text`; without those that do not answer, which is logged. `secret`: the engines'."""
    async with AsyncExitStack() as opened:
        opener = partial(VllmEngine.open, deadline_s=REQUEST_TIMEOUT_S, secret=secret)
        engines = [await opened.enter_async_context(opener(url)) for url in urls]
        answers = zip(urls, await asyncio.gather(*(try_tokenize(engine, text) for engine in engines)), strict=True)
    return {url: ids for url, ids in answers if ids is not None}


async def fetch_max_model_len(url: str, *, secret: str = "") -> int | None:
    """Tokens that the engine has room for; None where it does not answer."""
    async with VllmEngine.open(url, deadline_s=REQUEST_TIMEOUT_S, secret=secret) as engine:
        with suppress(EngineError):
            return (await engine.info()).max_model_len
    return None


async def try_tokenize(engine: Engine, text: str = PROBE_TEXT) -> list[int] | None:
    """Its ids of `text`; None where it does not answer, which is logged."""
    try:
        return await engine.tokenize(text)
    except EngineError as error:
        log.info("tokenizers_not_compared", engine=engine.url, reason=str(error))
        return None


def check_same_token_ids(url: str, told: Sequence[int], present: Mapping[str, Sequence[int]]) -> None:
    """Raises EngineError for an engine that is to serve beside others whose ids of `PROBE` are not its own. Those of markup are
    compared by who has the model (learner/teachers/tokenizer_checks.py)."""
    for other, ids in present.items():
        if (how := describe_difference(told, ids)) is not None:
            raise EngineError(
                f"the engine at {url} has another tokenizer than the one at {other}: {how}; start it with the same model"
            )


def describe_difference(told: Sequence[int], ids: Sequence[int]) -> str | None:
    """For people; None where they are equal."""
    if list(told) == list(ids):
        return None
    at = next((n for n, (a, b) in enumerate(zip(ids, told, strict=False)) if a != b), min(len(ids), len(told)))
    return f"its ids of a test text are {list(told[at : at + 4])} where those are {list(ids[at : at + 4])} (from token {at} on)"
