"""OpenAI's responses over HTTP, read by OpenAI's own client, against a scripted engine."""

import json
from types import SimpleNamespace

import pytest

from swarmq.messages import unpack_ids
from swarmq.proxy.deltas import extend
from swarmq.proxy.dialects.responses import Items, _items_to_messages
from swarmq.proxy.episodes.conversations import Conversations
from swarmq.testing.scripted_engine import decode, encode

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'


@pytest.fixture
async def agent(openai, stage):
    http = openai.DefaultAsyncHttpxClient(verify=False)  # or it loads certificates: 50 ms
    async with openai.AsyncOpenAI(
        base_url=f"{stage.url}/v1", api_key=stage.key(mode="eval"), max_retries=0, http_client=http
    ) as client:
        yield client.responses


def prompt(stage):
    """What the engine was asked last, as text."""
    return decode(stage.engine.requests[-1].token_ids)


async def test_text_in_and_text_out(stage, agent):
    stage.engine.say("hello")
    answer = await agent.create(
        model="main", input="hi", instructions="Be brief.", temperature=0.5, max_output_tokens=9
    )
    [turn] = stage.turns()
    assert (answer.id, answer.output_text, answer.status) == (f"resp_{turn.call_id}", "hello", "completed")
    assert (answer.instructions, answer.temperature, answer.max_output_tokens) == ("Be brief.", 0.5, 9)
    assert answer.usage.input_tokens == len(unpack_ids(turn.prompt_ids))
    assert answer.usage.output_tokens == len(encode("hello")) + 1
    assert prompt(stage) == "<|start|>system\nBe brief.<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"


async def test_thoughts_text_and_parallel_calls_are_items_and_come_back(stage, agent):
    stage.engine.has_parsers = True
    stage.engine.say("<think>hm</think>ok " + CALL % 1 + CALL % 2)
    first = await agent.create(model="main", input=[{"role": "user", "content": "go"}], tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "hm"
    assert first.usage.output_tokens_details.reasoning_tokens == len(encode("hm"))
    assert [json.loads(item.arguments) for item in first.output[2:]] == [{"a": 1}, {"a": 2}]
    stage.engine.say("done")
    results = [{"type": "function_call_output", "call_id": i.call_id, "output": "3"} for i in first.output[2:]]
    given = [{"role": "user", "content": "go"}, *first.output[1:], *results]
    await agent.create(model="main", input=given, tools=[TOOL])
    _, second = stage.turns()
    assert [m["role"] for m in json.loads(second.messages)][-4:] == ["assistant", "tool", "tool", "assistant"]
    assert len(json.loads(second.messages)[-4]["tool_calls"]) == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_is_continued_by_name(stage, agent, streamed):
    stage.engine.say("one")
    first = await agent.create(model="main", input="hi", instructions="Only now.")
    stage.engine.say("two")
    asked = {"model": "main", "input": "more", "previous_response_id": first.id}
    if streamed:
        async with agent.stream(**asked) as stream:
            second = await stream.get_final_response()
    else:
        second = await agent.create(**asked)
    assert second.previous_response_id == first.id
    assert "Only now." not in prompt(stage), "instructions are not inherited"
    assert "one<|end|>" in prompt(stage)
    stage.engine.say("three")
    await agent.create(model="main", input="and", previous_response_id=second.id)
    _, middle, last = stage.turns()
    assert (last.parent, last.branch) == (middle.call_id, None)


@pytest.mark.parametrize("other", ["another episode's", "never given", "not stored"])
async def test_a_response_that_is_not_the_episode_s_is_refused(openai, stage, agent, other):
    name = "resp_1"
    if other != "never given":
        stage.engine.say("secret")
        theirs = (
            agent._client.with_options(api_key=stage.key("theirs")) if other.startswith("another") else agent._client
        )
        name = (await theirs.responses.create(model="main", input="hi", store=other != "not stored")).id
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.create(model="main", input="hi", previous_response_id=name)
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("streamed", [False, True])
async def test_items_may_come_back_as_references(stage, agent, streamed):
    stage.engine.say("ok " + CALL % 1 + CALL % 2)
    user = {"role": "user", "content": "go"}
    if streamed:
        async with agent.stream(model="main", input=[user], tools=[TOOL]) as stream:
            first = await stream.get_final_response()
    else:
        first = await agent.create(model="main", input=[user], tools=[TOOL])
    assert len(first.output) == 3
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    references[-1].pop("type")  # which may be left out
    results = [
        {"type": "function_call_output", "call_id": i.call_id, "output": "3"}
        for i in first.output
        if i.type == "function_call"
    ]
    stage.engine.say("done")
    await agent.create(model="main", input=[user, *references, *results], tools=[TOOL])
    one, two = stage.turns()
    assert (two.parent, two.branch) == (one.call_id, None)


async def test_a_reference_is_that_item_alone(stage, agent):
    stage.engine.has_parsers = True
    stage.engine.say("<think>hm</think>ok " + CALL % 1 + CALL % 2)
    first = await agent.create(model="main", input="go", tools=[TOOL])
    seen = []
    stage.engine.template = lambda chat: seen.append(chat) or "x"
    for item, wanted in zip(first.output, ["hm", "ok ", 1, 2], strict=True):
        stage.engine.say("x")
        await agent.create(model="main", input=[{"type": "item_reference", "id": item.id}], tools=[TOOL])
        [message] = seen.pop()["messages"]
        calls = [json.loads(call["function"]["arguments"])["a"] for call in message.get("tool_calls", ())]
        assert [message[key] for key in ("reasoning", "content") if message.get(key)] + calls == [wanted]


def test_a_text_around_a_call_is_one_message_again():
    told = Items(SimpleNamespace(request=SimpleNamespace(request_id="r", chat={}, body={})))
    conversations = Conversations()
    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": "{}"}}
    message: dict = {"role": "assistant", "content": ""}
    for delta in ({"content": "a"}, {"tool_calls": [call]}, {"content": "b"}):
        told.add(delta)
        extend(message, delta)
    conversations.keep("r.0", [message])
    before = conversations.size_bytes
    conversations.keep_parts("r.0", told.parts())
    assert conversations.size_bytes > before
    assert _items_to_messages([{"type": "item_reference", "id": item["id"]} for item in told.items], conversations) == [
        message
    ]


@pytest.mark.parametrize("other", ["another episode's", "never given", "not stored"])
async def test_an_item_that_is_not_the_episode_s_is_not_found(openai, stage, agent, other):
    name = "msg_1"
    if other != "never given":
        stage.engine.say("secret")
        theirs = agent._client.with_options(api_key=stage.key("theirs" if other.startswith("another") else "e1"))
        name = (await theirs.responses.create(model="main", input="hi", store=other != "not stored")).output[0].id
    with pytest.raises(openai.NotFoundError, match=f"Item with id '{name}' not found") as caught:
        await agent.create(model="main", input=[{"type": "item_reference", "id": name}])
    assert caught.value.param == "input"


async def test_items_that_come_back_are_the_message_that_was_sampled(stage, agent):
    stage.engine.say("ok " + CALL % 1)
    first = await agent.create(model="main", input="go", tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "3"}
    stage.engine.say("done")
    await agent.create(model="main", input=[{"role": "user", "content": "go"}, *first.output, result], tools=[TOOL])
    one, two = stage.turns()
    assert (two.parent, two.branch) == (one.call_id, None)
    assert [m["role"] for m in json.loads(two.messages)] == ["tool", "assistant"]


async def test_a_stream_is_every_event_in_order(stage, agent):
    stage.engine.has_parsers = True
    stage.engine.say("<think>hm</think>ok " + CALL % 1 + CALL % 2)
    stream = await agent.create(model="main", input="go", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    wanted = [kind.format("reasoning_text") for kind in text] + [kind.format("output_text") for kind in text]
    wanted += [kind.format("function_call_arguments") for kind in call] * 2
    deduped = [kind for at, kind in enumerate(kinds[2:-1], 2) if kind != kinds[at - 1]]
    assert deduped == wanted
    final = events[-1].response
    for event in events:
        if event.type == "response.output_item.done":
            assert event.item == final.output[event.output_index]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.usage.output_tokens > 0


async def test_the_client_s_own_accumulation_agrees(stage, agent):
    stage.engine.say("hello there")
    async with agent.stream(model="main", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "hello there"
    assert len(deltas) > 1


async def test_an_answer_that_is_cut_off_is_incomplete(stage, agent):
    for streamed in (False, True):
        stage.engine.say("abcdefgh")
        answer = await agent.create(model="main", input="hi", max_output_tokens=2, stream=streamed)
        if streamed:
            last = [event async for event in answer][-1]
            assert last.type == "response.incomplete"
            answer = last.response
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (answer.output[0].status, answer.output_text) == ("incomplete", "abcd")


async def test_a_stream_that_fails_says_so(stage, agent):
    stage.engine.say("abcd", error="it broke")
    events = [event async for event in await agent.create(model="main", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert stage.turns() == []


async def test_logprobs_are_given_to_who_asks(stage, agent):
    stage.engine.say("ab")
    asked = await agent.create(model="main", input="hi", include=["message.output_text.logprobs"])
    assert [entry.logprob for entry in asked.output[0].content[0].logprobs] == [-0.5, -0.5]


async def test_options_reach_the_engine_in_chat_s_words(stage, agent):
    seen = []
    stage.engine.template = lambda chat: seen.append(chat) or "x"
    stage.engine.say("{}")
    await agent.create(
        model="main",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "user", "content": "q"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "v", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low"},
    )
    [chat] = seen
    assert chat["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "q"}]
    assert chat["tools"][0]["function"]["name"] == "add"
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert chat["response_format"]["json_schema"] == {"name": "v", "schema": {"type": "object"}, "strict": True}
    assert (chat["parallel_tool_calls"], chat["reasoning_effort"]) == (False, "low")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"tools": [{"type": "custom", "name": "w"}]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"instructions": 3}, "instructions"),
    ],
)
async def test_a_bad_request_names_its_field(openai, agent, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.create(**{"model": "main", "input": "hi", **change})
    assert caught.value.param == param
