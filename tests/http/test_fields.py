"""What is asked for and not given is refused by name, or named in the header, in the words of the dialect."""

import json

import pytest

HI = {"role": "user", "content": "hi"}
BODIES = {
    "/v1/chat/completions": {"model": "main", "messages": [HI]},
    "/v1/completions": {"model": "main", "prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"model": "main", "input": "hi"},
    "/v1/messages": {"model": "main", "messages": [HI], "max_tokens": 3},
}
every_dialect = pytest.mark.parametrize("path", BODIES)


@pytest.mark.parametrize("mode", ["train", "eval"])
@every_dialect
async def test_what_would_make_another_answer_is_refused_by_name(stage, path, mode):
    for field, value in (
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("return_token_ids", True),
        ("return_tokens_as_token_ids", True),
        ("truncate_prompt_tokens", 5),
        ("echo", True),
    ):
        status, _, raw = await stage.post({**BODIES[path], field: value}, path, key=stage.key(mode=mode))
        assert (status, field in json.loads(raw)["error"]["message"]) == (400, True), raw
    assert stage.engine.requests == []


@every_dialect
async def test_what_makes_no_other_answer_is_named_in_the_header(stage, path):
    stage.engine.say("x")
    asked = {"priority": 1, "cache_salt": "s", "stream": True, "echo": False, "prompt_logprobs": None}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    _, headers, _ = await stage.post({**BODIES[path], **asked, **usage}, path, key=stage.key(mode="eval"))
    assert headers["x-swarmq-overridden"] == "priority, cache_salt, continuous_usage_stats"


@pytest.mark.parametrize(
    ("asked", "told"), [({"truncation": "auto"}, "truncation"), ({"truncation": "disabled"}, None), ({}, None)]
)
async def test_a_conversation_is_never_truncated_and_a_response_says_so(stage, asked, told):
    stage.engine.say("x")
    _, headers, raw = await stage.post({**BODIES["/v1/responses"], **asked}, "/v1/responses")
    assert (headers.get("x-swarmq-overridden"), json.loads(raw)["truncation"]) == (told, "disabled")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
async def test_a_field_is_called_what_the_agent_calls_it(stages, path, field):
    async with stages() as stage:
        stage.engine.say("x")
        _, headers, _ = await stage.post({**BODIES[path], field: 999}, path)
        assert headers["x-swarmq-overridden"] == field
        stage.engine.say("abc")
        budget = {"max_tokens": 2, "mode": "eval"}
        _, headers, _ = await stage.post({**BODIES[path], field: 3}, path, key=stage.key("e2", **budget))
        assert headers["x-swarmq-overridden"] == field
    async with stages(sampling={"conflicts": "refuse"}) as stage:
        status, _, raw = await stage.post({**BODIES[path], field: 999}, path)
        error = json.loads(raw)["error"]
        assert (status, error["message"].endswith(f"leave out {field}")) == (400, True)
        assert path == "/v1/messages" or (error["code"], error["param"]) == ("sampling_conflict", field)


async def test_thinking_is_called_what_the_agent_calls_it(stage):
    stage.engine.say("x")
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    _, headers, _ = await stage.post({**BODIES["/v1/messages"], **thinking}, "/v1/messages")
    assert headers["x-swarmq-overridden"] == "thinking"


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_messages_have_to_say_max_tokens_and_get_what_there_is_room_for(stage, mode):
    stage.engine.say("x")
    body = {**BODIES["/v1/messages"], "max_tokens": 64_000}
    status, headers, _ = await stage.post(body, "/v1/messages", key=stage.key(mode=mode))
    assert (status, headers["x-swarmq-overridden"]) == (200, "max_tokens")
    [asked] = stage.engine.requests
    room = 4096 - len(asked.token_ids)
    assert asked.sampling["max_tokens"] == (room if mode == "eval" else 200)


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/messages"])
async def test_elsewhere_more_than_there_is_room_for_is_refused_in_evaluation(stage, path):
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    status, error = await stage.refused({**BODIES[path], field: 64_000}, path=path, key=stage.key(mode="eval"))
    assert (status, error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0]"),
        ("/v1/chat/completions", {"tools": [1]}, "tools"),
        ("/v1/chat/completions", {"response_format": "json"}, "response_format"),
        ("/v1/chat/completions", {"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ("/v1/completions", {"frequency_penalty": True}, "frequency_penalty"),
        ("/v1/responses", {"temperature": "hot"}, "temperature"),
        ("/v1/responses", {"tools": {}}, "tools"),
        ("/v1/responses", {"include": 1}, "include"),
        ("/v1/responses", {"store": "no"}, "store"),
        ("/v1/responses", {"truncation": True}, "truncation"),
        ("/v1/responses", {"instructions": False}, "instructions"),
        ("/v1/messages", {"tools": 0}, "tools"),
        ("/v1/messages", {"system": {}}, "system"),
        ("/v1/messages", {"stop_sequences": "x"}, "stop_sequences"),
    ],
)
async def test_what_is_of_the_wrong_kind_is_refused_before_an_engine_sees_it(stage, path, change, param):
    status, _, raw = await stage.post({**BODIES[path], **change}, path)
    error = json.loads(raw)["error"]
    assert (status, param in error["message"] or error["param"] == param) == (400, True), error
    assert stage.engine.requests == []


CHAT_PATH = "/v1/chat/completions"
ASKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("path", "change", "param", "code"),
    [
        (CHAT_PATH, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        (CHAT_PATH, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        (CHAT_PATH, {"messages": [HI, {"role": "assistant"}]}, "messages[1].content", "missing_required_parameter"),
        (
            CHAT_PATH,
            {"messages": [HI, {"role": "tool", "tool_call_id": "c1", "content": "3"}]},
            "messages",
            "invalid_value",
        ),
        (
            CHAT_PATH,
            {"messages": [HI, ASKED, {"role": "tool", "tool_call_id": "c2", "content": "3"}]},
            "messages",
            "invalid_value",
        ),
        (CHAT_PATH, {"max_token": 5}, "max_token", "unknown_parameter"),
        (CHAT_PATH, {"input": "x"}, "input", "unknown_parameter"),
        (CHAT_PATH, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (CHAT_PATH, {"max_tokens": 1_000_000_000}, "max_tokens", "invalid_value"),
        ("/v1/completions", {"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ("/v1/responses", {"messages": [HI]}, "messages", "unknown_parameter"),
        ("/v1/responses", {"max_output_tokens": 1_000_000_000}, "max_output_tokens", "invalid_value"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "3"}]},
            "input",
            "invalid_value",
        ),
        *((path, {"model": None}, "model", "invalid_value") for path in BODIES if path != "/v1/messages"),
    ],
)
async def test_openai_s_refusals_are_ours(stage, path, change, param, code):
    status, error = await stage.refused({**BODIES[path], **change}, path=path)
    assert (status, error["param"], error["code"]) == (400, param, code), error
    assert stage.engine.requests == []


async def test_an_unknown_parameter_names_the_one_that_was_meant_and_may_be_left_out(stages):
    async with stages() as stage:
        _, error = await stage.refused({**BODIES[CHAT_PATH], "max_token": 5})
        assert error["message"] == "Unknown parameter: 'max_token'. Did you mean 'max_tokens'?"
    async with stages(unknown_parameters="leave_out") as stage:
        stage.engine.say("x")
        status, headers, _ = await stage.post({**BODIES[CHAT_PATH], "max_token": 5})
        assert (status, headers["x-swarmq-overridden"]) == (200, "max_token")


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_without_a_model_is_told_so(stage, path):
    body = {name: value for name, value in BODIES[path].items() if name != "model"}
    status, _, raw = await stage.post(body, path)
    assert (status, b"model parameter" in raw) == (400, True)


async def test_a_result_of_a_tool_that_was_called_is_heard(stage):
    stage.engine.say("x")
    await stage.ask(HI, ASKED, {"role": "tool", "tool_call_id": "c1", "content": "3"})
