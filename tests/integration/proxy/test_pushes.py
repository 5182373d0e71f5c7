"""New weights while agents are answered: nobody notices, and every token has the version that sampled it."""

import asyncio

import pytest
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET
from swarmq.weights.push.pusher import WeightPusher

pytestmark = [pytest.mark.vllm, pytest.mark.broker]

USER = {"role": "user", "content": "What is 17 + 25?"}


async def test_calls_are_held_through_a_real_push_and_answered(stage, tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    pusher = WeightPusher([stage.engine.url], tmp_path, secret=SECRET, patience_s=0)
    long = {"ignore_eos": True, "max_tokens": 1000}
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                calls = [
                    tasks.create_task(stage.stream(USER, key=stage.key(f"e{number}", mode="eval"), **long))
                    for number in range(3)
                ]
                if await _running(stage, calls):
                    break
                await asyncio.wait(calls)  # over before anybody looked, on a busy machine: once more
                await stage.turns(len(calls))
            report = await asyncio.to_thread(pusher.push, model.named_parameters(), 7)
        assert report.failed == {}
        assert [call.result()[-1] for call in calls] == ["[DONE]"] * len(calls)
        turns = await stage.turns(len(calls))
        assert [turn.versions[-1].version for turn in turns] == [7] * len(calls)
        assert all(len(turn.versions) == 2 for turn in turns)
        assert await stage.engine.weight_version() == 7
    finally:
        await asyncio.to_thread(pusher.push, model.named_parameters(), 0)


async def _running(stage, calls):
    """Wait until all of them are sampled at the same time; False when one of them has ended before."""
    while not any(call.done() for call in calls):
        async with stage.http.get(f"{stage.engine.url}/metrics", headers=KNOWN) as response:
            lines = (await response.text()).splitlines()
        if any(line.startswith("vllm:num_requests_running") and line.endswith(f" {len(calls)}.0") for line in lines):
            return not any(call.done() for call in calls)
    return False
