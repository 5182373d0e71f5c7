"""Limits: how many calls at a time, how long, how many of an episode, and what a training episode may ask for."""

import asyncio

import pytest

from swarmq.proxy.completions.limiter import CallLimiter
from swarmq.proxy.episodes.token_budget import Reservation, TokenBudget
from swarmq.proxy.http_errors import RefusedError

HI = {"role": "user", "content": "hi"}
BODY = {"model": "main", "messages": [HI]}


async def test_what_is_beyond_the_limit_waits_its_turn_and_what_is_beyond_that_is_told_when_to_come_back(stages):
    async with stages(max_open_calls=1, max_waiting_calls=1) as stage:
        gate = asyncio.Event()
        stage.engine.say("first", gate=gate)
        stage.engine.say("second")
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(stage.ask(HI))
            await stage.engine.sampling_began.wait()
            second = tasks.create_task(stage.ask(HI))
            await _waiting(stage, 1)
            status, headers, raw = await stage.post(BODY)
            assert (status, b"proxy_overloaded" in raw, b'"rate_limit_error"' in raw) == (429, True, True)
            assert int(headers["retry-after"]) >= 1
            assert not second.done()
            gate.set()
        assert [t.result()["choices"][0]["message"]["content"] for t in (first, second)] == ["first", "second"]
        await _waiting(stage, 0, calls=0)


async def test_one_episode_cannot_take_every_place(stages):
    async with stages(max_episode_calls=1) as stage:
        gate = asyncio.Event()
        stage.engine.say("first", gate=gate)
        stage.engine.say("other")
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(stage.ask(HI))
            await stage.engine.sampling_began.wait()
            status, headers, raw = await stage.post(BODY)
            assert (status, b"episode_calls_open" in raw, int(headers["retry-after"]) >= 1) == (429, True, True)
            await stage.ask(HI, key=stage.key("e2"))
            gate.set()
        assert first.result()["choices"]


async def test_a_body_that_dribbles_counts_as_a_call_of_its_episode(stages):
    async with stages(max_episode_calls=1) as stage:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def dribble():
            yield b"{"
            begun.set()
            await go_on.wait()

        async def late():
            headers = {"authorization": f"Bearer {stage.key()}"}
            async with stage.http.post(f"{stage.url}/v1/responses", data=dribble(), headers=headers) as response:
                return response.status

        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(late())
            await begun.wait()
            while not stage.episodes.of("e1", "c").open_calls:
                async with stage.http.get(f"{stage.url}/health"):
                    pass
            status, error = await stage.refused(BODY)
            assert (status, error["code"]) == (429, "episode_calls_open")
            go_on.set()
        assert held.result() == 400


@pytest.mark.parametrize(
    "fields", [{"stop": ["x"] * 65}, {"stop": "x" * 1025}, {"logit_bias": {str(i): 1 for i in range(1025)}}], ids=str
)
async def test_what_is_looked_at_for_every_token_has_its_measure(stage, fields):
    status, error = await stage.refused({**BODY, **fields}, key=stage.key(mode="eval"))
    assert (status, error["param"]) == (400, next(iter(fields)))


async def test_places_are_given_back_whatever_becomes_of_a_call(stages):
    async with stages(max_open_calls=1, max_waiting_calls=0) as stage:
        stage.engine.say("abcd", error="it broke")
        await stage.stream(HI)
        stage.engine.down = True
        await stage.refused(BODY)
        stage.engine.down = False
        await stage.refused({**BODY, "messages": [{"role": "user", "content": "x" * 9000}]})
        gate = asyncio.Event()
        stage.engine.sampling_began.clear()
        stage.engine.say("abcd", gate=gate)
        headers = {"authorization": f"Bearer {stage.key()}"}
        post = stage.http.post(f"{stage.url}/v1/chat/completions", json={**BODY, "stream": True}, headers=headers)
        (await post.__aenter__()).close()
        await stage.engine.cancelled.wait()
        await _waiting(stage, 0, calls=0)
        stage.engine.say("x")
        await stage.ask(HI)


async def test_a_gate_lets_in_as_many_as_it_says_in_order_and_forgets_who_gave_up():
    gate = CallLimiter(max_open=2, max_waiting=3)
    passes = [await gate.enter() for _ in range(2)]
    order = []

    async def come(name):
        place = await gate.enter()
        order.append(name)
        return place

    tasks = [asyncio.create_task(come(name)) for name in "abc"]
    await asyncio.sleep(0)
    with pytest.raises(RefusedError):
        await gate.enter()
    tasks[0].cancel()
    await asyncio.sleep(0)
    passes[0].give_back()
    passes[0].give_back()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await tasks[1]
    assert (order, gate.open, gate.waiting) == (["b"], 2, 1)
    passes[1].give_back()
    (await tasks[2]).give_back()
    tasks[1].result().give_back()
    assert (order, gate.open, gate.waiting) == (["b", "c"], 0, 0)


async def test_who_is_cancelled_in_the_moment_of_its_turn_passes_it_on():
    gate = CallLimiter(max_open=1, max_waiting=2)
    place = await gate.enter()
    first, second = (asyncio.create_task(gate.enter()) for _ in range(2))
    await asyncio.sleep(0)
    place.give_back()
    first.cancel()
    (await second).give_back()
    assert (gate.open, gate.waiting) == (0, 0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_takes_too_long_ends_with_504_and_leaves_no_turn(stages, streamed):
    async with stages(request_timeout_s=1.0) as stage:
        stage.engine.say("abcd", gate=asyncio.Event())
        if streamed:
            *_, last = await stage.stream(HI)
            assert last["error"]["code"] == "deadline_exceeded"
        else:
            status, error = await stage.refused(BODY)
            assert (status, error["code"]) == (504, "deadline_exceeded")
        assert stage.engine.cancelled.is_set()
        assert stage.turns() == []


async def test_calls_side_by_side_cannot_sample_more_than_the_episode_s_budget(stage):
    key = stage.key(max_tokens=10)
    gates = [asyncio.Event() for _ in range(2)]
    for gate in gates:
        stage.engine.say("a" * 100, gate=gate)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(stage.post({**BODY, "max_tokens": 6}, key=key))
        await stage.engine.sampling_began.wait()
        stage.engine.sampling_began.clear()
        second = tasks.create_task(stage.post({**BODY, "max_tokens": 8}, key=key))
        await stage.engine.sampling_began.wait()
        status, error = await stage.refused(BODY, key=key)
        assert (status, error["code"]) == (429, "episode_tokens_reserved")
        for gate in gates:
            gate.set()
    assert [request.sampling["max_tokens"] for request in stage.engine.requests] == [6, 4]
    assert "x-swarmq-overridden" not in first.result()[1]
    assert second.result()[1]["x-swarmq-overridden"] == "max_tokens"
    assert sum(len(turn.sampled_ids) // 4 for turn in stage.turns()) == 10
    status, error = await stage.refused(BODY, key=key)
    assert (status, error["code"]) == (403, "episode_tokens_exhausted")


async def test_a_kind_limits_all_that_its_episodes_sample_and_not_one_answer_only(stages):
    async with stages(kinds={"long": {"episode_tokens": 10}}) as stage:
        for number, sampled in enumerate([6, 4]):
            stage.engine.say("a" * 100)
            answer = await stage.ask(HI, key=stage.key("e1", kind="long"), max_tokens=6)
            assert answer["usage"]["completion_tokens"] == sampled, f"call {number}"
            assert answer["choices"][0]["finish_reason"] == "length"
        status, error = await stage.refused(BODY, key=stage.key("e1", kind="long"))
        assert (status, error["code"]) == (403, "episode_tokens_exhausted")
        for other in (stage.key("e2", kind="long"), stage.key("e3", kind="short")):
            stage.engine.say("abc")
            await stage.ask(HI, key=other)


async def test_a_kind_limits_the_calls_of_its_episodes(stages):
    async with stages(kinds={"long": {"episode_calls": 2}}) as stage:
        for key in [stage.key("e1", kind="long")] * 2 + [stage.key("e2", kind="long"), stage.key("e3", kind="short")]:
            stage.engine.say("abc")
            await stage.ask(HI, key=key)
        status, error = await stage.refused(BODY, key=stage.key("e1", kind="long"))
        assert (status, error["code"]) == (403, "episode_calls_exhausted")


def test_what_a_call_did_not_sample_comes_back():
    budget = TokenBudget()
    reserved = Reservation(budget, 2, 5)
    reserved.sampled(3)
    assert (budget.sampled_tokens, budget.reserved_tokens) == (3, 5)
    reserved.end()
    reserved.end()
    assert (budget.sampled_tokens, budget.reserved_tokens) == (3, 0)


async def test_a_call_that_no_engine_answered_does_not_count(stage):
    key = stage.key(max_calls=1)
    stage.engine.down = True
    await stage.refused(BODY, key=key)
    stage.engine.down = False
    stage.engine.say("x")
    await stage.ask(HI, key=key)


async def test_a_conflicting_request_is_refused_where_the_run_says_so(stages):
    async with stages(sampling={"conflicts": "refuse"}) as stage:
        for fields, param in (
            ({"temperature": 0.1}, "temperature"),
            ({"top_p": 0.5}, "top_p"),
            ({"max_tokens": 999}, "max_tokens"),
        ):
            status, error = await stage.refused({**BODY, **fields})
            assert (status, error["code"], error["param"]) == (400, "sampling_conflict", param)
        stage.engine.say("x")
        await stage.ask(HI, temperature=0.8, top_p=1, max_tokens=5)
        stage.engine.say("x")
        await stage.ask(HI, key=stage.key("e2", mode="eval"), temperature=0.1)
        assert [turn.sampling.temperature for turn in stage.turns()] == [0.8, 0.1]


async def _waiting(stage, count, *, calls=None):
    """Return once so many calls wait at the proxy."""
    from .test_control import call

    async with asyncio.timeout(120):
        while True:
            _, status = await call(stage, "GET", "/status", roles=["read"])
            if status["waiting_calls"] == count and calls in (None, status["open_calls"]):
                return
