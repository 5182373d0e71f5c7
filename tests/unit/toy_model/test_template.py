"""Tokenizer and chat template of toy models, on the demo's chats."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.demo.agent import MAX_TOKENS, TOOLS, opening
from swarmq.demo.model_recipe import DemoRecipe
from swarmq.demo.warmup import demonstrate, demonstrations
from swarmq.toy_model.tokenizer import TURN_END, build_tokenizer
from swarmq.toy_model.warmup import render_chats

CALL = {"id": "c1", "type": "function", "function": {"name": "simplify", "arguments": {"expression": "12 + 30 - 2"}}}


@pytest.fixture(scope="module")
def words() -> Any:
    return build_tokenizer("".join(stretches) for stretches in shown(200))


def shown(count: int) -> list[list[str]]:
    return list(render_chats(itertools.islice(demonstrations(DemoRecipe()), count), TOOLS))


def rendered(*arguments: str, calls: int) -> list[str]:
    return next(render_chats([demonstrate(*arguments, calls=calls)], TOOLS))


def text(words: Any, messages: list[dict[str, Any]], *, ask: bool = False, tools: Any = TOOLS) -> str:
    return words.apply_chat_template(messages, tools=tools, add_generation_prompt=ask, tokenize=False)


def dialogue() -> list[dict[str, Any]]:
    return [
        *opening("What is 12 + 30 - 2?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42 - 2"},
        {"role": "assistant", "content": "<answer>40</answer>"},
        {"role": "user", "content": "Thank you"},
    ]


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_appending_a_message_never_rewrites_earlier_text(words, tools):
    messages = dialogue()
    whole = text(words, messages, tools=tools)
    for cut in range(1, len(messages)):
        assert whole.startswith(text(words, messages[:cut], tools=tools))
        if messages[cut]["role"] == "assistant":
            assert whole.startswith(text(words, messages[:cut], ask=True, tools=tools))


def test_the_tools_are_named_even_where_no_system_message_is(words):
    assert "simplify(expression)" in text(words, [{"role": "user", "content": "Hello"}])


def test_content_may_come_in_parts(words):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert text(words, parts) == text(words, [{"role": "user", "content": "Hello"}])


def test_a_tool_call_that_was_parsed_is_rendered_as_it_was_sampled(words):
    said = rendered("What is 12 + 30?", "12 + 30", "42", calls=1)[1].removesuffix(TURN_END)
    call = json.loads(re.findall(r"<tool_call>(.*?)</tool_call>", said, re.DOTALL)[0])
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}
    assert f"assistant\n{said}{TURN_END}" in text(words, [*opening("What is 12 + 30?"), message])


def test_arguments_may_be_text_or_an_object(words):
    as_text = json.loads(json.dumps(CALL))
    as_text["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    rendered = [text(words, [{"role": "assistant", "content": "", "tool_calls": [c]}]) for c in (CALL, as_text)]
    assert rendered[0] == rendered[1]


def test_demonstrations_are_written_as_the_template_writes_them(words):
    learned = "".join(rendered("What is 12 + 30 - 2?", "12 + 30 - 2", "40", calls=1))
    assert text(words, dialogue()[:-1]) == learned + "\n"


def test_a_turn_ends_with_the_token_that_stops_sampling(words):
    assert words.eos_token == TURN_END
    assert words(TURN_END).input_ids == [words.eos_token_id]


def test_markers_of_tool_calls_survive_the_dropping_of_special_tokens(words):
    said = "<tool_call>\n{}\n</tool_call>"
    assert words.decode(words(said).input_ids, skip_special_tokens=True) == said


def test_every_digit_is_a_token_of_its_own(words):
    assert words.tokenize("1204") == ["1", "2", "0", "4"]


@given(said=st.text(max_size=30))
def test_any_text_survives_encoding(words, said):
    assert words.decode(words(said).input_ids) == said


def test_no_demonstrated_reply_is_longer_than_the_agent_allows(words):
    for stretches in shown(300):
        for said in stretches[1::2]:
            assert len(words(said).input_ids) <= MAX_TOKENS
