"""The same requests to vLLM and to the proxy: the same greedy answers, and errors of the same class."""

import asyncio
import json

import msgspec
import pytest

from support.engine import KNOWN

pytestmark = [pytest.mark.vllm, pytest.mark.broker]

USER = {"role": "user", "content": "What is 17 + 25?"}
CHAT = {"messages": [USER], "max_tokens": 20}
TEXT = {"prompt": "The quick brown fox", "max_tokens": 20}
RESPONSE = {"input": "What is 17 + 25?", "max_output_tokens": 20}
MESSAGE = {"messages": [USER], "max_tokens": 20}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
USE = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "v", "schema": SCHEMA}}
CALL = {"regex": r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]\}\}\n</tool_call>'}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
NOTHING = ("id", "created", "created_at", "model", "system_fingerprint", "usage", "object")

SAME_ANSWERS = {
    "/v1/chat/completions": [
        {},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "42."}, {"role": "user", "content": "Sure?"}]},
        {"stop": ["e"]},
        {"logprobs": True, "top_logprobs": 2},
        {"logit_bias": {"70": 100}, "max_tokens": 3},
        {"response_format": FORMAT, "max_tokens": 60},
        {"tools": [TOOL], "structured_outputs": CALL, "max_tokens": 60},
        {"n": 2, "temperature": 1.0, "seed": 7},
    ],
    "/v1/completions": [{}, {"prompt": [300, 301, 302]}, {"stop": "e"}, {"logprobs": 2, "max_tokens": 4}],
    "/v1/responses": [{}, {"instructions": "Be brief."}, {"tools": [FLAT_TOOL]}],
    "/v1/messages": [{}, {"system": "Be brief."}, {"stop_sequences": ["e"]}, {"tools": [USE]}],
}
COUNTED = [{}, {"system": "Be brief."}, {"tools": [USE]}]
BASES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {"messages": [USER]},
}
SAME_ERRORS = {
    "/v1/chat/completions": [
        {"model": "gpt-4"},
        {"messages": "hi"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}]},
        {"messages": [{"role": "user", "content": "hello " * 5000}]},
        {"temperature": -1},
        {"top_p": 7},
        {"max_tokens": -1},
        {"max_tokens": 100_000},
        {"top_logprobs": 50, "logprobs": True},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "(unclosed"}},
        {"logit_bias": {"99999999": 1}},
        {"n": 0},
        {"n": 2},
        {"stop": 7},
        {"seed": "x"},
    ],
    "/v1/completions": [{"prompt": []}, {"prompt": [99_999_999]}, {"max_tokens": -1}, {"prompt": "hello " * 5000}],
    "/v1/responses": [{"input": 7}, {"max_output_tokens": -5}, {"tool_choice": "always"}],
    "/v1/messages": [{"messages": 7}, {"max_tokens": None}, {"max_tokens": -1}, {"tools": [{"name": 7}]}],
}


async def both(stage, path, change):
    """Status and body of vLLM's answer and of the proxy's."""
    request = {**BASES[path], "temperature": 0.0, **change}
    served = (await stage.engine.info()).model

    async def ask(url, model, headers):
        body = {"model": model, **request}
        async with stage.http.post(url + path, json=body, headers=headers) as response:
            return response.status, await response.read()

    key = {"authorization": f"Bearer {stage.key(f'd-{hash(json.dumps(request))}', mode='eval')}"}
    return await asyncio.gather(ask(stage.engine.url, served, KNOWN), ask(stage.url, "main", key))


def essence(path, raw):
    """What an agent acts on."""
    answer = msgspec.json.decode(raw)
    match path:
        case "/v1/chat/completions":
            return [
                (
                    choice["message"]["content"] or "",
                    [call["function"] for call in choice["message"].get("tool_calls") or ()],
                    choice["finish_reason"],
                    choice["stop_reason"],
                    _logprobs((choice["logprobs"] or {}).get("content")),
                )
                for choice in answer["choices"]
            ]
        case "/v1/completions":
            return [
                (
                    choice["text"],
                    choice["finish_reason"],
                    choice["stop_reason"],
                    (choice["logprobs"] or {}).get("tokens"),
                    (choice["logprobs"] or {}).get("text_offset"),
                    (choice["logprobs"] or {}).get("token_logprobs", ()),
                )
                for choice in answer["choices"]
            ]
        case "/v1/responses":
            texts = [part["text"] for item in answer["output"] for part in item["content"]]
            return (answer["status"], answer["incomplete_details"], texts)
        case "/v1/messages":
            texts = [block["text"] for block in answer["content"]]
            return (texts, answer["stop_reason"], answer.get("stop_sequence"), answer["usage"]["output_tokens"])


def read_stream(path, raw):
    """Return the text of a streamed answer, and how it ended."""
    events = [msgspec.json.decode(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    match path:
        case "/v1/chat/completions" | "/v1/completions":
            choices = [choice for event in events for choice in event["choices"]]
            texts = [choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices]
            return "".join(texts), choices[-1]["finish_reason"]
        case "/v1/responses":
            texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
            return "".join(texts), events[-1]["type"].removeprefix("response.")
        case "/v1/messages":
            texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
            [ending] = [event["delta"] for event in events if event["type"] == "message_delta"]
            return "".join(texts), ending["stop_reason"]


def read_whole(path, raw):
    """Return the same of an answer that was not streamed."""
    found = essence(path, raw)
    match path:
        case "/v1/chat/completions":
            return found[0][0], found[0][2]
        case "/v1/completions":
            return found[0][:2]
        case "/v1/responses":
            return "".join(found[2]), found[0]
        case "/v1/messages":
            return "".join(found[0]), found[1]


def _logprobs(entries):
    return [(e["token"], e["logprob"], len(e["top_logprobs"])) for e in entries or ()]


def same(one, other):
    """Equal, log-probabilities nearly: what is computed beside each of two requests changes their last bits."""
    match one:
        case float():
            return isinstance(other, float) and abs(one - other) < 1e-3
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("path", SAME_ANSWERS)
async def test_answers_are_vllm_s_own(stage, path):
    for change in SAME_ANSWERS[path]:
        (status, direct), (through, proxied) = await both(stage, path, change)
        assert (status, through) == (200, 200), (change, direct, proxied)
        assert same(essence(path, proxied), essence(path, direct)), (change, direct, proxied)


@pytest.mark.parametrize("path", SAME_ANSWERS)
async def test_a_stream_says_what_vllm_answers_at_once(stage, path):
    """Its own streams of responses end as `completed` where they were cut, and those of messages hold text back."""
    for change in SAME_ANSWERS[path][:2]:
        (status, direct), _ = await both(stage, path, change)
        _, (through, proxied) = await both(stage, path, {**change, "stream": True})
        assert (status, through) == (200, 200), (change, direct, proxied)
        assert read_stream(path, proxied) == read_whole(path, direct), change


async def test_prompts_have_as_many_tokens_as_vllm_counts(stage):
    for change in COUNTED:
        (status, direct), (through, proxied) = await both(stage, "/v1/messages/count_tokens", change)
        assert (status, through) == (200, 200), (change, direct, proxied)
        assert msgspec.json.decode(proxied)["input_tokens"] == msgspec.json.decode(direct)["input_tokens"]


@pytest.mark.parametrize("path", SAME_ERRORS)
async def test_errors_are_of_vllm_s_class(stage, path):
    unlike = []
    for change in SAME_ERRORS[path]:
        (status, direct), (through, proxied) = await both(stage, path, change)
        if status != through or "error" not in msgspec.json.decode(proxied):
            unlike.append((change, status, direct[:200], through, proxied[:200]))
    assert not unlike
