"""Whether two tokenizers mean the same by a token id: compared on one text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from swarmq.engine.client import VllmEngine
from swarmq.errors import EngineError

log = structlog.get_logger()

PROBE = 'What is 17 + 25?\n\tdef f(x): return x ** 2  # Zwölf Boxkämpfer, 北京, 🙂 {"name": "tool", "arguments": {}}'
ASK_S = 10.0


async def ids_of_all(urls: Sequence[str]) -> dict[str, list[int]]:
    """Engine url -> its ids of `PROBE`; without those that do not answer, which is logged."""
    answers = zip(urls, await asyncio.gather(*map(_ids, urls)), strict=True)
    return {url: ids for url, ids in answers if ids is not None}


def difference(told: Sequence[int], ids: Sequence[int]) -> str | None:
    """For people; None where they are equal."""
    if list(told) == list(ids):
        return None
    at = next((n for n, (a, b) in enumerate(zip(ids, told, strict=False)) if a != b), min(len(ids), len(told)))
    return f"its ids of a test text are {list(told[at : at + 4])} where those are {list(ids[at : at + 4])} (from token {at} on)"


async def _ids(url: str) -> list[int] | None:
    try:
        async with VllmEngine.open(url, deadline_s=ASK_S) as engine:
            return await engine.tokenize(PROBE)
    except EngineError as error:
        log.info("tokenizers_not_compared", engine=url, reason=str(error))
        return None
