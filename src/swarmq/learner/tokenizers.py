"""Engine and learner must mean the same by a token id: compared on one text, before anything is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from swarmq.engine.client import VllmEngine
from swarmq.errors import EngineError, LearnerError

log = structlog.get_logger()

PROBE = 'What is 17 + 25?\n\tdef f(x): return x ** 2  # Zwölf Boxkämpfer, 北京, 🙂 {"name": "tool", "arguments": {}}'
ASK_S = 10.0


def check_tokenizers(model: str, engine_urls: Sequence[str]) -> None:
    """Raises LearnerError when an engine's tokenizer is not the model's. Who does not answer is not judged."""
    ids = _own_ids(model)
    if ids is None:
        return
    for url, told in asyncio.run(_ask(engine_urls)).items():
        if told is not None and told != ids:
            at = next((n for n, (a, b) in enumerate(zip(ids, told, strict=False)) if a != b), min(len(ids), len(told)))
            raise LearnerError(
                f"the engine at {url} has another tokenizer than {model}: its ids of a test text are {_near(told, at)} where "
                f"the learner's are {_near(ids, at)} (from token {at} on); serve the model that is trained, or name the "
                "model that is served in policies.*.model"
            )


def _own_ids(model: str) -> list[int] | None:
    """None for a model without a tokenizer."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        log.info("tokenizers_not_compared", model=model, reason=str(error).partition("\n")[0])
        return None
    return list(tokenizer(PROBE, add_special_tokens=False).input_ids) or None  # without files it is one of no words


async def _ask(urls: Sequence[str]) -> dict[str, list[int] | None]:
    return dict(zip(urls, await asyncio.gather(*map(_ids, urls)), strict=True))


async def _ids(url: str) -> list[int] | None:
    try:
        async with VllmEngine.open(url, deadline_s=ASK_S) as engine:
            return await engine.tokenize(PROBE)
    except EngineError as error:
        log.info("tokenizers_not_compared", engine=url, reason=str(error))
        return None


def _near(ids: Sequence[int], at: int) -> str:
    return str(list(ids[at : at + 4]))
