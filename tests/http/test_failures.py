"""What goes wrong: nobody gets the end of an answer that is not recorded, and everybody gets an honest status."""

import asyncio
import json

import pytest

from support.proxy import events
from swarmq.broker import topology
from swarmq.engine.client.protocol import Delta
from swarmq.errors import EngineRefusedError
from swarmq.proxy.engines.pool import PoolTimings

from .test_metrics import scrape

HI = {"role": "user", "content": "hi"}
BODY = {"model": "main", "messages": [HI]}


async def test_no_body_before_the_confirm(stages):
    async with stages(confirm_timeout_s=60.0) as stage:
        stage.engine.say("x")
        stage.broker.away(gone=True)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(stage.ask(HI))
            await _published(stage)
            assert not answer.done()
            stage.broker.away(gone=False)
        assert answer.result()["choices"]
        assert len(stage.turns()) == 1


async def test_no_last_chunk_before_the_confirm(stages):
    async with stages(confirm_timeout_s=60.0) as stage:
        stage.engine.say("ab")
        stage.broker.away(gone=True)
        headers = {"authorization": f"Bearer {stage.key()}"}
        body = {**BODY, "stream": True}
        async with stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers) as response:
            seen = b""
            while b'"ab"' not in seen:
                seen += await response.content.readany()
            await _published(stage)
            assert b'finish_reason":"stop' not in seen
            stage.broker.away(gone=False)
            seen += await response.read()
        assert events(seen)[-2]["choices"][0]["finish_reason"] == "stop"


async def test_an_answer_that_cannot_be_recorded_is_503(stages):
    async with stages(confirm_timeout_s=0.05) as stage:
        stage.engine.say("x")
        stage.broker.away(gone=True)
        status, headers, raw = await stage.post(BODY)
        assert (status, headers["retry-after"]) == (503, "2")
        assert b"broker_unavailable" in raw


async def test_a_stream_that_cannot_be_recorded_ends_with_an_error(stages):
    async with stages(confirm_timeout_s=0.05) as stage:
        stage.engine.say("ab")
        stage.broker.away(gone=True)
        *_, last = await stage.stream(HI)
        assert last["error"]["code"] == "broker_unavailable"


async def test_a_call_that_was_not_recorded_is_nobody_s_parent(stages):
    async with stages(confirm_timeout_s=0.05) as stage:
        stage.engine.say("lost")
        stage.broker.away(gone=True)
        await stage.post(BODY)
        stage.broker.away(gone=False)
        stage.engine.say("x")
        await stage.ask(HI, {"role": "assistant", "content": "lost"}, HI)
        [turn] = stage.turns()
        assert turn.parent is None


async def test_a_missing_queue_is_503(stage):
    stage.broker.delete(topology.inbox("r"))
    stage.engine.say("x")
    status, error = await stage.refused(BODY)
    assert (status, error["code"]) == (503, "broker_unavailable")


async def test_an_engine_that_is_away_is_503_and_says_nothing_of_ours(stage):
    stage.engine.down = True
    status, error = await stage.refused(BODY)
    assert (status, error["type"], error["code"]) == (503, "server_error", "engine_unavailable")
    assert "scripted://" not in error["message"]


async def test_another_engine_takes_a_call_that_has_not_begun(stages):
    async with stages(engines=2) as stage:
        stage.engines[0].down = True
        stage.engines[1].say("x")
        await stage.ask(HI)
        assert len(stage.turns()) == 1


async def test_an_episode_stays_with_its_engine_and_new_ones_spread(stages):
    async with stages(engines=2) as stage:
        gate = asyncio.Event()
        for engine in stage.engines:
            engine.say("ab", gate=gate)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.stream(HI, key=stage.key("a")))
            asked = [asyncio.create_task(engine.sampling_began.wait()) for engine in stage.engines]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            home, other = sorted(stage.engines, key=lambda engine: not engine.sampling_began.is_set())
            for task in asked:
                task.cancel()
            for engine in stage.engines:
                engine.say("x")
            other.lines.popleft()
            await stage.ask(HI, key=stage.key("b"))
            assert len(other.requests) == 1
            gate.set()
        await stage.ask(HI, key=stage.key("a"))
        assert len(home.requests) == 2


async def test_an_engine_that_fails_half_way_ends_the_stream_and_leaves_no_turn(stage):
    stage.engine.say("abcd", error="it broke")
    *_, last = await stage.stream(HI)
    assert last["error"]["code"] == "engine_unavailable"
    assert stage.turns() == []


async def test_an_engine_that_stops_early_is_no_answer(stage):
    stage.engine.say("abcd", finish_reason=None)
    status, error = await stage.refused(BODY)
    assert (status, error["code"]) == (503, "engine_unavailable")
    assert stage.turns() == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_hangs_up_cancels_and_leaves_no_turn(stage, streamed):
    gate = asyncio.Event()
    stage.engine.say("abcd", gate=gate)
    headers = {"authorization": f"Bearer {stage.key()}"}
    async with asyncio.TaskGroup() as tasks:
        body = {**BODY, "stream": streamed}
        post = stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers)
        call = tasks.create_task(post.__aenter__())
        await stage.engine.sampling_began.wait()
        if streamed:
            (await call).close()
        else:
            call.cancel()
    await stage.engine.cancelled.wait()
    gate.set()
    assert stage.turns() == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"key": "nonsense"}, "malformed"),
        ({"expires_in": -100.0}, "expired"),
        ({"root": b"x" * 32}, "signature"),
        ({"run": "other"}, "run"),
    ],
)
async def test_a_key_that_is_not_ours_is_401(stage, how, words):
    key = how.get("key") or stage.key(**how)
    status, error = await stage.refused(BODY, key=key)
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert words in error["message"]
    assert key not in error["message"]


async def test_no_key_is_401(stage):
    async with stage.http.post(f"{stage.url}/v1/chat/completions", json=BODY) as response:
        assert response.status == 401


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": ["hi"]}, 400, "messages"),
        ({"n": 0}, 400, "n"),
        ({"n": 1000}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_completion_tokens": "many"}, 400, "max_completion_tokens"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": 3}, 400, "stream_options"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, None),
    ],
)
async def test_a_bad_request_names_its_field(stage, change, status, param):
    got, error = await stage.refused({**BODY, **change})
    assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error")


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_400(stage, raw):
    status, error = await stage.refused(None, raw=raw)
    assert (status, error["code"]) == (400, "invalid_json")


async def test_a_body_that_is_too_large_is_413(stages):
    async with stages(max_body_bytes=1000) as stage:
        status, error = await stage.refused({**BODY, "user": "x" * 2000})
        assert (status, error["code"]) == (413, "request_too_large")
        assert "more than 1000 bytes (proxy.max_body_bytes)" in error["message"]


@pytest.mark.parametrize(("path", "takes"), [("/v1/chat/completions", "POST"), ("/v1/models", "GET")])
async def test_a_method_that_a_path_does_not_take_is_405_and_says_which_it_takes(stage, path, takes):
    headers = {"authorization": f"Bearer {stage.key()}"}
    async with stage.http.delete(stage.url + path, headers=headers) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (405, "method_not_allowed")
        assert takes in response.headers["allow"]
        assert takes in error["message"]


async def test_what_an_engine_refuses_names_its_field_in_the_dialect_s_words(stage):
    async def refuse(_):
        raise EngineRefusedError("max_tokens is odd", status=400, param="max_tokens")

    stage.engine.render = refuse
    for path, body, param in (
        ("/v1/chat/completions", BODY, "max_tokens"),
        ("/v1/responses", {"model": "main", "input": "hi"}, "max_output_tokens"),
    ):
        status, error = await stage.refused(body, path=path)
        assert (status, error["param"]) == (400, param)


async def test_a_body_that_never_ends_is_408(stages):
    async def dawdle():
        yield b"{"
        await asyncio.Event().wait()

    async with stages(receive_timeout_s=1.0) as stage:
        headers = {"authorization": f"Bearer {stage.key()}"}
        async with stage.http.post(f"{stage.url}/v1/messages", data=dawdle(), headers=headers) as response:
            assert response.status == 408
            assert "did not arrive" in (await response.json())["error"]["message"]


async def test_evaluation_that_does_not_fit_the_model_is_too_long(stage):
    status, error = await stage.refused({**BODY, "max_tokens": 5000}, key=stage.key(mode="eval"))
    assert (status, error["code"]) == (400, "context_length_exceeded")


async def test_a_key_s_limits_hold(stage):
    stage.engine.say("x")
    key = stage.key(max_calls=1)
    await stage.ask(HI, key=key)
    status, error = await stage.refused(BODY, key=key)
    assert (status, error["code"]) == (403, "episode_calls_exhausted")
    stage.engine.say("abcdef")
    key = stage.key("e2", max_tokens=2)
    await stage.ask(HI, key=key)
    status, error = await stage.refused(BODY, key=key)
    assert (status, error["code"]) == (403, "episode_tokens_exhausted")


async def test_unknown_routes_answer_in_openai_s_form(stage):
    async with stage.http.get(f"{stage.url}/v1/nothing") as response:
        assert response.status == 404
        assert "message" in (await response.json())["error"]


async def test_a_strange_agent_tag_is_refused(stage):
    status, _ = await stage.refused(BODY, headers={"x-swarmq-agent": "a" * 65})
    assert status == 400


async def _published(stage):
    """Return once the engine was asked and the proxy had many turns of the loop to misbehave."""
    await stage.engine.sampling_began.wait()
    for _ in range(50):
        await asyncio.sleep(0.001)


NAN, INF = float("nan"), float("inf")


def flawed(logprobs):
    """What `generate` is to be: an answer of as many tokens."""

    async def generate(_, *, stream, detailed):
        size = len(logprobs)
        yield [Delta(index=0, text="x", token_ids=[1000] * size, logprobs=logprobs, finish_reason="stop")]

    return generate


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("reason", "logprobs"),
    [("empty", []), ("logprobs", [NAN]), ("logprobs", [-INF]), ("logprobs", [-0.1, 0.7])],
    ids=str,
)
async def test_an_answer_that_cannot_be_trained_is_refused_for_good_and_counted(stage, reason, logprobs, streamed):
    """A reader of the queue would park such a turn, and the episode would go on without it. Who asks again gets the same."""
    stage.engine.generate = flawed(logprobs)
    if streamed:
        *_, last = await stage.stream(HI)
        error = last["error"]
    else:
        status, headers, raw = await stage.post(BODY)
        error = json.loads(raw)["error"]
        assert (status, headers["x-should-retry"], headers.get("retry-after")) == (502, "false", None)
    assert (error["type"], error["code"]) == ("server_error", "engine_answer_unusable")
    assert stage.turns() == []
    assert (await scrape(stage))["swarmq_unusable_answers_total", reason] == 1


async def test_an_engine_with_unusable_answers_is_told_of_and_asked_last(stages):
    async with (
        stages(engines=2, engine_timings=PoolTimings(wait_s=0.0, avoid_s=1e9)) as stage,
        stage.broker.events("r") as heard,
    ):
        broken, sound = stage.engines
        broken.generate = flawed([NAN])
        for _ in range(12):
            sound.say("x")
        statuses = [(await stage.post(BODY, key=stage.key(f"e{n}")))[0] for n in range(12)]
        assert sorted(statuses) == [200] * 11 + [502], (
            "it is asked once, by the first episode that it would be the home of"
        )
        async for event in heard:
            if event.name == "warning":
                break
        for told in ("policy main: 1 answer", broken.url, "(logprobs)", "not finite"):
            assert told in event.fields["text"]


async def test_client_libraries_do_not_ask_again_for_an_unusable_answer(stage, openai, anthropic):
    asked, answer = [], flawed([NAN])

    async def generate(rendered, **how):
        asked.append(rendered)
        async for portion in answer(rendered, **how):
            yield portion

    stage.engine.generate = generate
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=stage.key(), max_retries=3) as client:
        with pytest.raises(openai.APIStatusError, match="cannot be used"):
            await client.chat.completions.create(**BODY)
    async with anthropic.AsyncAnthropic(base_url=stage.url, api_key=stage.key(), max_retries=3) as client:
        with pytest.raises(anthropic.APIStatusError, match="cannot be used"):
            await client.messages.create(**BODY, max_tokens=8)
    assert len(asked) == 2
