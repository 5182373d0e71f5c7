"""With `train.routing_replay` a turn records the experts of its tokens, each once, and never goes without."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from swarmq.messages import unpack_ids

HI = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}


def route(tokens):
    """The scripted engine's experts."""
    return bytes(expert for token in tokens for expert in (token % 256, token // 256 % 256))


@pytest.fixture
async def replaying(stages):
    async with stages(replays_routing=True) as stage:
        for engine in stage.engines:
            engine.returns_routed_experts = True
        yield stage


@pytest.mark.parametrize("streamed", [False, True])
async def test_turns_record_the_experts_of_the_token_before_each_of_their_own(replaying, streamed):
    replaying.engine.say("one")
    answer = (await replaying.ask(HI))["choices"][0]["message"]
    replaying.engine.say("two")
    await (replaying.stream(HI, answer, MORE) if streamed else replaying.ask(HI, answer, MORE))
    first, second = replaying.turns()
    tokens = [*unpack_ids(first.prompt_ids), *unpack_ids(first.sampled_ids)]
    assert first.routed_experts == route(tokens[:-1])
    tokens += [*unpack_ids(second.prompt_ids), *unpack_ids(second.sampled_ids)]
    assert second.routed_experts == route(tokens[second.shared - 1 : -1])
    start = replaying.engine.requests[1].sampling["routed_experts_prompt_start"]
    assert start == second.shared - 1, "known experts do not travel again"


async def test_the_choices_of_a_request_share_the_experts_of_their_prompt(replaying):
    for text in ("a" * 200, "b" * 200):
        replaying.engine.say(text)
    await replaying.ask({"role": "user", "content": "x" * 400}, n=2)
    first, second = replaying.turns()
    assert second.shared == len(unpack_ids(first.prompt_ids))
    tokens = [*unpack_ids(first.prompt_ids), *unpack_ids(second.sampled_ids)]
    assert second.routed_experts == route(tokens[second.shared - 1 : -1])


async def test_evaluation_and_runs_without_replay_record_none(replaying, stages):
    replaying.engine.say("x")
    await replaying.ask(HI, key=replaying.key(mode="eval"))
    async with stages() as plain:
        plain.engine.returns_routed_experts = True
        plain.engine.say("x")
        await plain.ask(HI)
        assert [turn.routed_experts for turn in (*replaying.turns(), *plain.turns())] == [b"", b""]


async def test_an_answer_without_experts_is_an_error_of_the_engine_and_no_turn(replaying):
    replaying.engine.returns_routed_experts = False
    replaying.engine.say("x")
    with capture_logs() as logged:
        status, _, raw = await replaying.post({"model": "main", "messages": [HI]})
    assert (status, json.loads(raw)["error"]["code"]) == (502, "engine_answer_unusable")
    [reason] = [line["reason"] for line in logged if line["event"] == "call_failed"]
    assert "start vLLM with --enable-return-routed-experts" in reason
    assert replaying.turns() == []
