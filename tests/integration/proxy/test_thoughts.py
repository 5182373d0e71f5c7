"""A real engine whose answers are thoughts, tool calls and words: streamed or whole, an agent gets what was sampled."""

import json

import msgspec
import pytest

from support.engine import running_engine
from support.real_proxy import real_stage
from swarmq.engine.client.protocol import CompleteAnswer
from swarmq.messages import unpack_ids
from swarmq.proxy.deltas import extend
from swarmq.proxy.engines.tool_parser_probe import finds_tool_calls

pytestmark = [pytest.mark.vllm, pytest.mark.broker]

USER = {"role": "user", "content": "What is 17 + 25?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = r"<think>(a ){20,40}b</think>"
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}\n</tool_call>'
ANSWERS = {
    "words": ({}, THOUGHT + "(b ){3,6}c"),
    "calls": ({"tools": [TOOL]}, THOUGHT + r"\n\n" + CALL + CALL),
    "words and a call": ({"tools": [TOOL]}, THOUGHT + "(b ){3,6}" + CALL),
}


@pytest.fixture(scope="module")
def thinking_url(tiny_model, tmp_path_factory):
    structured = json.dumps({"backend": "xgrammar", "enable_in_reasoning": True})  # or a random model thinks for ever
    arguments = ("--reasoning-parser", "qwen3", "--structured-outputs-config", structured)
    with running_engine(tiny_model, tmp_path_factory.mktemp("thinking") / "engine.log", *arguments) as engine:
        yield engine.url


@pytest.fixture
async def thinking(thinking_url, amqp_url, run_name, tiny_model):
    async with real_stage(run_name, tiny_model, engine_url=thinking_url, amqp_url=amqp_url, max_tokens=400) as made:
        yield made


def essence(message):
    calls = [(call["id"] != "", call["function"]) for call in message.get("tool_calls") or ()]
    return message.get("reasoning"), message.get("content") or "", calls


async def ask(stage, fields):
    """The message, from an answer at once or put together from the deltas of a stream; how it ended; its usage."""
    key = stage.key(f"{fields['stream']}", mode="eval")
    status, _, raw = await stage.post({"model": "main", "messages": [USER], "seed": 5, **fields}, key=key)
    assert status == 200, raw
    if not fields["stream"]:
        answer = msgspec.json.decode(raw)
        return answer["choices"][0]["message"], answer["choices"][0]["finish_reason"], answer["usage"]
    message = {}
    chunks = [msgspec.json.decode(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    for chunk in chunks:
        for choice in chunk["choices"]:
            extend(message, choice["delta"])
    [finish] = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    return message, finish, chunks[-1]["usage"]


async def test_parsers_that_find_calls_however_a_stream_is_cut_are_told_from_others(thinking):
    assert await finds_tool_calls(thinking.engine)


@pytest.mark.parametrize("kind", ANSWERS)
async def test_thoughts_calls_and_words_are_the_same_streamed_and_whole(thinking, kind):
    more, regex = ANSWERS[kind]
    # Marks in one token each, as models write them: parsers of streams go by those, parsers of whole answers by text.
    marks = [token for mark in ("<think>", "</think>") for token in await thinking.engine.tokenize(mark)]
    assert len(marks) == 2
    asked = {**more, "structured_outputs": {"regex": regex}, "logit_bias": dict.fromkeys(map(str, marks), 100)}
    how = [{"stream": False}, {"stream": True, "stream_options": {"include_usage": True}}]
    told = [await ask(thinking, {**asked, **form}) for form in how]
    for turn, (message, finish, usage) in zip(await thinking.turns(2), told, strict=True):
        prompt, sampled = (unpack_ids(ids).tolist() for ids in (turn.prompt_ids, turn.sampled_ids))
        answer = CompleteAnswer(token_ids=sampled[:-1], finish_reason="stop")  # the last one ends the turn
        [meant] = await thinking.engine.derender({"messages": [USER], **asked}, prompt, [answer])
        assert essence(message) == essence(meant)
        assert essence(json.loads(turn.messages)[-1]) == essence(message)
        assert message["reasoning"].strip("ab ") == ""
        assert len(message.get("tool_calls") or ()) == regex.count(CALL)
        assert finish == turn.finish_reason == ("tool_calls" if CALL in regex else "stop")
        assert usage["completion_tokens"] == len(sampled)
        assert set(marks) < set(sampled)
        assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < len(sampled)
