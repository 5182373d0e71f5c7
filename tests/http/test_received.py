"""A client knows which answers its agent has received, whatever library the agent asks with."""

import asyncio
import multiprocessing
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import aiohttp
import httpx
import pytest
import requests
from structlog.testing import capture_logs

from swarmq.client.ask import ask_async
from swarmq.client.episodes import received_answers
from swarmq.client.episodes.received_answers import ReceivedAnswers

HI = {"role": "user", "content": "hi"}
BODY = {"model": "main", "messages": [HI]}


@contextmanager
def watching(stage, base_url=None):
    """What an agent with the stage's key receives."""
    seen, key = ReceivedAnswers(base_url or f"{stage.url}/v1"), stage.key()
    received_answers.watch(key, seen)
    yield seen, key
    received_answers.unwatch(key)


async def by_openai(stage, openai, key, **body):
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as client:
        answer = await client.chat.completions.create(**BODY, **body)
        if body.get("stream"):
            async for _ in answer:
                pass


async def by_responses(stage, openai, key, **body):
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as client:
        answer = await client.responses.create(model="main", input="hi", **body)
        if body.get("stream"):
            async for _ in answer:
                pass


async def by_openai_in_a_thread(stage, openai, key, **body):
    def ask():
        with openai.OpenAI(base_url=f"{stage.url}/v1", api_key=key, max_retries=0) as client:
            answer = client.chat.completions.create(**BODY, **body)
            if body.get("stream"):
                list(answer)

    await asyncio.to_thread(ask)


async def by_anthropic(stage, _openai, key, **body):
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=key, max_retries=0) as client:
        answer = await client.messages.create(**BODY, max_tokens=10, **body)
        if body.get("stream"):
            async for _ in answer:
                pass


async def by_requests(stage, _openai, key, **_):
    headers = {"authorization": f"Bearer {key}"}
    await asyncio.to_thread(requests.post, f"{stage.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)


async def by_aiohttp(stage, _openai, key, **_):
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session,
        session.post(f"{stage.url}/v1/chat/completions", json=BODY) as response,
    ):
        await response.json()


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        *[(ask, {"stream": stream}) for ask in (by_openai, by_openai_in_a_thread) for stream in (False, True)],
        (by_requests, {}),
        (by_aiohttp, {}),
    ],
)  # fmt: skip
async def test_what_the_run_overrides_is_logged_once_whatever_library_asks(stage, openai, monkeypatch, ask, body):
    monkeypatch.setattr(received_answers, "_logged_overrides", set())  # of the process
    monkeypatch.setitem(BODY, "max_tokens", 999)
    with capture_logs() as lines:
        for _ in range(2):
            stage.engine.say("ab")
            with watching(stage) as (_, key):
                await ask(stage, openai, key, **body)
    assert [line["overridden"] for line in lines if line["event"] == "sampling_overridden"] == ["max_tokens"]


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        *[(ask, {"stream": stream}) for ask in (by_openai, by_openai_in_a_thread, by_responses, by_anthropic) for stream in (False, True)],
        (by_requests, {}),
        (by_aiohttp, {}),
    ],
)  # fmt: skip
async def test_an_answer_that_was_read_is_named(stage, openai, ask, body):
    stage.engine.say("ab")
    with watching(stage) as (seen, key):
        await ask(stage, openai, key, **body)
        [turn] = stage.turns()
        assert turn.observed
        assert seen.calls() == (turn.call_id,)


async def test_an_answer_to_swarmqs_own_question_is_named(stage):
    handle = SimpleNamespace(episode_id="e1", base_url=f"{stage.url}/v1", api_key="", model="main", ca=b"")
    with watching(stage) as (seen, key):
        handle.api_key = key
        stage.engine.say("ab")
        assert await ask_async(handle, "hi") == "ab"
        [turn] = stage.turns()
        assert turn.observed
        assert seen.calls() == (turn.call_id,)


async def test_all_choices_of_an_answer_are_named(stage, openai):
    for _ in range(4):
        stage.engine.say("ab")
    with watching(stage) as (seen, key):
        await by_openai(stage, openai, key, n=2, stream=True)
        await by_openai(stage, openai, key, n=2)
        assert seen.calls() == tuple(sorted(turn.call_id for turn in stage.turns()))
        assert len(seen.calls()) == 4


@asynccontextmanager
async def streaming(stage, key):
    """The lines of a streamed answer."""
    headers, body = {"authorization": f"Bearer {key}"}, {**BODY, "stream": True}
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{stage.url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        yield response.aiter_lines()


async def test_an_agent_may_stop_reading_where_the_answer_ends(stage):
    stage.engine.say("ab")
    with watching(stage) as (seen, key):
        async with streaming(stage, key) as lines:
            async for line in lines:
                if '"finish_reason":"stop"' in line:
                    break
        [turn] = stage.turns()
        assert seen.calls() == (turn.call_id,)


async def test_an_answer_that_was_refused_or_cut_is_not_named(stages, openai):
    async with stages(confirm_timeout_s=0.05) as stage:
        with watching(stage) as (seen, key):
            stage.engine.say("ab")
            stage.engine.say("ab")
            stage.broker.away(gone=True)
            for stream in (False, True):
                with pytest.raises(openai.APIError):
                    await by_openai(stage, openai, key, stream=stream)
            assert seen.calls() == ()


async def test_a_stream_that_its_agent_leaves_is_not_named(stage):
    gate = asyncio.Event()
    stage.engine.say("ab", gate=gate)
    with watching(stage) as (seen, key):
        async with streaming(stage, key) as lines:
            await anext(lines)
        gate.set()
        assert seen.calls() == ()


async def test_requests_to_others_bear_no_mark(stage, openai):
    stage.engine.say("ab")
    with watching(stage, "http://elsewhere.example/v1") as (seen, key):
        await by_openai(stage, openai, key)
        assert not stage.turns()[0].observed
        assert seen.calls() is None


async def test_an_ended_episode_is_not_watched(stage, openai):
    stage.engine.say("ab")
    with watching(stage) as (seen, key):
        received_answers.unwatch(key)
        await by_openai(stage, openai, key)
        assert seen.calls() is None


async def test_what_a_library_streams_unwatched_bears_no_mark(stage):
    stage.engine.say("ab")
    with watching(stage) as (seen, key):
        headers = {"authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{stage.url}/v1/chat/completions", json={**BODY, "stream": True}, headers=headers
            ) as response,
        ):
            await response.read()
        assert not stage.turns()[0].observed
        assert seen.calls() is None


def _ask_in_a_child(url, key):
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=headers, timeout=60).raise_for_status()


async def test_a_forked_process_names_nothing_and_marks_nothing(stage):
    stage.engine.say("ab")
    with watching(stage) as (seen, key):
        child = multiprocessing.get_context("fork").Process(target=_ask_in_a_child, args=(stage.url, key))
        child.start()
        await asyncio.to_thread(child.join)
        assert not stage.turns()[0].observed
        assert seen.calls() is None
