"""All who speak of a policy's tokens must mean the same by an id: its engines before anything is trained, a model that
judges it before it is asked."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import structlog

from swarmq.engine.same_tokens import PROBE, difference, ids_of_all
from swarmq.errors import LearnerError

log = structlog.get_logger()


def check_tokenizers(model: str, engine_urls: Sequence[str]) -> None:
    """Raises LearnerError when an engine's tokenizer is not the model's. Who does not answer is not judged."""
    if (found := _unlike(model, engine_urls)) is not None:
        url, how = found
        raise LearnerError(
            f"the engine at {url} has another tokenizer than {model}: {how}; serve the model that is trained, or name "
            "the model that is served in policies.*.model"
        )


def check_served_judge(model: str, url: str, *, role: str) -> None:
    """Raises LearnerError when the engine at `url` has another tokenizer than the policy `model`; as above."""
    if (found := _unlike(model, [url])) is not None:
        raise LearnerError(_other_family(model, url, role, found[1]))


def check_judge(model: str, source: str, *, role: str) -> None:
    """Raises LearnerError when the model `source` has another tokenizer than the policy `model`; one without any passes."""
    ids, told = own_ids(model), own_ids(source)
    if ids is not None and told is not None and (how := difference(told, ids)) is not None:
        raise LearnerError(_other_family(model, source, role, how))


@functools.cache
def own_ids(model: str) -> tuple[int, ...] | None:
    """Of `PROBE`; None for a model without a tokenizer."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        log.info("tokenizers_not_compared", model=model, reason=str(error).partition("\n")[0])
        return None
    return tuple(tokenizer(PROBE, add_special_tokens=False).input_ids) or None  # without files it is one of no words


def _unlike(model: str, urls: Sequence[str]) -> tuple[str, str] | None:
    """An engine whose ids are not the model's, and how."""
    if (ids := own_ids(model)) is None:
        return None
    for url, told in asyncio.run(ids_of_all(urls)).items():
        if (how := difference(told, ids)) is not None:
            return url, how
    return None


def _other_family(model: str, source: str, role: str, how: str) -> str:
    return f"train.{role}: {source} has another tokenizer than {model}: {how}; take a model of the policy's family"
