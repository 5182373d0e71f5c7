"""OpenAI's completions over HTTP, read by OpenAI's own client, against a scripted engine."""

import pytest

from swarmq.messages import unpack_ids
from swarmq.testing.scripted_engine import encode


@pytest.fixture
async def agent(openai, stage):
    http = openai.DefaultAsyncHttpxClient(verify=False)  # or it loads certificates: 50 ms
    async with openai.AsyncOpenAI(
        base_url=f"{stage.url}/v1", api_key=stage.key(mode="eval"), max_retries=0, http_client=http
    ) as client:
        yield client.completions


async def test_a_prompt_is_what_the_engine_samples_from(stage, agent):
    stage.engine.say("world")
    answer = await agent.create(model="main", prompt="hello ")
    [turn] = stage.turns()
    assert (answer.id, answer.choices[0].text, answer.choices[0].finish_reason) == (turn.call_id, "world", "stop")
    assert unpack_ids(turn.prompt_ids).tolist() == encode("hello ")
    assert turn.sampling.max_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize("prompt", [[5000, 5001], [[5000, 5001]]])
async def test_tokens_are_a_prompt_too(stage, agent, prompt):
    stage.engine.say("x")
    await agent.create(model="main", prompt=prompt)
    assert stage.engine.requests[0].token_ids == [5000, 5001]


async def test_a_text_that_goes_on_from_an_answer_continues_its_tokens(stage, agent):
    stage.engine.say("bcd", tokens=[1098, 1099, 1100], finish_reason="length")
    first = await agent.create(model="main", prompt="a")
    stage.engine.say("x", finish_reason="length")
    await agent.create(model="main", prompt=["a" + first.choices[0].text + "efg"])
    one, two = stage.turns()
    assert (two.parent, two.branch, two.shared) == (one.call_id, None, 4)
    assert stage.engine.requests[1].token_ids[:4] == [1097, 1098, 1099, 1100], "as they were sampled"


async def test_a_stream_says_the_same(stage, agent):
    stage.engine.say("abcdef")
    stage.engine.say("abcdef")
    plain = await agent.create(model="main", prompt="p", logprobs=0)
    chunks = [
        chunk
        async for chunk in await agent.create(
            model="main", prompt="p", logprobs=0, stream=True, stream_options={"include_usage": True}
        )
    ]
    said = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in said) == plain.choices[0].text == "abcdef"
    assert said[-1].finish_reason == "stop"
    assert chunks[-1].usage == plain.usage
    offsets = [offset for choice in said if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets == plain.choices[0].logprobs.text_offset
    assert plain.choices[0].logprobs.token_logprobs == [-0.5] * 4
    assert plain.choices[0].logprobs.top_logprobs is None


async def test_every_choice_is_a_turn(stage, agent):
    for text in ("a", "b"):
        stage.engine.say(text)
    answer = await agent.create(model="main", prompt="p", n=2)
    assert [choice.text for choice in answer.choices] == ["a", "b"]
    assert len(stage.turns()) == 2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 100}, "logprobs"),
    ],
)
async def test_a_bad_request_names_its_field(openai, agent, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.create(**{"model": "main", "prompt": "x", **change})
    assert caught.value.param == param
