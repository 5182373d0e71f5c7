"""Tools beyond plain functions: namespaces of functions, and what only a provider could run."""

import json

import pytest

from swarmq.testing.scripted_engine import decode

PARAMETERS = {"type": "object", "properties": {}}
SEARCH = {"type": "web_search"}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
FLAT_TOOL = {"type": "function", "name": "add", "parameters": PARAMETERS}
USE = {"name": "add", "input_schema": PARAMETERS}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [FLAT_TOOL]}
HI = {"role": "user", "content": "hi"}
BODIES = {
    "/v1/chat/completions": {"model": "main", "messages": [HI], "tools": [CHAT_TOOL, SEARCH]},
    "/v1/responses": {"model": "main", "input": "hi", "tools": [FLAT_TOOL, SEARCH]},
    "/v1/messages": {"model": "main", "messages": [HI], "max_tokens": 30, "tools": [USE, SEARCH]},
}
every_dialect = pytest.mark.parametrize("path", BODIES)


@every_dialect
async def test_tools_that_a_provider_would_run_are_left_out_and_named(stage, path):
    stage.engine.say("hello")
    status, headers, raw = await stage.post(BODIES[path], path)
    assert (status, headers.get("x-swarmq-overridden")) == (200, "tools.web_search"), raw
    assert "add" in decode(stage.engine.requests[0].token_ids)
    assert "web_search" not in decode(stage.engine.requests[0].token_ids)


@every_dialect
async def test_a_run_may_refuse_them(stages, path):
    async with stages(server_tools="refuse") as stage:
        status, _, raw = await stage.post(BODIES[path], path)
        assert (status, "proxy.server_tools" in raw.decode()) == (400, True)
        assert stage.engine.requests == []


@every_dialect
async def test_a_request_with_nothing_but_such_tools_has_no_tools(stage, path):
    stage.engine.say("hello")
    choice = {"type": "auto"} if path == "/v1/messages" else "auto"
    status, _, raw = await stage.post({**BODIES[path], "tools": [SEARCH], "tool_choice": choice}, path)
    assert (status, stage.engine.requests[0].needs_parsing) == (200, False), raw


@every_dialect
async def test_a_choice_of_a_tool_that_was_left_out_is_refused(stage, path):
    choice = {"type": "any"} if path == "/v1/messages" else "required"
    status, _, raw = await stage.post({**BODIES[path], "tools": [SEARCH], "tool_choice": choice}, path)
    words = "tool_choice asks for a tool, and none is left: only a provider could run web_search"
    assert (status, words in raw.decode(), stage.engine.requests) == (400, True, []), raw


async def test_they_are_counted_and_warned_of_once(stage):
    warnings, counted = [], {}
    async with stage.broker.events("r") as told:
        for _ in range(3):
            stage.engine.say("hello")
            await stage.post(BODIES["/v1/responses"], "/v1/responses")
        async for event in told:  # a state says what was counted, the warnings come after it
            if event.name == "warning":
                warnings.append(event.fields["text"])
            elif counted == {"tools.web_search": 3}:
                break
            else:
                counted = event.fields["left_out"]
    [warning] = warnings
    assert "web_search" in warning


@pytest.mark.parametrize("streamed", [False, True])
async def test_functions_of_a_namespace_are_called_by_namespace_and_name(stage, openai, streamed):
    http = openai.DefaultAsyncHttpxClient(verify=False)  # or it loads certificates: 50 ms
    asked = {"model": "main", "tools": [AGENTS, FLAT_TOOL]}
    async with openai.AsyncOpenAI(
        base_url=f"{stage.url}/v1", api_key=stage.key(), max_retries=0, http_client=http
    ) as client:
        stage.engine.say('<tool_call>{"name": "agents__add", "arguments": {"a": 1}}</tool_call>')
        if streamed:
            async with client.responses.stream(input="hi", **asked) as stream:
                first = await stream.get_final_response()
        else:
            first = await client.responses.create(input="hi", **asked)
        [call] = first.output
        assert (call.namespace, call.name, call.arguments) == ("agents", "add", '{"a": 1}')
        stage.engine.say("done")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        given = [HI, call.to_dict(), result]
        await client.responses.create(input=given, **asked)
    first, second = stage.turns()
    assert (second.parent, second.branch) == (first.call_id, None)
    assert [f["function"]["name"] for f in json.loads(first.messages)[-1]["tool_calls"]] == ["agents__add"]


@pytest.mark.parametrize(
    "tool", [{"type": "namespace", "name": "n"}, {"type": "custom", "name": "patch"}, {**AGENTS, "tools": [SEARCH]}]
)
async def test_what_is_neither_a_function_nor_run_elsewhere_is_refused(stage, tool):
    status, error = await stage.refused({**BODIES["/v1/responses"], "tools": [tool]}, path="/v1/responses")
    assert (status, error["param"]) == (400, "tools")


@pytest.mark.parametrize("streamed", [False, True])
async def test_text_blocks_of_messages_have_no_empty_citations(stage, streamed):
    """Clients that check an answer's form (the Vercel AI SDK) take a list or nothing."""
    stage.engine.say("hello")
    body = {"model": "main", "messages": [HI], "max_tokens": 30, "stream": streamed}
    status, _, raw = await stage.post(body, "/v1/messages")
    assert (status, b"citations" in raw) == (200, False)


async def test_an_episode_whose_calls_are_refused_is_told_of_once_with_the_reason(stage):
    """The collector learns so why an episode ends without a turn."""
    body = {**BODIES["/v1/responses"], "tools": [{"type": "custom", "name": "patch"}]}
    told = []
    async with stage.broker.events("r") as events:
        for episode in ("e1", "e1", "e2"):
            await stage.refused(body, path="/v1/responses", key=stage.key(episode))
        async for event in events:
            if event.name == "refused":
                told.append((event.fields["episode_id"], "custom" in event.fields["why"]))
            if told and told[-1][0] == "e2":
                break
    assert told == [("e1", True), ("e2", True)]
