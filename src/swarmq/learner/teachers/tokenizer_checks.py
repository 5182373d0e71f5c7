"""Checks that engines serve the policy's model, and that token ids mean the same to engines, references and teachers, before any of
them is used."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import structlog

from swarmq.engine.client.identity import check_routing_replay, describe_version_difference, identify_all
from swarmq.engine.client.protocol import EngineIdentity
from swarmq.engine.client.tokenizer_compat import (
    PROBE_TEXT,
    REQUEST_TIMEOUT_S,
    describe_difference,
    fetch_max_model_len,
    tokenize_with_all,
)
from swarmq.errors import EngineError, SetUpError
from swarmq.hosts.model_files import describe_shape, find_other_field
from swarmq.learner.memory.model_copies import find_files
from swarmq.learner.teachers.availability import teacher_key

log = structlog.get_logger()

MAX_MARKUP = 1024
"""Largest number of markup tokens that are compared; some tokenizers reserve thousands."""


class EngineTokenizers:
    """Compares the tokenizer and the shape of the model that each of a policy's engines serves with the trained model's, and the engines'
    versions with each other, once per engine, as soon as the engine answers."""

    def __init__(
        self,
        model: str,
        current: Callable[[], Sequence[str]],
        *,
        max_model_len: int | None = None,
        replays_routing: bool = False,
        secret: str = "",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """`current`: returns the URLs of the engines that are up. `max_model_len`: context length that the learner assumes for
        the engines. `replays_routing`: whether engines must return routed experts. `secret`: secret that the engines require. `timeout_s`: maximum seconds to wait for an engine's token ids."""
        self._timeout_s, self._replays_routing = timeout_s, replays_routing
        self._model, self._current, self._max_model_len, self._secret = model, current, max_model_len, secret
        self._same: set[str] = set()
        self._first: tuple[str, EngineIdentity] | None = None
        """URL and identity of the first engine that answered."""
        self.warnings: list[str] = []
        """Texts for the run's warnings, which the caller removes."""

    def check(self) -> None:
        """Compare engines that were not compared yet. An engine that does not answer is asked again next time. Versions that differ
        are a warning.

        Raises LearnerError if a tokenizer or the served model differs from the trained model.
        """
        urls = [url for url in self._current() if url not in self._same]
        if not urls or (ids := encode_ids(self._model, text := build_probe(self._model))) is None:
            return
        tokenized = asyncio.run(tokenize_with_all(urls, text, secret=self._secret, timeout_s=self._timeout_s))
        for url, engine_ids in tokenized.items():
            if (how := describe_difference(engine_ids, ids)) is not None:
                raise SetUpError(
                    f"the engine at {url} has another tokenizer than {self._model}: {how}; serve the trained model, or set "
                    "policies.*.model to the served model. If agents have already sampled from this engine, start a new run, because "
                    "their token ids mean other text to the trained model"
                )
            if self._has_same_rotations(url) and self._serves_same_model(url):
                self._same.add(url)

    def _serves_same_model(self, url: str) -> bool:
        """Return whether the engine serves a model of the trained model's shape; False if it does not answer. Raises LearnerError if
        the shape differs."""
        from swarmq.learner.memory.outline import load_config  # noqa: PLC0415 - slow to import

        identity = asyncio.run(identify_all([url], secret=self._secret)).get(url)
        if identity is None:
            return False
        ours = describe_shape(load_config(self._model).to_dict())
        if field := find_other_field(ours, identity.shape) if identity.shape else "":
            raise SetUpError(
                f"the engine at {url} serves another model than {self._model}: {field} in its config.json is "
                f"{identity.shape.get(field)}, not {ours[field]}; serve the trained model, or set policies.*.model to the served model. If "
                "agents have already sampled from this engine, start a new run"
            )
        if self._replays_routing:
            try:
                check_routing_replay(url, identity)
            except EngineError as error:
                raise SetUpError(str(error)) from error
        self._first = self._first or (url, identity)
        if difference := describe_version_difference(url, identity, *self._first):
            log.warning("engine_versions_differ", reason=difference)
            self.warnings.append(difference)
        return True

    def _has_same_rotations(self, url: str) -> bool:
        """Return whether the engine is known to use the learner's rotary embeddings; False if it does not answer. Raises
        LearnerError if its context length makes them differ."""
        from swarmq.learner.memory.outline import load_config  # noqa: PLC0415 - slow to import
        from swarmq.learner.model.rotary_embeddings import uses_long_factors  # noqa: PLC0415

        config = load_config(self._model)
        ours = uses_long_factors(config, self._max_model_len)
        if ours is None:
            return True
        if (room := asyncio.run(fetch_max_model_len(url, secret=self._secret))) is None:
            return False
        if uses_long_factors(config, room) != ours:
            ours_is = f"says {self._max_model_len}" if self._max_model_len else "is not set"
            raise SetUpError(
                f"the engine at {url} has a context of {room} tokens, but policies.*.engine.max_model_len {ours_is}: with "
                f"another context length {self._model} uses other rotary factors (longrope); set it to {room}"
            )
        return True


def check_served_judge(model: str, url: str, *, role: str) -> None:
    """Compare the tokenizer of the engine at `url` with that of the policy `model`. An engine that does not answer passes.

    `role`: `reference` or `teacher`, for the error. Raises LearnerError if the tokenizers differ.
    """
    if (ids := encode_ids(model, text := build_probe(model))) is None:
        return
    for told in asyncio.run(tokenize_with_all([url], text, secret=teacher_key())).values():
        if (how := describe_difference(told, ids)) is not None:
            raise SetUpError(_other_family(model, url, role, how))


def check_judge(model: str, source: str, *, role: str) -> None:
    """Compare the tokenizer of the model `source` with that of the policy `model`. A model without a tokenizer passes.

    `role`: `reference` or `teacher`, for the error. Raises LearnerError if the tokenizers differ.
    """
    ids, told = (encode_ids(each, build_probe(model)) for each in (model, source))
    if ids is not None and told is not None and (how := describe_difference(told, ids)) is not None:
        raise SetUpError(_other_family(model, source, role, how))


@functools.cache
def build_probe(model: str) -> str:
    """Return `PROBE_TEXT` with the markup tokens of the policy `model`, because model families with equal vocabularies differ
    in markup."""
    tokenizer = _load_tokenizer(model)
    return PROBE_TEXT if tokenizer is None else PROBE_TEXT + "".join(islice(_iterate_markup(tokenizer), MAX_MARKUP))


@functools.cache
def encode_ids(model: str, text: str) -> tuple[int, ...] | None:
    """Return the token ids of `text`, or None for a model without a tokenizer."""
    tokenizer = _load_tokenizer(model)
    return None if tokenizer is None else _ids(tokenizer, text)


def _iterate_markup(tokenizer: Any) -> Iterator[str]:
    """Yield special and other added tokens in the order of their ids, except tokens that no text encodes to."""
    for id_, token in sorted(getattr(tokenizer, "added_tokens_decoder", {}).items()):
        if _ids(tokenizer, str(token)) == (id_,):
            yield str(token)


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


@functools.cache
def _load_tokenizer(model: str) -> Any:
    """Return the model's tokenizer, or None if it has none."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_files(model))
    except (OSError, ValueError) as error:
        log.info("tokenizers_not_compared", model=model, reason=str(error).partition("\n")[0])
        return None
    return tokenizer if _ids(tokenizer, PROBE_TEXT) else None  # without files, transformers makes an empty tokenizer


def _other_family(model: str, source: str, role: str, how: str) -> str:
    return f"train.{role}: {source} has another tokenizer than {model}: {how}; use a model of the policy's family"
