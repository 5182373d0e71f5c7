"""OpenAI's own client library against the proxy: what it is told is what vLLM sampled, and what is recorded."""

import asyncio
import itertools
import json
from typing import Literal

import openai
import pydantic
import pytest

from support.engine import KNOWN
from swarmq.engine.client.protocol import CompleteAnswer
from swarmq.messages import unpack_floats, unpack_ids

pytestmark = [pytest.mark.vllm, pytest.mark.broker]

USER = {"role": "user", "content": "What is 17 + 25?"}
WORDS = {"structured_outputs": {"regex": "(the answer is ){2,4}"}}
"""Text that a random model spells in tokens that no tokenizer would choose."""

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = {"structured_outputs": {"regex": r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]\}\}\n</tool_call>'}}


@pytest.fixture
async def agent(stage):
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=stage.key(), max_retries=0) as client:
        yield client


async def direct(stage, messages, **fields):
    """vLLM's own answer to the same request, with its token ids."""
    body = {"messages": messages, "return_token_ids": True, "model": (await stage.engine.info()).model, **fields}
    async with stage.http.post(f"{stage.engine.url}/v1/chat/completions", json=body, headers=KNOWN) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def called(chunks):
    """Id, name and arguments of every tool call of a stream: a call's deltas have its index."""
    calls = {}
    for piece in (piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()):
        call = calls.setdefault(piece.index, ["", "", ""])
        for at, more in enumerate((piece.id, piece.function.name, piece.function.arguments)):
            call[at] += more or ""
    return [tuple(calls[index]) for index in sorted(calls)]


async def test_long_prompts_with_seeds_may_come_at_once(stage, agent):
    """More than the engine computes in one step: a piece of a prompt that has a seed ends a core without a GPU."""
    agent = agent.with_options(api_key=stage.key("seeded", mode="eval"))  # training takes no seed
    openings = [{"role": "user", "content": f"{number} " + "What is 17 + 25? " * 130} for number in range(6)]
    asked = (agent.chat.completions.create(model="main", messages=[one], seed=7, max_tokens=2) for one in openings)
    answers = await asyncio.gather(*asked)
    assert sum(answer.usage.prompt_tokens for answer in answers) > 4096
    assert await stage.engine.is_healthy()


async def test_the_recorded_tokens_are_what_vllm_samples(stage, agent):
    agent = agent.with_options(api_key=stage.key("seeded", mode="eval"))  # training takes no seed
    answer = await agent.chat.completions.create(model="main", messages=[USER], seed=7, max_tokens=16)
    [turn] = await stage.turns(1)
    wanted = await direct(stage, [USER], seed=7, max_tokens=16, temperature=1.0, logprobs=True)
    assert unpack_ids(turn.prompt_ids).tolist() == wanted["prompt_token_ids"]
    assert unpack_ids(turn.sampled_ids).tolist() == wanted["choices"][0]["token_ids"]
    logprobs = [entry["logprob"] for entry in wanted["choices"][0]["logprobs"]["content"]]
    assert unpack_floats(turn.logprobs).tolist() == pytest.approx(logprobs, abs=1e-4)
    assert answer.choices[0].message.content == wanted["choices"][0]["message"]["content"]
    assert [(span.version, span.start, span.end) for span in turn.versions] == [(0, 0, len(turn.sampled_ids) // 4)]
    assert answer.id == turn.call_id


async def test_a_streamed_answer_is_the_same_as_a_plain_one(stage, agent):
    agent = agent.with_options(api_key=stage.key("seeded", mode="eval"))  # training takes no seed
    plain = await agent.chat.completions.create(model="main", messages=[USER], seed=3, max_tokens=20)
    stream = await agent.chat.completions.create(
        model="main", messages=[USER], seed=3, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage
    [finish] = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finish == plain.choices[0].finish_reason
    one, other = await stage.turns(2)
    assert one.sampled_ids == other.sampled_ids


async def test_the_synchronous_client_works(stage):
    def ask():
        with openai.OpenAI(base_url=f"{stage.url}/v1", api_key=stage.key(mode="eval"), max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["main"]
            plain = client.chat.completions.create(model="main", messages=[USER], seed=1)
            stream = client.chat.completions.create(model="main", messages=[USER], seed=1, stream=True)
            return plain.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    plain, streamed = await asyncio.to_thread(ask)
    assert plain == streamed


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_sampled_token_of_a_conversation_stays_as_it_was_sampled(stage, agent, streamed):
    messages = [USER]
    sequences = []
    for seed in range(5):
        fields = {"model": "main", "messages": messages, "seed": seed, "extra_body": WORDS}
        if streamed:
            stream = await agent.chat.completions.create(stream=True, **fields)
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
        else:
            text = (await agent.chat.completions.create(**fields)).choices[0].message.content
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": f"And {seed}?"}]
    turns = await stage.turns(5)
    for turn in turns:
        shared = sequences[-1][: turn.shared] if sequences else []
        sequences.append([*shared, *unpack_ids(turn.prompt_ids), *unpack_ids(turn.sampled_ids)])
    for earlier, later in itertools.pairwise(sequences):
        assert later[: len(earlier)] == earlier
    assert [turn.branch for turn in turns] == [None] * 5
    assert [turn.parent for turn in turns[1:]] == [turn.call_id for turn in turns[:-1]]
    assert any(turn.repaired for turn in turns), "nothing drifted, so nothing is shown"
    rendered = (await stage.engine.render({"messages": messages[:-2]})).token_ids
    said = sequences[-1][: -len(unpack_ids(turns[-1].sampled_ids))]
    assert await stage.engine.detokenize(said) == await stage.engine.detokenize(rendered)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_call_is_parsed_and_continued_exactly(stage, agent, streamed):
    fields = {"model": "main", "tools": [TOOL], "seed": 5, "max_tokens": 100}
    key = stage.key("tools", mode="eval")  # 100 tokens: beyond what training is set to
    agent = agent.with_options(api_key=key)
    if streamed:
        stream = await agent.chat.completions.create(messages=[USER], extra_body=CALL, stream=True, **fields)
        chunks = [chunk async for chunk in stream]
        [(identity, name, arguments)] = called(chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = await agent.chat.completions.create(messages=[USER], extra_body=CALL, **fields)
        [call] = answer.choices[0].message.tool_calls
        name, arguments, identity = call.function.name, call.function.arguments, call.id
        finish = answer.choices[0].finish_reason
    assert (name, finish) == ("add", "tool_calls")
    function = {"name": name, "arguments": arguments}
    asked = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": identity, "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": identity, "content": "42"}
    await agent.chat.completions.create(messages=[USER, asked, result], **fields)
    first, second = await stage.turns(2)
    assert first.finish_reason == "tool_calls"
    sampled = unpack_ids(first.sampled_ids).tolist()
    whole = CompleteAnswer(token_ids=sampled[:-1], finish_reason="stop")  # the last one ends the turn
    [meant] = await stage.engine.derender(
        {"messages": [USER], "tools": [TOOL]}, unpack_ids(first.prompt_ids).tolist(), [whole]
    )
    assert [call["function"] for call in meant["tool_calls"]] == [function], "deltas add up to what the tokens say"
    assert second.parent == first.call_id
    assert second.branch is None
    assert second.shared == len(unpack_ids(first.prompt_ids)) + len(unpack_ids(first.sampled_ids))


async def test_a_schema_that_no_answer_can_be_held_to_is_refused_and_changes_nothing_for_others(stage, agent):
    number = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    fields = {"model": "main", "messages": [USER], "max_tokens": 40}
    named = {"type": "json_schema", "json_schema": {"name": "threes", "schema": number}}
    with pytest.raises(openai.BadRequestError, match="not supported"):
        await agent.chat.completions.create(response_format=named, **fields)
    tool = {"type": "function", "function": {"name": "pick", "parameters": {"type": "object"}}}
    assert (await agent.chat.completions.create(tools=[tool], tool_choice="required", **fields)).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_can_be_demanded(stage, agent, choice, streamed):
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "pick", "parameters": parameters, "strict": True}}
    agent = agent.with_options(api_key=stage.key("demand", mode="eval"))
    fields = {"model": "main", "messages": [USER], "tools": [tool], "tool_choice": choice, "max_tokens": 800, "seed": 5}
    if streamed:
        chunks = [chunk async for chunk in await agent.chat.completions.create(stream=True, **fields)]
        calls = [(name, arguments) for _, name, arguments in called(chunks)]
        finish = chunks[-1].choices[0].finish_reason
    else:
        answer = await agent.chat.completions.create(**fields)
        calls = [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls]
        finish = answer.choices[0].finish_reason
    assert finish == ("tool_calls" if choice == "required" else "stop"), "OpenAI's own difference"
    assert calls
    for name, arguments in calls:  # with `required` the model may call as often as it likes
        assert name == "pick"
        assert json.loads(arguments)["a"] in {1, 2}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
async def test_a_forced_tool_is_held_to_its_schema_though_it_does_not_say_strict(stage, agent, choice):
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "pick", "parameters": parameters}}
    agent = agent.with_options(api_key=stage.key("held", mode="eval"))
    for seed in range(3):
        fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400, "seed": seed}
        answer = await agent.chat.completions.create(model="main", messages=[USER], **fields)
        for call in answer.choices[0].message.tool_calls:
            assert json.loads(call.function.arguments)["a"] in {1, 2}
    prompts = [
        (await stage.engine.render({"messages": [USER], "tools": [tool], **more})).token_ids
        for more in ({}, {"tool_choice": choice})
    ]
    assert prompts[0] == prompts[1], "the model is shown the tool as the agent gave it"


async def test_json_under_a_schema_has_no_white_space_to_fill_an_answer_with(stage, agent):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    agent = agent.with_options(api_key=stage.key("compact", mode="eval"))
    for seed in range(4):
        answer = await agent.chat.completions.create(
            model="main", messages=[USER], response_format=wanted, max_tokens=40, seed=seed
        )
        assert set(json.loads(answer.choices[0].message.content)) == {"ok", "n"}


async def test_a_json_schema_is_kept_to(stage, agent):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    agent = agent.with_options(api_key=stage.key("schema", mode="eval"))
    answer = await agent.chat.completions.create(
        model="main", messages=[USER], response_format=wanted, max_tokens=800, seed=5
    )
    assert json.loads(answer.choices[0].message.content)["ok"] in {True, False}


class Verdict(pydantic.BaseModel):
    ok: bool


class Pick(pydantic.BaseModel):
    a: Literal[1, 2]


@pytest.mark.parametrize("form", ["plain", "streamed", "response", "response streamed"])
async def test_the_client_s_own_parsing_gets_the_object_it_asked_for(stage, agent, form):
    agent = agent.with_options(api_key=stage.key("parse", mode="eval"))
    chat = {"model": "main", "messages": [USER], "response_format": Verdict, "max_tokens": 800, "seed": 5}
    response = {"model": "main", "input": USER["content"], "text_format": Verdict, "max_output_tokens": 800}
    match form:
        case "plain":
            parsed = (await agent.chat.completions.parse(**chat)).choices[0].message.parsed
        case "streamed":
            async with agent.chat.completions.stream(**chat) as stream:
                parsed = (await stream.get_final_completion()).choices[0].message.parsed
        case "response":
            parsed = (await agent.responses.parse(**response, extra_body={"seed": 5})).output_parsed
        case _:
            async with agent.responses.stream(**response, extra_body={"seed": 5}) as stream:
                parsed = (await stream.get_final_response()).output_parsed
    assert isinstance(parsed, Verdict)


async def test_the_client_s_own_parsing_gets_a_tool_s_arguments_as_an_object(stage, agent):
    agent = agent.with_options(api_key=stage.key("parse", mode="eval"))
    tool = openai.pydantic_function_tool(Pick, name="pick")
    choice = {"type": "function", "function": {"name": "pick"}}
    fields = {"messages": [USER], "tools": [tool], "tool_choice": choice, "max_tokens": 800, "seed": 5}
    answer = await agent.chat.completions.parse(model="main", **fields)
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pick)


async def test_several_choices_are_several_turns(stage, agent):
    answer = await agent.chat.completions.create(model="main", messages=[USER], n=3, max_tokens=8)
    turns = await stage.turns(3)
    assert {turn.call_id for turn in turns} == {f"{answer.id}.{i}" for i in range(3)}
    assert len({turn.sampled_ids for turn in turns}) == 3


async def test_a_stop_string_ends_the_answer_before_itself(stage, agent):
    more = {"structured_outputs": {"regex": "(ab){30}"}}
    answer = await agent.chat.completions.create(model="main", messages=[USER], stop=["bab"], extra_body=more)
    assert answer.choices[0].message.content == "a"
    assert answer.choices[0].finish_reason == "stop"


async def test_a_tool_agent_s_stop_string_is_cut_too(stage, agent):
    more = {"structured_outputs": {"regex": "(ab){30}"}}
    fields = {"model": "main", "messages": [USER], "stop": ["bab"], "tools": [TOOL], "extra_body": more}
    plain = await agent.chat.completions.create(**fields)
    stream = await agent.chat.completions.create(stream=True, **fields)
    text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert (plain.choices[0].message.content, text) == ("a", "a")


async def test_logprobs_are_given_to_who_asks(stage, agent):
    answer = await agent.chat.completions.create(
        model="main", messages=[USER], logprobs=True, top_logprobs=2, max_tokens=4
    )
    [turn] = await stage.turns(1)
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(unpack_floats(turn.logprobs).tolist(), abs=1e-4)
    assert all(len(entry.top_logprobs) == 2 for entry in content)


async def test_training_is_sampled_as_the_run_says_and_the_agent_is_told(stage, agent):
    raw = await agent.chat.completions.with_raw_response.create(
        model="main", messages=[USER], temperature=0.0, top_p=0.1, max_tokens=500
    )
    [turn] = await stage.turns(1)
    assert raw.headers["x-swarmq-overridden"] == "temperature, top_p, max_tokens"
    assert raw.headers["x-swarmq-call-id"] == turn.call_id
    assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.max_tokens) == (1.0, 1.0, 24)


async def test_evaluation_is_sampled_as_the_agent_says(stage, agent):
    agent = agent.with_options(api_key=stage.key("ev", mode="eval"))
    texts = []
    for _ in range(2):
        raw = await agent.chat.completions.with_raw_response.create(
            model="main", messages=[USER], temperature=0.0, max_tokens=30
        )
        assert "x-swarmq-overridden" not in raw.headers
        texts.append(raw.parse().choices[0].message.content)
    wanted = await direct(stage, [USER], temperature=0.0, max_tokens=30)
    assert texts == [wanted["choices"][0]["message"]["content"]] * 2


async def test_an_over_long_prompt_is_told_in_openai_s_words(stage, agent):
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.chat.completions.create(model="main", messages=[{"role": "user", "content": "hello " * 5000}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": 3.5}]}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError),
    ],
)
async def test_bad_requests_are_the_agent_s_fault(agent, fields, status):
    with pytest.raises(status):
        await agent.chat.completions.create(**{"model": "main", "messages": [USER], **fields})


@pytest.mark.parametrize("key", ["sk-nonsense", "expired", "forged"])
async def test_a_bad_key_is_401(stage, agent, key):
    made = {"expired": stage.key(expires_in=-100), "forged": stage.key(root=b"x" * 32)}.get(key, key)
    with pytest.raises(openai.AuthenticationError):
        await agent.with_options(api_key=made).chat.completions.create(model="main", messages=[USER])


async def test_an_agent_that_hangs_up_stops_the_sampling_and_leaves_no_turn(stage, agent):
    long = {"structured_outputs": {"regex": "[a-z]{1500}"}}
    agent = agent.with_options(api_key=stage.key("gone", mode="eval"))
    stream = await agent.chat.completions.create(
        model="main", messages=[USER], stream=True, max_tokens=1500, extra_body=long
    )
    await anext(aiter(stream))
    await stream.close()
    await _until_idle(stage)
    await stage.ask(USER, max_tokens=4)
    [turn] = await stage.turns(1)
    assert turn.episode_id == "e1"


async def _until_idle(stage):
    """Return when vLLM runs nothing; the request that hung up would run for many seconds."""
    async with asyncio.timeout(600):
        while True:
            async with stage.http.get(f"{stage.engine.url}/metrics", headers=KNOWN) as response:
                lines = (await response.text()).splitlines()
            if any(line.startswith("vllm:num_requests_running") and line.endswith(" 0.0") for line in lines):
                return
