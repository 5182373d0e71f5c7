"""Images for models that take them, where nothing is trained on what was said about them (test_trained_images.py: where it is)."""

from unittest.mock import Mock

import pytest

from swarmq.messages import unpack_ids
from swarmq.proxy.completions.remote_images import RemoteImages
from swarmq.testing.scripted_engine import END, encode_characters

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LOOK = {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}
HI = {"role": "user", "content": "hi"}


@pytest.fixture
def seeing(stage):
    stage.engine.accepts_images = True
    return stage


async def test_a_model_that_takes_them_gets_them(seeing):
    seeing.engine.say("a cat")
    answer = await seeing.ask(LOOK, key=seeing.key(mode="eval"))
    assert answer["choices"][0]["message"]["content"] == "a cat"
    [asked] = seeing.engine.requests
    assert asked.passthrough == {"features": [IMAGE]}


@pytest.mark.parametrize("field", [{"mm_payload": "none"}, {"return_mm_kwargs": False}])
async def test_no_agent_keeps_an_engine_from_getting_them(seeing, field):
    """vLLM would leave the picture out of a rendering, and its engine fail to find it."""
    seeing.engine.say("a cat")
    seeing.engine.render = Mock(wraps=seeing.engine.render)
    await seeing.ask(LOOK, key=seeing.key(mode="eval"), **field)
    [chat] = seeing.engine.render.call_args.args
    assert not field.keys() & chat.keys()


async def test_a_model_that_does_not_says_so(stage):
    status, error = await stage.refused({"model": "main", "messages": [LOOK]}, key=stage.key(mode="eval"))
    assert (status, error["message"]) == (400, "the model takes no images")


@pytest.mark.parametrize("url", ["http://10.0.0.1/", "file:///etc/passwd", "HTTPS://x/a.png", " data:x", "ftp://x", ""])
async def test_an_engine_fetches_nothing_for_an_agent(seeing, url):
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"image_url": url},
        {"type": "video_url", "video_url": {"url": url}},
    ):
        body = {"model": "main", "messages": [{"role": "user", "content": [part]}]}
        status, error = await seeing.refused(body, key=seeing.key(mode="eval"))
        assert (status, error["param"]) == (400, "messages")
        assert "data:" in error["message"]
    assert seeing.engine.requests == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"image_url": {"url": "data:image/png;base64,%%%"}}, "not base64"),
        ({"image_url": {"url": "data:image/png;base64,AAA"}}, "not base64"),
        ({"uuid": "of another episode's"}, "without it"),
        ({"uuid": "of another episode's", "image_url": None}, "without it"),
    ],
)
async def test_an_image_is_what_the_request_holds(seeing, changed, told):
    look = {"role": "user", "content": [{**IMAGE, **changed}]}
    status, error = await seeing.refused({"model": "main", "messages": [HI, look]}, key=seeing.key(mode="eval"))
    assert (status, error["param"]) == (400, "messages")
    assert error["message"].startswith("messages[1]")
    assert told in error["message"]
    assert seeing.engine.requests == []


class Fetched(RemoteImages):
    """As if the images of requests had been fetched."""

    async def inline(self, chat):
        return {**chat, "messages": [LOOK if isinstance(each["content"], list) else each for each in chat["messages"]]}


async def test_an_engine_gets_what_the_proxy_fetched_where_the_run_allows_it(stages):
    far = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]}
    async with stages(remote_images=True, images=Fetched(max_bytes=0)) as stage:
        stage.engine.accepts_images = True
        stage.engine.render = Mock(wraps=stage.engine.render)
        stage.engine.say("a cat")
        await stage.ask(far, key=stage.key(mode="eval"))
        source = {"type": "url", "url": "https://example.org/cat.png"}
        counted = {"model": "main", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        assert (await stage.post(counted, "/v1/messages/count_tokens", key=stage.key(mode="eval")))[0] == 200
        assert [call.args[0]["messages"] for call in stage.engine.render.call_args_list] == [[LOOK], [LOOK]]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1:1/cat.png"}}, "without a public address"),
        ({"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}}, "is not served"),
        ({"type": "video_url", "video_url": {"url": "https://example.org/cat.mp4"}}, "is not served"),
    ],
)
async def test_nothing_else_is_fetched_and_nothing_sampled_for_it(stages, part, why):
    async with stages(remote_images=True) as stage:
        body = {"model": "main", "messages": [{"role": "user", "content": [part]}]}
        status, error = await stage.refused(body, key=stage.key(mode="eval"))
        assert (status, error["param"]) == (400, "messages")
        assert why in error["message"]
        assert stage.engine.requests == []


@pytest.mark.parametrize("picture", [False, True])
async def test_the_prompt_is_as_rendered_where_images_have_places_in_it(seeing, picture):
    """Without one, what was sampled in other tokens than a rendering's stays in those tokens."""
    key = seeing.key(mode="eval")
    seeing.engine.say("", tokens=encode_characters("hello"))
    first = await seeing.ask(HI, key=key)
    seeing.engine.say("ok")
    await seeing.ask(HI, first["choices"][0]["message"], LOOK if picture else HI, key=key)
    earlier, later = seeing.turns()
    recorded = [*unpack_ids(earlier.prompt_ids), *encode_characters("hello"), END]
    fresh = await seeing.engine.render({"messages": [HI, first["choices"][0]["message"], LOOK if picture else HI]})
    sampled_from = seeing.engine.requests[1].token_ids
    assert (sampled_from == fresh.token_ids) is picture
    assert (sampled_from[: len(recorded)] == recorded) is not picture
    assert (later.branch, later.repaired) == (("drift", False) if picture else (None, True))
