"""Connections that dawdle, with a key and without: closed in time, and never in the way of others."""

import asyncio
import contextlib
import gc
import json
import resource
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from swarmq.proxy.http.connection_limits import MAX_HEAD_BYTES, MAX_IDLE_CONNECTIONS, OWN_FILES, max_connections
from swarmq.runtime import processes

from .test_control import call

HI = {"role": "user", "content": "hi"}
BODY = json.dumps({"model": "main", "messages": [HI]}).encode()
FOREVER = 3600.0
SOON = 0.8
"""For what is sent at once to be there in time on a busy machine too."""


@asynccontextmanager
async def connected(stage):
    host, port = stage.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


LENGTH = len(BODY)


def head(stage, *, key=None, length=LENGTH, path="/v1/chat/completions"):
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key or stage.key()}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


async def closed(reader, writer, more=b""):
    """What was said before the proxy closed, while `more` dribbled in."""
    said = b""

    async def listen():
        nonlocal said
        with contextlib.suppress(ConnectionError):  # by a proxy that closed while more was on its way
            while block := await reader.read(1024):
                said += block

    listening = asyncio.create_task(listen())
    async with asyncio.timeout(120):
        while not listening.done():
            writer.write(more)
            await asyncio.wait([listening], timeout=0.02)
    await listening
    return said


async def answered(reader):
    """The body of one answer."""
    headers = await reader.readuntil(b"\r\n\r\n")
    [length] = [line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return headers, json.loads(await reader.readexactly(int(length.split(b":")[1])))


async def test_a_head_that_dribbles_is_408_and_the_next_agent_is_answered(stages):
    async with stages(receive_timeout_s=SOON) as stage, connected(stage) as (reader, writer):
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        answer = await closed(reader, writer, b"X: y\r\n")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        stage.engine.say("x")
        await stage.ask(HI)


async def test_who_says_nothing_at_all_is_not_waited_for(stages):
    async with stages(receive_timeout_s=SOON) as stage, connected(stage) as (reader, writer):
        assert await closed(reader, writer) == b""


async def test_a_body_that_dribbles_is_408_though_its_key_is_good(stages):
    async with stages(receive_timeout_s=SOON) as stage, connected(stage) as (reader, writer):
        writer.write(head(stage, length=10**6))
        said = asyncio.create_task(answered(reader))
        while not said.done():
            writer.write(b" ")
            await asyncio.wait([said], timeout=0.02)
        headers, body = said.result()
        assert headers.startswith(b"HTTP/1.1 408 ")
        assert body["error"]["code"] == "request_timeout"


async def test_a_body_that_nobody_waits_for_does_not_hold_its_connection(stages):
    async with stages(receive_timeout_s=SOON, keep_s=0) as stage, connected(stage) as (reader, writer):
        writer.write(head(stage, key="sk-wrong", length=10**6))
        answer = await closed(reader, writer, b" ")
        assert answer.startswith(b"HTTP/1.1 401 ")


async def test_a_head_without_end_is_431(stages):
    async with stages(receive_timeout_s=FOREVER) as stage, connected(stage) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nX: " + b"y" * (MAX_HEAD_BYTES + 1))
        assert (await closed(reader, writer)).startswith(b"HTTP/1.1 431 ")


async def test_idle_connections_make_room_for_an_agent_whether_they_have_asked_before_or_not(stages):
    async with stages(receive_timeout_s=FOREVER, most_connections=3) as stage, AsyncExitStack() as stack:
        reader, writer = await stack.enter_async_context(connected(stage))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await answered(reader)
        opened = [await stack.enter_async_context(connected(stage)) for _ in range(9)]
        stage.engine.say("x")
        await stage.ask(HI)
        for idle in ((reader, writer), *opened[:7]):
            assert await closed(*idle) == b""


async def test_where_every_connection_is_in_use_the_next_is_told_to_come_back(stages):
    async with stages(most_connections=1) as stage:
        gate = asyncio.Event()
        stage.engine.say("first", gate=gate)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(stage.ask(HI))
            await stage.engine.sampling_began.wait()
            async with connected(stage) as (reader, writer):
                answer = await closed(reader, writer)
            gate.set()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in answer
        assert first.result()["choices"][0]["message"]["content"] == "first"


async def test_a_connection_is_used_again_and_again_and_by_requests_that_do_not_wait(stages):
    async with stages(receive_timeout_s=60.0) as stage, connected(stage) as (reader, writer):
        for count in (1, 3, 1):
            for _ in range(count):
                stage.engine.say("x")
                writer.write(head(stage) + BODY)
            for _ in range(count):
                _, body = await answered(reader)
                assert body["choices"][0]["message"]["content"] == "x"


@pytest.fixture
def without_collections():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
async def test_an_answered_request_leaves_memory_without_a_garbage_collection(stages, path):
    async with stages() as stage:
        before = _held_requests()
        for key in (None, "refused", None):
            async with connected(stage) as (reader, writer):
                stage.engine.say("x")
                writer.write(head(stage, key=key, path=path) + BODY)
                await answered(reader)
        async with asyncio.timeout(30):
            while _held_requests() > before:  # noqa: ASYNC110 - nothing tells when an object is freed
                await asyncio.sleep(0.01)


def _held_requests():
    return sum(type(one) is RequestResponseCycle for one in gc.get_objects())


async def test_an_agent_that_does_not_read_its_stream_loses_it(stages):
    async with stages(request_timeout_s=SOON) as stage, connected(stage) as (reader, writer):
        stage.engine.say("x" * 100)
        flood = stage.engine.generate

        async def generate(rendered, **how):
            async for deltas in flood(rendered, **how):
                yield deltas
                for delta in deltas:
                    while True:
                        yield [type(delta)(index=0, text="y" * 100_000, token_ids=[5000], logprobs=[-1.0])]

        stage.engine.generate = generate
        body = json.dumps({"model": "main", "messages": [HI], "stream": True}).encode()
        writer.write(head(stage, length=len(body)) + body)
        await reader.readexactly(10)
        async with asyncio.timeout(120):
            while await _open_calls(stage):
                pass


async def _open_calls(stage):
    return (await call(stage, "GET", "/status", roles=["read"]))[1]["open_calls"]


@pytest.mark.parametrize(
    ("given", "raised"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (processes.MAX_OPEN_FILES, resource.RLIM_INFINITY)),
        ((1024, 10**9), (processes.MAX_OPEN_FILES, 10**9)),
        ((10**6, 10**9), None),
        ((4096, 4096), None),
    ],
)
def test_as_many_files_may_be_open_as_the_host_allows(given, raised, monkeypatch):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: given)
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: set_to.append(to))
    assert processes.raise_file_limit() == (raised or given)[0]
    assert set_to == ([raised] if raised else [])


def test_connections_are_as_many_as_calls_need_or_files_allow():
    assert max_connections(65_536, calls=8192) == 8192 + MAX_IDLE_CONNECTIONS
    assert max_connections(1024, calls=8192) == (1024 - OWN_FILES) // 2
    assert max_connections(10, calls=8192) == 1
