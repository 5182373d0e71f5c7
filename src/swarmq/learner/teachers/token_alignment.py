"""Alignment of the policy's tokens with those of a teacher that has another tokenizer: an answer is divided into spans of text at whose
ends tokens of both end, so that log-probabilities are compared span by span (TRL's GOLD; cross-tokenizer distillation).

  policy   |Hel|lo| wor|ld|        teacher   |Hello| w|orld|        spans   |Hello| world|
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from swarmq.errors import SetUpError
from swarmq.learner.memory.model_copies import find_files
from swarmq.timeline import ResolvedTurn


class AlignedTurn(NamedTuple):
    """A model call in both tokenizers."""

    teacher_ids: list[int]
    """The teacher's tokens of prompt and answer."""
    start: int
    """Number of them in the prompt."""
    spans: NDArray[np.int64]  # [A] span of each sampled token of the policy, from 0 on
    teacher_spans: NDArray[np.int64]  # span of each of the teacher's tokens of the answer


class TokenAligner:
    """Translator of model calls from the policy's tokenizer to the teacher's. Both are folders or names of models."""

    def __init__(self, policy: str, teacher: str) -> None:
        """Raises SetUpError if a tokenizer cannot be loaded, or cannot decode token by token."""
        self._policy, self._teacher = load_fast_tokenizer(policy), load_fast_tokenizer(teacher)

    def align(self, turn: ResolvedTurn) -> AlignedTurn:
        """Return the turn in the teacher's tokens: its prompt as the policy's chat template has rendered it, its answer, and, if the
        policy's answer ends with its end token, the teacher's end token in its place."""
        sampled = turn.sampled_ids.tolist()
        ends = sampled[-1] == self._policy.eos_token_id and self._teacher.eos_token_id is not None
        content = sampled[:-1] if ends else sampled
        prompt = list(self._teacher(_decode(self._policy, turn.prompt_ids.tolist())).input_ids)
        if prompt and prompt[-1] == self._teacher.eos_token_id:  # some tokenizers end every text
            prompt.pop()
        answer = list(self._teacher(_decode(self._policy, content), add_special_tokens=False).input_ids)
        spans, teacher_spans = divide(list_ends(self._policy, content), list_ends(self._teacher, answer))
        if ends:
            last = max([-1, *spans, *teacher_spans]) + 1
            spans, teacher_spans, answer = [*spans, last], [*teacher_spans, last], [*answer, self._teacher.eos_token_id]
        return AlignedTurn(
            [*prompt, *answer], len(prompt), np.array(spans, np.int64), np.array(teacher_spans, np.int64)
        )


def divide(ends: Sequence[int | None], teacher_ends: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Return the span of each token on both sides. `ends`: number of characters up to the end of each token, None within a
    character. If both sides do not decode to equally many characters, the whole answer is one span."""
    if not ends or not teacher_ends or ends[-1] is None or ends[-1] != teacher_ends[-1]:
        return [0] * len(ends), [0] * len(teacher_ends)
    shared = {end for end in ends if end is not None} & {end for end in teacher_ends if end is not None}

    def number(own: Sequence[int | None]) -> list[int]:
        last_at = {end: at for at, end in enumerate(own) if end in shared}
        closing, spans, span = set(last_at.values()), list[int](), 0
        for at in range(len(own)):
            spans.append(span)
            span += at in closing
        return spans

    return number(ends), number(teacher_ends)


def list_ends(tokenizer: Any, ids: Sequence[int]) -> list[int | None]:
    """Return the number of characters up to the end of each token; None where a token ends within a character."""
    stream, length, ends = DecodeStream(skip_special_tokens=False), 0, list[int | None]()
    for token in ids:
        text = stream.step(tokenizer.backend_tokenizer, token)
        length += len(text or "")
        ends.append(None if text is None else length)
    return ends


@functools.cache
def load_fast_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model. Raises SetUpError if it cannot be loaded or is not a fast one."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(find_files(model))
    except (OSError, ValueError) as error:
        raise SetUpError(f"train.teacher_tokenizer: the tokenizer of {model} cannot be loaded: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise SetUpError(
            f"train.teacher_tokenizer: the tokenizer of {model} is not a fast one (tokenizer.json), so it does not tell where tokens end"
        )
    return tokenizer


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
