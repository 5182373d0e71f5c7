"""Hostile and broken clients against a real vLLM: an honest 4xx, nothing leaked, and the next agent is answered."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from swarmq import keys

pytestmark = [pytest.mark.vllm, pytest.mark.broker]

USER = {"role": "user", "content": "hi"}
BODY = {"model": "main", "messages": [USER], "prompt": "hi", "input": "hi", "max_tokens": 4}
"""Of every dialect."""
FOREIGN = {
    "/v1/chat/completions": {"prompt", "input"},
    "/v1/completions": {"messages", "input"},
    "/v1/responses": {"messages", "prompt", "max_tokens"},
    "/v1/messages": {"prompt", "input"},
}
"""Fields of BODY that a dialect does not have."""
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
INNER = ("/inference", "site-packages", "Traceback", "scale-out", "vllm.")
"""What no agent needs to read."""


def nested(depth, leaf, wrap):
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def deep_schema(depth):
    return nested(depth, {"type": "integer"}, lambda inner: {"type": "object", "properties": {"a": inner}})


def formatted(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def chain(length, link):
    """Definitions that each lead to the next one, in the form that `link` gives a reference."""
    defs = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$defs": {**defs, f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


RECURSION = {"$ref": "#"}
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
REQUESTS = {
    "huge n": {"n": 10**9},
    "huge max_tokens": {"max_tokens": 10**18},
    "max_tokens beyond any integer": {"max_tokens": 10**40},
    "deep schema": formatted(deep_schema(400)),
    "a schema that is itself": formatted(RECURSION),
    "a schema that goes round": formatted(CIRCLE),
    "a schema that doubles forty times": formatted(chain(40, lambda ref: {"allOf": [ref, ref]})),
    "a schema that leads far down": formatted(chain(5000, lambda ref: {"type": "object", "properties": {"a": ref}})),
    "a schema in text that goes round": {"structured_outputs": {"json": json.dumps(CIRCLE)}},
    "a schema of another kind": formatted({"type": "nonsense"}),
    "a schema elsewhere": formatted({"$ref": "file:///etc/passwd"}),
    "a grammar that is none": {"structured_outputs": {"grammar": "root ::= root root"}},
    "a regex without end": {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}},
    "a template of its own": {"chat_template": "{{ ''.__class__.__mro__ }}"},
    "not a number": {"temperature": "NaN"},
    "a role of another kind": {"messages": [{"role": {"a": 1}, "content": "x"}]},
    "tool calls that are none": {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": 1}]}]},
    "arguments that are not JSON": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            },
        ]
    },
    "arguments without a bottom": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 2000}}],
            },
        ]
    },
    "roles that are no text": {"input": [{"role": {}, "content": "x"}], "messages": [{"role": [], "content": "x"}]},
    "two prompts": {"prompt": ["a", "b"]},
    "no tokens": {"max_tokens": 0},
    "a great many choices": {"structured_outputs": {"choice": [f"c{i}" for i in range(50_000)]}},
    "a great many properties": formatted({"type": "object", "properties": {f"p{i}": {} for i in range(4000)}}),
    "a file as an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    },
    "a server of the inside as an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}]
    },
    "a great many stops": {"stop": [str(i) for i in range(10_000)]},
    "a great many biases": {"logit_bias": {str(i): 1 for i in range(5000)}},
    "a bias beyond the vocabulary": {"logit_bias": {"-1": 1}},
}


@asynccontextmanager
async def undisturbed(stage):
    """An agent whose calls go on being answered, and one that asks afterwards."""
    done = asyncio.Event()

    async def others():
        while not done.is_set():
            await stage.ask(USER, max_tokens=4, key=stage.key("other"))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(others())
        try:
            yield
        finally:
            done.set()
    await stage.ask(USER, max_tokens=4, key=stage.key("later"))


@pytest.mark.parametrize(("path", "mode"), [(PATHS[0], "train"), *((path, "eval") for path in PATHS)])
async def test_no_request_breaks_anything(stage, path, mode):
    answered = {}
    async with undisturbed(stage):
        for name, change in REQUESTS.items():
            body = {field: value for field, value in (BODY | change).items() if field not in FOREIGN[path]}
            status, _, raw = await stage.post(body, path, key=stage.key("bad", mode=mode))
            answered[name] = (status, raw.decode())
    assert {name: said for name, said in answered.items() if said[0] >= 500} == {}
    for name, (status, said) in answered.items():
        if status >= 400:
            assert json.loads(said)["error"]["message"], name
            assert not any(word in said for word in (*INNER, stage.engine.url)), (name, said)


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_broken_or_bottomless_is_400(stage, path):
    key = {"authorization": f"Bearer {stage.key()}"}
    for raw in (b"", b"{", b"nul", b"[]", b'{"a":' * 50_000, b"[" * 200_000, b'{"model": "\xff"}', b"\x00" * 100):
        async with stage.http.post(stage.url + path, data=raw, headers=key) as response:
            assert response.status == 400, raw[:20]
            message = (await response.json())["error"]["message"]
            assert "JSON" in message or "objects and lists" in message


@pytest.mark.parametrize("path", PATHS)
async def test_fifty_megabytes_are_413_before_they_are_read(stage, path):
    key = {"authorization": f"Bearer {stage.key()}"}
    pieces = 0

    async def body():
        nonlocal pieces
        yield b'{"model": "'
        for pieces in range(50):  # noqa: B007 - counts what was taken from us
            yield b"x" * 2**20

    async with undisturbed(stage), stage.http.post(stage.url + path, data=body(), headers=key) as response:
        assert response.status == 413
        assert (await response.json())["error"]["type"] in ("invalid_request_error", "request_too_large")
        assert pieces < 40, "it was read to its end"


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("flaw", ["none", "nonsense", "forged", "expired", "another run's", "changed", "a token's"])
async def test_a_key_that_is_not_right_is_401(stage, path, flaw):
    good = stage.key()
    head, claims, mac = good.split(".")
    key = {
        "none": "",
        "nonsense": "sk-nonsense",
        "forged": stage.key(root=b"x" * 32),
        "expired": stage.key(expires_in=-1000),
        "another run's": stage.key(run="other"),
        "changed": f"{head}.{claims[:-4]}AAAA.{mac}",
        "a token's": f"{keys.OPERATOR_PREFIX}.{claims}.{mac}",
    }[flaw]
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
        async with stage.http.post(stage.url + path, json=BODY, headers=headers) as response:
            raw = await response.text()
            assert response.status == 401, (flaw, raw)
            assert not key or key not in raw


async def test_an_episode_cannot_reach_another_s_conversation(stage):
    body = {"model": "main", "input": "secret", "max_output_tokens": 4}
    mine, theirs = ({"authorization": f"Bearer {stage.key(name)}"} for name in ("mine", "theirs"))
    async with stage.http.post(f"{stage.url}/v1/responses", json=body, headers=theirs) as response:
        name = (await response.json())["id"]
    body = {"model": "main", "input": "more", "previous_response_id": name}
    async with stage.http.post(f"{stage.url}/v1/responses", json=body, headers=mine) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "previous_response_not_found"


async def test_a_client_cannot_use_another_s_episode_though_it_knows_its_id(stage):
    body = {"model": "main", "input": "secret", "max_output_tokens": 4}
    mine, theirs = ({"authorization": f"Bearer {stage.key('shared', client=client)}"} for client in ("eve", "alice"))
    async with stage.http.post(f"{stage.url}/v1/responses", json=body, headers=theirs) as response:
        name = (await response.json())["id"]
    for asked in (body | {"previous_response_id": name}, body):
        async with stage.http.post(f"{stage.url}/v1/responses", json=asked, headers=mine) as response:
            assert response.status == 403
            assert (await response.json())["error"]["code"] == "episode_foreign"
    async with stage.http.post(f"{stage.url}/v1/responses", json=body, headers=theirs) as response:
        assert response.status == 200
    assert [turn.client_id for turn in await stage.turns(2)] == ["alice", "alice"]


@pytest.mark.parametrize(
    "header",
    [
        b"X-Swarmq-Agent: a\x00b",
        b"X-Swarmq-Agent: " + "é".encode(),
        b"X-Swarmq-Agent: a; Set-Cookie: x=1",
        b"X-Swarmq-Agent: " + b"a" * 5000,
        b"X-Stainless-Retry-Count: 99999999999999999999999999999999",
        b"X-Stainless-Retry-Count: -1\r\nX-Swarmq-Agent: ok",
        b"Authorization : Bearer x",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    ],
)
async def test_headers_carry_nothing_in(stage, header):
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({field: BODY[field] for field in BODY.keys() - FOREIGN[PATHS[0]]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += b"Authorization: Bearer " + stage.key("h").encode() + b"\r\n" + header + b"\r\n"
    writer.write(head + b"Content-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data)
    answer = await reader.read()
    writer.close()
    head, _, _ = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) < 500
    assert b"set-cookie" not in head.lower()
    await stage.ask(USER, max_tokens=4)


async def test_what_is_not_served_says_what_is(stage):
    key = {"authorization": f"Bearer {stage.key()}"}
    for path in ("/v1/embeddings", "/v1/images/generations", "/v1/audio/speech", "/v1/files", "/inference/v1/generate"):
        async with stage.http.post(stage.url + path, json={"model": "main", "input": "x"}, headers=key) as response:
            assert response.status == 404
            assert "/v1/chat/completions" in (await response.json())["error"]["message"]
