"""Finished agents in other people's frameworks, given a base URL and a key and nothing else, on a real vLLM.

Each is a loop of model and tool. What it did must lie in the queue as one conversation, every sampled token of it, and
a step of training must find in each token what the engine sampled.
"""

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path

import anthropic
import openai
import pytest

from support.clients import node, node_packages, python_packages, run_agent
from support.proxy import token
from support.real_proxy import RealStage
from support.steered import TURNS
from support.training import train, train_episode
from swarmq.broker import topology
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.messages import unpack_ids
from swarmq.timeline import fold, resolve

pytestmark = [pytest.mark.vllm, pytest.mark.broker, pytest.mark.timeout(900)]

HERE = Path(__file__).parent / "clients"
QUESTION = "What is 1 + 2 + 3 + 4?"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


async def whole_episode(steered: RealStage, said: str, model: Path) -> None:
    """The inbox has the conversation, ended by what the agent was told, and it trains."""
    turns = await steered.turns(TURNS)
    assert [turn.parent for turn in turns] == [None, turns[0].call_id, turns[1].call_id]
    assert [turn.branch for turn in turns] == [None] * TURNS
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    first, second, third = (json.loads(turn.messages) for turn in turns)
    assert len(first[-1]["tool_calls"]) == 2
    assert [message["role"] for message in second] == ["tool", "tool", "assistant"]
    assert [message["role"] for message in third] == ["tool", "assistant"]
    assert third[-1]["content"] == said.strip()
    [row] = fold(resolve(turns))
    assert int(row.trained.sum()) == sum(len(unpack_ids(turn.sampled_ids)) for turn in turns)
    await train(steered, model, turns)


def access(steered: RealStage) -> dict[str, str]:
    return {"AGENT_BASE_URL": f"{steered.url}/v1", "AGENT_KEY": steered.key(), "AGENT_PYTHON": sys.executable}


@pytest.mark.parametrize(
    ("program", "form"),
    [
        ("langgraph_agent.py", "chat"),
        ("langgraph_agent.py", "responses streamed"),
        ("agents_sdk.py", "responses streamed"),
        ("agents_sdk.py", "chat"),
        ("litellm_agent.py", "plain"),
        ("litellm_agent.py", "streamed"),
    ],
)
async def test_an_agent_of_a_framework_is_recorded_whole_and_trains(steered, tiny_model, program, form):
    packages = await asyncio.to_thread(python_packages)
    command = [sys.executable, "-W", "ignore", str(HERE / program), *form.split()]
    said = await run_agent(*command, PYTHONPATH=str(packages), LITELLM_LOCAL_MODEL_COST_MAP="True", **access(steered))
    await whole_episode(steered, said, tiny_model)


@pytest.mark.parametrize("form", ["plain", "streamed", "responses"])
async def test_an_agent_in_another_language_is_recorded_whole_and_trains(steered, tiny_model, form):
    modules = await asyncio.to_thread(node_packages)
    program, _ = node()
    said = await run_agent(program, str(HERE / "node_agent.mjs"), form, AGENT_MODULES=str(modules), **access(steered))
    await whole_episode(steered, said, tiny_model)


async def test_an_agent_with_nothing_but_curl_is_recorded_whole_and_trains(steered, tiny_model):
    said = await run_agent("bash", str(HERE / "curl_agent.sh"), **access(steered))
    await whole_episode(steered, said, tiny_model)


async def test_the_openai_client_is_recorded_whole_and_trains(steered, tiny_model):
    def loop() -> str:
        with openai.OpenAI(base_url=f"{steered.url}/v1", api_key=steered.key()) as client:
            messages = [{"role": "user", "content": QUESTION}]
            while True:
                with client.chat.completions.stream(model="main", messages=messages, tools=[CHAT_TOOL]) as stream:
                    message = stream.get_final_completion().choices[0].message
                messages.append(message.to_dict())
                if not message.tool_calls:
                    return message.content
                messages += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in message.tool_calls]

    await whole_episode(steered, await asyncio.to_thread(loop), tiny_model)


async def test_an_episode_of_an_unchanged_agent_goes_from_its_ticket_to_a_step_of_training(
    steered, tiny_model, tmp_path
):
    """Begun and ended over HTTP, collected by the collector, trained by the trainer: what lies between is real."""
    control, headers = (
        f"{steered.url}/v1/control/episodes",
        {"authorization": f"Bearer {token('rollout', run=steered.run)}"},
    )
    stop = asyncio.Event()
    with closing(Store(tmp_path / "collector.sqlite", run=steered.run)) as store:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Collector(steered.job, steered.broker, store).run(stop))
            body = {"task_id": "sum", "group_size": 1}
            async with steered.http.post(control, json=body, headers=headers) as response:
                begun = await response.json()
            access = {
                "AGENT_BASE_URL": begun["base_url"],
                "AGENT_KEY": begun["api_key"],
                "AGENT_PYTHON": sys.executable,
            }
            await run_agent("bash", str(HERE / "curl_agent.sh"), **access)
            end = f"{control}/{begun['episode_id']}/end"
            async with steered.http.post(end, json={"reward": 1.0}, headers=headers) as response:
                assert response.status == 200
            async with steered.broker.consume(topology.ready(steered.run, "main"), prefetch=1) as deliveries:
                delivery = await anext(deliveries)
                await delivery.ack()
            stop.set()
    episode = delivery.message
    assert (episode.episode_id, episode.reward, len(episode.turns)) == (begun["episode_id"], 1.0, TURNS)
    await train_episode(steered, tiny_model, episode)


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_openai_client_s_responses_are_recorded_whole_and_train(steered, tiny_model, streamed):
    async with openai.AsyncOpenAI(base_url=f"{steered.url}/v1", api_key=steered.key()) as client:
        given: list = [{"role": "user", "content": QUESTION}]
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
        while True:
            if streamed:
                async with client.responses.stream(model="main", input=given, tools=tools) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(model="main", input=given, tools=tools)
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            given += [item.to_dict() for item in answer.output]
            given += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    await whole_episode(steered, answer.output_text, tiny_model)


@pytest.mark.parametrize("form", ["plain", "streamed", "sync"])
async def test_the_anthropic_client_is_recorded_whole_and_trains(steered, tiny_model, form):
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    key = {"base_url": steered.url, "api_key": steered.key()}

    def step(messages: list) -> dict:
        return {"model": "main", "max_tokens": 200, "messages": messages, "tools": tools}

    async def ask(messages: list) -> anthropic.types.Message:
        if form == "sync":
            with anthropic.Anthropic(**key) as client:
                return await asyncio.to_thread(client.messages.create, **step(messages))
        async with anthropic.AsyncAnthropic(**key) as client:
            if form == "plain":
                return await client.messages.create(**step(messages))
            async with client.messages.stream(**step(messages)) as stream:
                return await stream.get_final_message()

    messages: list = [{"role": "user", "content": QUESTION}]
    while (answer := await ask(messages)).stop_reason == "tool_use":
        uses = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "3"} for use in uses]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    await whole_episode(steered, answer.content[0].text, tiny_model)
