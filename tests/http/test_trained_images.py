"""Images in training: a turn carries the pixels that its engine saw, once for all turns that share them."""

import asyncio
import base64

import msgspec
import pytest

from support.images import make_features, make_image
from swarmq.messages import MAX_IMAGE_BYTES, unpack_ids
from swarmq.proxy.completions import pipeline
from swarmq.testing.scripted_engine import encode, encode_characters
from swarmq.timeline import ImageTable, resolve

[PAD] = encode("</think>")
"""Placeholder token: one that is encoded alone, as those of models are."""
HI = {"role": "user", "content": "hi"}
BYE = {"role": "user", "content": "bye"}
CAT, DOG, HUGE = make_image(1), make_image(2), make_image(3, height=80, width=80)
SEEN = {"cat": CAT, "dog": DOG, "huge": HUGE}


def look(*names):
    """A message that shows these images."""
    urls = [f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}" for name in names]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": "look at this picture, please: " + "x" * 60}, *parts]}


@pytest.fixture
def seeing(stage):
    return let_see(stage)


def let_see(stage):
    """Let the engine put the places of images before everything else that their message says."""
    engine = stage.engine
    render = engine.render

    async def render_with_images(chat):
        engine.accepts_images = True
        ids, shown = [], []
        for message in chat["messages"]:
            content = message["content"] if isinstance(message["content"], list) else []
            for part in content:
                if part["type"] == "image_url":
                    name = base64.b64decode(part["image_url"]["url"].partition(",")[2]).decode()
                    shown.append(msgspec.structs.replace(SEEN[name], offset=len(ids)))
                    ids += [PAD] * SEEN[name].length
            text = message["content"] if not content else content[0]["text"]
            ids += encode(f"<|start|>{message['role']}\n{text}<|end|>")
        ids += encode("<|start|>assistant\n")
        rendered = await render({**chat, "messages": [HI]})
        features = {"features": make_features(shown)} if shown else {}
        return msgspec.structs.replace(rendered, token_ids=ids, passthrough=features)

    engine.render = render_with_images
    return stage


def check_images(turn, *expected):
    assert [image.digest for image in turn.images] == [image.digest for image in expected]
    own = unpack_ids(turn.prompt_ids)
    for image in turn.images:
        at = image.offset - turn.shared
        assert set(own[at : at + image.length]) == {PAD}


async def test_a_trained_turn_carries_the_pixels_that_the_engine_saw(seeing):
    seeing.engine.say("a cat")
    await seeing.ask(look("cat"))
    [turn] = seeing.turns()
    check_images(turn, CAT)
    [resolved] = resolve([turn], images=ImageTable())
    assert resolved.token_ids[:4].tolist() == [-1] * 4
    assert base64.b64encode(b"cat") not in turn.messages or len(turn.messages) < 1000


async def test_turns_do_not_repeat_the_images_of_the_turn_they_continue(seeing):
    said = [look("cat")]
    for number, more in enumerate(([], [look("dog")], [HI], [look("cat")])):
        said += more
        seeing.engine.say(f"answer {number}")
        answer = await seeing.ask(*said)
        said.append(answer["choices"][0]["message"])
    first, second, third, fourth = seeing.turns()
    check_images(first, CAT)
    check_images(second, DOG)
    check_images(third)
    check_images(fourth, CAT)
    table = ImageTable()
    assert (resolve(seeing.turns(), images=table)[-1].token_ids < 0).sum() == 3 * 4
    assert len(table.images) == 2


async def test_a_repaired_prompt_keeps_its_tokens_and_its_images_move_with_them(seeing):
    """The first answer was sampled in other tokens than its text is rendered in."""
    seeing.engine.say("", tokens=encode_characters("hello"))
    first = await seeing.ask(HI, look("cat"))
    seeing.engine.say("a dog")
    await seeing.ask(HI, look("cat"), first["choices"][0]["message"], HI, look("dog"))
    earlier, later = seeing.turns()
    assert (later.parent, later.branch, later.repaired) == (earlier.call_id, None, True)
    assert later.shared == earlier.num_prompt + earlier.num_sampled
    check_images(later, DOG)
    asked = seeing.engine.requests[1]
    places = asked.passthrough["features"]["mm_placeholders"]["image"]
    assert [asked.token_ids[place["offset"]] for place in places] == [PAD, PAD]
    assert [place["offset"] for place in places] == [earlier.images[0].offset, later.images[0].offset]


async def test_an_engine_that_keeps_its_cache_takes_an_image_for_another_after_a_push(stages):
    """A vision tower's outputs are cached by the image's hash alone, and belong to the weights that computed them."""
    async with stages(keep_cache=True) as stage:
        let_see(stage)
        hashes = []
        for episode, version in (("a", 3), ("b", 3), ("a", 4), ("c", 4)):
            stage.engine.version = version
            stage.engine.say("a cat")
            await stage.ask(look("cat"), key=stage.key(episode))
            hashes.append(stage.engine.requests[-1].passthrough["features"]["mm_hashes"]["image"])
        assert hashes[0] == hashes[1] == hashes[2] != hashes[3]
        first, second, again, third = stage.turns()
        for turn in (first, second, third):
            check_images(turn, CAT)
        assert again.shared == first.num_prompt, "to the record it is the same image"


async def test_another_image_in_the_same_words_is_not_taken_for_shared(seeing):
    for name in ("cat", "dog", "dog"):
        seeing.engine.say(f"a {name}")
        await seeing.ask(look(name))
    first, second, third = seeing.turns()
    check_images(first, CAT)
    assert second.shared == 0
    check_images(second, DOG)
    assert third.parent == second.call_id
    check_images(third)


async def test_choices_of_one_request_send_its_images_once(seeing):
    for text in ("one", "two"):
        seeing.engine.say(text)
    await seeing.ask(look("cat"), n=2)
    assert sorted(len(turn.images) for turn in seeing.turns()) == [0, 1]


async def test_images_too_large_to_train_are_refused_before_anything_is_sampled(seeing):
    assert len(HUGE.patches) > MAX_IMAGE_BYTES
    seeing.engine.max_model_len = 10_000
    status, error = await seeing.refused({"model": "main", "messages": [look("huge")]})
    assert (status, error["code"]) == (400, "images_too_large")
    assert "send fewer or smaller ones" in error["message"]
    assert seeing.engine.requests == []
    seeing.engine.say("a huge cat")
    await seeing.ask(look("huge"), key=seeing.key(mode="eval"))


async def test_an_image_that_is_sent_again_after_other_words_counts_again(seeing, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_IMAGE_BYTES", 2 * len(CAT.patches))
    answers = []
    for said in (HI, BYE):
        seeing.engine.say("a cat")
        answers.append(await seeing.ask(said, look("cat")))
    for turn in seeing.turns():
        check_images(turn, CAT)
    status, error = await seeing.refused({"model": "main", "messages": [HI, HI, look("cat")]})
    assert (status, error["code"]) == (400, "images_too_large")
    seeing.engine.say("still a cat")
    await seeing.ask(HI, look("cat"), answers[0]["choices"][0]["message"], HI)


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        (lambda features: features["kwargs_data"]["image"].__setitem__(0, "AAAA"), 502, "cannot be used"),
        (lambda features: features["mm_hashes"].update(video=["v"]), 400, "not on video"),
    ],
)
async def test_what_cannot_be_recorded_is_not_sampled(seeing, change, status, told):
    render = seeing.engine.render

    async def render_changed(chat):
        rendered = await render(chat)
        change(rendered.passthrough["features"])
        return rendered

    seeing.engine.render = render_changed
    found, error = await seeing.refused({"model": "main", "messages": [look("cat")]})
    assert found == status
    assert told in error["message"]
    assert seeing.engine.requests == []


async def test_an_untrained_policy_s_images_are_not_recorded(seeing):
    seeing.engine.say("a cat")
    await seeing.ask(look("cat"), key=seeing.key(mode="eval"))
    [turn] = seeing.turns()
    assert turn.images == ()


async def test_many_episodes_prepare_images_at_the_same_time(seeing):
    for _ in range(8):
        seeing.engine.say("a cat")
    await asyncio.gather(*(seeing.ask(look("cat"), key=seeing.key(f"e{number}")) for number in range(8)))
    for turn in seeing.turns():
        check_images(turn, CAT)
