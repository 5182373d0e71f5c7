"""Anthropic's messages over HTTP, read by Anthropic's own client, against a scripted engine."""

import json

import pytest

from swarmq.messages import unpack_ids
from swarmq.testing.scripted_engine import decode

USER = {"role": "user", "content": "go"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
ASKED = {"model": "main", "max_tokens": 100, "messages": [USER]}


@pytest.fixture
async def agent(anthropic, stage):
    key = stage.key(mode="eval")
    http = anthropic.DefaultAsyncHttpxClient(verify=False)  # or it loads certificates: 50 ms
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=key, max_retries=0, http_client=http) as client:
        yield client.messages


async def test_text_in_and_text_out(stage, agent):
    stage.engine.say("hello")
    answer = await agent.create(**ASKED, system="Be brief.")
    [turn] = stage.turns()
    assert (answer.id, answer.role, answer.stop_reason) == (turn.call_id, "assistant", "end_turn")
    assert [block.text for block in answer.content] == ["hello"]
    assert answer.usage.input_tokens == len(unpack_ids(turn.prompt_ids))
    assert answer.usage.output_tokens == len(unpack_ids(turn.sampled_ids))
    text = "<|start|>system\nBe brief.<|end|>\n<|start|>user\ngo<|end|>\n<|start|>assistant\n"
    assert decode(stage.engine.requests[0].token_ids) == text


async def test_the_base_url_of_openai_s_clients_serves_anthropic_s_too(anthropic, stage, agent):
    client = agent._client.with_options(base_url=f"{stage.url}/v1")
    stage.engine.say("hello")
    answer = await client.messages.create(**ASKED)
    assert [block.text for block in answer.content] == ["hello"]
    stage.engine.say("again")
    async with client.messages.stream(**ASKED) as stream:
        assert await stream.get_final_text() == "again"
    assert (await client.messages.count_tokens(model="main", messages=[USER])).input_tokens == answer.usage.input_tokens
    assert [model.id for model in (await client.models.list()).data] == ["main"]
    assert (await client.models.retrieve("main")).id == "main"
    with pytest.raises(anthropic.NotFoundError, match=r"neither one of this key's policies"):
        await client.messages.create(**ASKED | {"model": "claude"})


async def test_a_bearer_token_is_a_key_too(anthropic, stage):
    stage.engine.say("x")
    http = anthropic.DefaultAsyncHttpxClient(verify=False)  # or it loads certificates: 50 ms
    async with anthropic.AsyncAnthropic(
        base_url=stage.url, auth_token=stage.key(), max_retries=0, http_client=http
    ) as client:
        assert (await client.messages.create(**ASKED)).content


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_text_and_tool_use_come_back_and_continue(stage, agent, streamed):
    stage.engine.has_parsers = True
    stage.engine.say("<think>hm</think>ok " + CALL % 1 + CALL % 2)
    if streamed:
        async with agent.stream(**ASKED, tools=[TOOL]) as stream:
            first = await stream.get_final_message()
    else:
        first = await agent.create(**ASKED, tools=[TOOL])
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = first.content
    assert (thinking.thinking, text.text, first.stop_reason) == ("hm", "ok ", "tool_use")
    assert [call.input for call in calls] == [{"a": 1}, {"a": 2}]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]} for call in calls
    ]
    stage.engine.say("done")
    said = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    await agent.create(**{**ASKED, "messages": said}, tools=[TOOL])
    _, turn = stage.turns()
    assert [(m["role"], m["content"]) for m in json.loads(turn.messages)[-3:]] == [
        ("tool", "3"),
        ("tool", "3"),
        ("assistant", "done"),
    ]


async def test_a_stream_is_every_event_in_order(stage, agent):
    stage.engine.has_parsers = True
    stage.engine.say("<think>hm</think>ok " + CALL % 1)
    events = [event async for event in await agent.create(**ASKED, tools=[TOOL], stream=True)]
    kinds = [event.type for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    deduped = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    assert deduped == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2]
    assert events[0].message.usage.input_tokens == len(unpack_ids(stage.turns()[0].prompt_ids))
    assert events[-2].usage.output_tokens == len(unpack_ids(stage.turns()[0].sampled_ids))
    assert events[-2].delta.stop_reason == "tool_use"


async def test_text_is_streamed_as_it_comes(stage, agent):
    stage.engine.say("hello there")
    async with agent.stream(**ASKED) as stream:
        pieces = [text async for text in stream.text_stream]
    assert "".join(pieces) == "hello there"
    assert len(pieces) > 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cut_off_answer_says_so(stage, agent, streamed):
    stage.engine.say("abcdefgh")
    asked = {**ASKED, "max_tokens": 2}
    if streamed:
        async with agent.stream(**asked) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await agent.create(**asked)
    assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "abcd")


async def test_tokens_are_counted_and_nothing_is_sampled(stage, agent):
    counted = await agent.count_tokens(model="main", messages=[USER], system="Be brief.", tools=[TOOL])
    stage.engine.say("x")
    answer = await agent.create(**ASKED, system="Be brief.", tools=[TOOL])
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(stage.turns()) == 1


async def test_tokens_are_counted_by_another_engine_where_one_is_down(stages):
    async with stages(engines=2) as stage:
        for down, well in (stage.engines, stage.engines[::-1]):
            down.down, well.down = True, False
            asked = {"model": "main", "messages": [USER]}
            status, _, raw = await stage.post(asked, "/v1/messages/count_tokens", key=stage.key("e"))
            assert (status, json.loads(raw)["input_tokens"] > 0) == (200, True)


async def test_the_older_name_of_an_output_s_format_counts_too(stage):
    stage.engine.say("{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {**ASKED, "output_format": {"type": "json_schema", "schema": schema}}
    seen = []
    stage.engine.template = lambda chat: seen.append(chat) or "x"
    await stage.post(body, "/v1/messages", key=stage.key(mode="eval"))
    assert seen[0]["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, None),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
async def test_options_reach_the_engine_in_chat_s_words(stage, agent, choice, wanted):
    seen = []
    stage.engine.template = lambda chat: seen.append(chat) or "x"
    stage.engine.say("x")
    stage.engine.accepts_images = True
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    more = {
        "tools": [TOOL],
        "tool_choice": choice,
        "output_config": output,
        "stop_sequences": ["#"],
        "extra_body": {"top_k": 5},
    }
    await agent.create(**{**ASKED, "messages": messages}, thinking={"type": "enabled", "budget_tokens": 1024}, **more)
    [chat] = seen
    assert chat.get("tool_choice") == wanted
    assert chat["tools"][0]["function"] == {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (chat["stop"], chat["top_k"], chat["thinking_token_budget"]) == (["#"], 5, 1024)
    assert chat["messages"][0]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AAAA"},
    }


async def test_models_are_listed_in_anthropic_s_form_for_its_clients(anthropic, stage, agent):
    key = stage.key(policies=("main", "other"))
    models = agent._client.with_options(api_key=key).models
    listed = await models.list()
    assert [(model.id, model.type, model.display_name) for model in listed.data] == [
        ("main", "model", "main"),
        ("other", "model", "other"),
    ]
    assert (listed.has_more, listed.first_id, listed.last_id) == (False, "main", "other")
    one = await models.retrieve("other")
    assert (one.id, one.lifecycle, one.created_at.year) == ("other", "active", 1970)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await models.retrieve("claude")
    assert caught.value.body["error"]["type"] == "not_found_error"


async def test_usage_says_that_nothing_was_read_from_a_cache(stage, agent):
    stage.engine.say("x")
    stage.engine.say("x")
    whole = await agent.create(**ASKED)
    events = [event async for event in await agent.create(**ASKED, stream=True)]
    for usage in (whole.usage, events[0].message.usage, events[-2].usage):
        assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("content", "heard"),
    [
        ("it broke", "Error: it broke"),
        ("Error: it broke", "Error: it broke"),
        ([{"type": "text", "text": "it broke"}, {"type": "text", "text": "twice"}], "Error: it broke\ntwice"),
        ([], "Error: "),
    ],
)
async def test_a_tool_s_error_is_heard_as_one(stage, agent, content, heard):
    seen = []
    stage.engine.template = lambda chat: seen.append(chat) or "x"
    stage.engine.say("x")
    used = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    said = [USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    await agent.create(**{**ASKED, "messages": said})
    assert seen[0]["messages"][-1]["content"] == heard


@pytest.mark.parametrize(
    ("management", "status"),
    [
        ({}, 200),
        ({"edits": []}, 200),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, 200),
        ({"edits": [{"type": "clear_tool_uses_20250919"}]}, 400),
    ],
)
async def test_only_edits_that_leave_the_conversation_as_it_is_are_taken(stage, management, status):
    stage.engine.say("x")
    got, _, raw = await stage.post({**ASKED, "context_management": management}, "/v1/messages")
    assert (got, b"context_management" in raw) == (status, status == 400)


async def test_words_put_into_its_mouth_are_continued(stage, agent):
    seen = []
    stage.engine.template = lambda chat: seen.append(chat) or "x"
    stage.engine.say("x")
    await agent.create(**{**ASKED, "messages": [USER, {"role": "assistant", "content": "It is"}]})
    assert (seen[0]["continue_final_message"], seen[0]["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages is empty: send at least one message with content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text must be text"),
        ({"tools": [{"type": "bash_20250124", "name": "w"}]}, "bash_20250124"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
    ],
)
async def test_a_bad_request_is_told_in_anthropic_s_form(anthropic, agent, change, words):
    with pytest.raises(anthropic.BadRequestError) as caught:
        await agent.create(**{**ASKED, **change})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert words in caught.value.body["error"]["message"]


async def test_max_tokens_is_required(stage):
    body = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    async with stage.http.post(f"{stage.url}/v1/messages", json=body, headers={"x-api-key": stage.key()}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "max_tokens is required"


async def test_statuses_have_anthropic_s_names(anthropic, stage, agent):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await agent.create(**{**ASKED, "model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await agent._client.with_options(api_key="no").messages.create(**ASKED)
    assert caught.value.body["error"]["type"] == "authentication_error"
    stage.engine.down = True
    with pytest.raises(anthropic.InternalServerError) as caught:
        await agent.create(**ASKED)
    assert caught.value.body["error"]["type"] == "overloaded_error"


async def test_a_stream_that_fails_says_so(anthropic, stage, agent):
    stage.engine.say("abcd", error="it broke")
    with pytest.raises(anthropic.APIStatusError, match="not available"):
        async with agent.stream(**ASKED) as stream:
            await stream.get_final_message()
    assert stage.turns() == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("asked", "reason"), [(64_000, "model_context_window_exceeded"), (2, "max_tokens")])
async def test_a_cut_is_told_as_the_agent_s_own_only_where_it_is(anthropic, stages, streamed, asked, reason):
    """Claude Code says of `max_tokens` that its own limit was exceeded, with that number."""
    async with stages(sampling={"max_tokens": 3}) as stage:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)  # or it loads certificates: 50 ms
        stage.engine.say("a long answer")
        async with anthropic.AsyncAnthropic(
            base_url=stage.url, api_key=stage.key(), max_retries=0, http_client=http
        ) as client:
            body = {**ASKED, "max_tokens": asked}
            if streamed:
                async with client.messages.stream(**body) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**body, timeout=60)
        assert answer.stop_reason == reason
