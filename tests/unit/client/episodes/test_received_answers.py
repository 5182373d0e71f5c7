"""Where a streamed answer is complete, wherever the wire cuts it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import aiohttp
import httpx
import msgspec
import pytest
from aiohttp import test_utils, web
from hypothesis import given
from hypothesis import strategies as st

from swarmq.client.episodes import received_answers
from swarmq.client.episodes.received_answers import BodyObserver, ReceivedAnswers

HOST = "http://h:1/v1"


def seen():
    agent = ReceivedAnswers(HOST)
    assert agent.mark_request(HOST)
    return agent


def chunk(index, text=None, finish=None):
    delta = {} if text is None else {"content": text}
    body = {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


@given(st.lists(st.integers(0, 400)), st.integers(1, 3), st.text())
def test_a_stream_is_received_when_all_of_its_choices_have_ended(cuts, num, text):
    calls = tuple(f"c{n}" for n in range(num))
    agent = seen()
    stream = BodyObserver(agent, calls, is_events=True)
    said = '"finish_reason":"stop","type":"message_delta"' + text
    whole = b"".join(chunk(n, said) for n in calls) + b"".join(chunk(n, finish="stop") for n in calls)
    edges = sorted({0, len(whole) - 1, *(cut % len(whole) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        stream.take(whole[start:stop])
        is_over = stop > whole.rindex(b"finish_reason") + len(b'finish_reason":"')
        assert agent.calls() == (calls if is_over else ())
    stream.take(whole[-1:] + b"data: [DONE]\n\n")
    assert agent.calls() == calls


def test_a_stream_that_breaks_after_its_end_is_not_received():
    agent = seen()
    stream = BodyObserver(agent, ("c",), is_events=True)
    stream.take(chunk(0, finish="stop"))
    stream.fail()
    assert agent.calls() == ()


def test_what_was_not_watched_is_not_known():
    assert ReceivedAnswers(HOST).calls() is None


class Broken(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off."""

    def __iter__(self):
        yield b'{"id": '
        raise httpx.RemoteProtocolError("the connection was cut")

    async def __aiter__(self):
        for chunk in self:
            yield chunk


def answer_of(body):
    def answer(request):
        assert request.headers["x-swarmq-observed"] == "1"
        return httpx.Response(200, headers={"x-swarmq-call-id": "c.0"}, stream=body)

    return httpx.MockTransport(answer)


@pytest.fixture
def watched():
    seen = ReceivedAnswers(HOST)
    received_answers.watch("key", seen)
    yield seen
    received_answers.unwatch("key")


@pytest.mark.parametrize("body", ["whole", "broken", "unread"])
async def test_a_body_that_is_read_by_hand_is_received_when_it_is_whole(watched, body):
    wire = answer_of(Broken() if body == "broken" else httpx.ByteStream(b'{"id": "c.0"}'))
    how = {"method": "POST", "url": HOST, "headers": {"authorization": "Bearer key"}}

    def read():
        with httpx.Client(transport=wire) as client, client.stream(**how) as response:
            if body != "unread":
                response.read()

    async def read_in_a_coroutine():
        async with httpx.AsyncClient(transport=wire) as client, client.stream(**how) as response:
            if body != "unread":
                await response.aread()

    for reading in (asyncio.to_thread(read), read_in_a_coroutine()):
        with contextlib.suppress(httpx.HTTPError):
            await reading
        assert watched.calls() == (("c.0",) if body == "whole" else ())


@pytest.mark.parametrize("values", [["a"], "text", 3, True, None, {"stream": True}])
@pytest.mark.usefixtures("watched")
async def test_an_agent_may_send_any_json_to_other_servers(values):
    """Its HTTP library is watched, whatever it is used for besides."""

    async def echo(request):
        return web.json_response(await request.json() if request.can_read_body else None)

    app = web.Application()
    app.router.add_post("/", echo)
    async with (
        test_utils.TestServer(app) as server,
        aiohttp.ClientSession() as session,
        session.post(server.make_url("/"), json=values) as answer,
    ):
        assert await answer.json() == values
