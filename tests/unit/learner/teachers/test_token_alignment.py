"""Answers in two tokenizers: spans of equal text, and the log-probabilities that they get. test_trl.py compares spans with TRL's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from support.families import FAMILIES, tokenizer_of
from support.tiny_model import tiny_model
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, SetUpError
from swarmq.learner.demonstrations import parse_demonstration
from swarmq.learner.teachers.token_alignment import TokenAligner, divide, list_ends
from swarmq.messages import Rollout
from swarmq.timeline import resolve

ANSWER = 'Zwölf Boxkämpfer, 北京 🙂 x**2\n  return 42.<tool_call>{"a": 1}</tool_call>'


@pytest.fixture(scope="module", params=[family.name for family in FAMILIES])
def teacher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of another family."""
    folder = tmp_path_factory.mktemp("tokenizers")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(request.param), eos_token="<end>").save_pretrained(folder)
    return folder


def episode(answer: str = ANSWER) -> Rollout:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model())
    chat = [{"role": "user", "content": "Write."}, {"role": "assistant", "content": answer}]
    return parse_demonstration(json.dumps({"messages": chat}), tokenizer, where="here")


def test_spans_have_the_same_text_on_both_sides_and_the_end_tokens_are_one(teacher: Path) -> None:
    policy: Any = AutoTokenizer.from_pretrained(tiny_model())
    other: Any = AutoTokenizer.from_pretrained(teacher)
    (turn,) = resolve(episode().turns)
    aligned = TokenAligner(str(tiny_model()), str(teacher)).align(turn)
    sampled, answer = turn.sampled_ids, np.array(aligned.teacher_ids[aligned.start :])
    assert set(aligned.spans) == set(aligned.teacher_spans) == set(range(aligned.spans[-1] + 1))
    assert aligned.spans[-1] > 5
    last = aligned.spans[-1]
    assert (sampled[aligned.spans == last].tolist(), answer[aligned.teacher_spans == last].tolist()) == (
        [policy.eos_token_id],
        [other.eos_token_id],
    )
    upto = [
        (
            policy.decode(sampled[aligned.spans <= span]),
            other.decode(answer[aligned.teacher_spans <= span], clean_up_tokenization_spaces=False),
        )
        for span in range(last)
    ]
    assert [ours for ours, _ in upto] == [theirs for _, theirs in upto]
    assert upto[-1][0] == ANSWER


@given(st.lists(st.integers(1, 12) | st.none(), max_size=8), st.lists(st.integers(1, 12) | st.none(), max_size=8))
def test_every_token_has_a_span_and_both_sides_have_the_same_ones(
    ends: list[int | None], others: list[int | None]
) -> None:
    def rising(values: list[int | None]) -> list[int | None]:
        known = iter(sorted(value for value in values if value is not None))
        return [None if value is None else next(known) for value in values] + [13]

    ours, theirs = divide(rising(ends), rising(others))
    assert (len(ours), len(theirs)) == (len(ends) + 1, len(others) + 1)
    assert set(ours) == set(theirs)
    assert ours == sorted(ours)


def test_an_answer_that_decodes_otherwise_is_one_span() -> None:
    assert divide([1, 2, 5], [3, 4]) == ([0, 0, 0], [0, 0])


def test_a_character_of_several_tokens_ends_with_the_last() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model())
    ids = tokenizer("a🙂b", add_special_tokens=False).input_ids
    ends = list_ends(tokenizer, ids)
    assert [end for end in ends if end is not None] == [1, 2, 3]
    assert None in ends


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"teacher": "/models/teacher"}, "teacher_tokenizer: only has an effect with a served teacher"),
        ({"teacher": "http://t/v1", "loss": {"name": "distill", "top_k": 4}}, "set loss.top_k to 0"),
    ],
)
def test_a_tokenizer_without_effect_is_refused(train: dict[str, Any], says: str) -> None:
    train = {"loss": {"name": "distill"}, "teacher_tokenizer": "t"} | train
    with pytest.raises(ConfigError, match=says):
        SwarmJob.build({"run": "r", "policies": {"main": {"model": "m", "train": train}}})


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match=f"train.teacher_tokenizer: the tokenizer of {tmp_path}/none cannot be loaded"):
        TokenAligner(str(tiny_model()), f"{tmp_path}/none")
