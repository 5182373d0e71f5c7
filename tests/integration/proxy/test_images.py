"""A real model that takes images, as a policy that is not trained beside one that takes text alone: every dialect's answer
is vLLM's own, and what is recorded are the tokens that it sampled from and sampled. As a trained policy, its turns also have the
pixels: the learner computes vLLM's log-probabilities from them. Runs on a GPU, too."""

import asyncio
import base64
import io
from collections import defaultdict

import anthropic
import msgspec
import openai
import pytest
import torch
from benchmarks.vlm import oracle
from benchmarks.vlm.architecture import IMAGE, QWEN2_5_VL, QWEN3_VL
from PIL import Image
from tokenizers import Tokenizer

from support.engine import KNOWN, SECRET, running_engine
from support.real_proxy import real_stage
from support.tiny_vision_model import tiny_vision_model
from swarmq.config import Lora, Train
from swarmq.engine.server.launch import is_cuda_build
from swarmq.learner.model.hf_names import to_hf_names
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.learner.train.trainer import Trainer
from swarmq.timeline import resolve
from swarmq.weights.push.pusher import WeightPusher

pytestmark = [pytest.mark.vllm, pytest.mark.broker]

SEEING = ("--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--mm-encoder-attn-backend", "TORCH_SDPA")
ON_A_GPU = ("--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.1")
WIDE, HIGH = 3, 2
"""Places of an image in a prompt."""
QUESTION = "What is this?"
HI = {"role": "user", "content": "hi"}
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ALL_TRAINED = pytest.mark.parametrize(
    "kind", [QWEN2_5_VL, QWEN3_VL], ids=lambda kind: kind.family, indirect=True, scope="module"
)
"""Kinds of models that can be trained, each with an engine of its own."""


def png(colour="teal", *, kind=QWEN2_5_VL):
    """In one corner white, or the vision tower's normalisation might leave nothing of the colour. Of teal the model says a
    token each time that is 0.25 likelier (of log-probability) than all others: no kernel's rounding makes it another."""
    image = Image.new("RGB", (WIDE * kind.place, HIGH * kind.place), colour)
    image.paste("white", (0, 0, kind.place, kind.place))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def looking_at(*images):
    """A message that asks about these PNGs."""
    urls = [{"url": f"data:image/png;base64,{image}"} for image in images]
    shown = [{"type": "image_url", "image_url": url} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": QUESTION}, *shown]}


@pytest.fixture(scope="module")
def kind(request):
    return getattr(request, "param", QWEN2_5_VL)


@pytest.fixture(scope="module")
def eyes_url(engine_url, tmp_path_factory, kind):
    """After the engine that all share: on a GPU both measure what memory is free."""
    arguments = (*SEEING, *ON_A_GPU) if is_cuda_build() else SEEING
    log_path = tmp_path_factory.mktemp("eyes") / "engine.log"
    with running_engine(tiny_vision_model(kind), log_path, *arguments, sees=True) as engine:
        yield engine.url


@pytest.fixture
async def stage(eyes_url, engine_url, amqp_url, run_name, tiny_model):
    frozen = {"eyes": (tiny_vision_model(), eyes_url)}
    urls = {"engine_url": engine_url, "amqp_url": amqp_url}
    async with real_stage(run_name, tiny_model, **urls, max_tokens=8, frozen=frozen) as made:
        yield made


def key(stage, episode="e1", **claims):
    return stage.key(episode, policies=("main", "eyes"), **{"mode": "eval", **claims})


async def direct(stage, url, *messages):
    """vLLM's own answer, with its token ids."""
    body = {"model": str(tiny_vision_model()), "messages": messages, "return_token_ids": True, **GREEDY}
    async with stage.http.post(f"{url}/v1/chat/completions", json=body, headers=KNOWN) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def place():
    return Tokenizer.from_file(str(tiny_vision_model() / "tokenizer.json")).token_to_id(IMAGE)


async def chat(client, image):
    answer = await client.chat.completions.create(model="eyes", messages=[looking_at(image)], **GREEDY)
    return answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens


async def chat_streamed(client, image):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await client.chat.completions.create(model="eyes", messages=[looking_at(image)], **options, **GREEDY)
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens


async def response(client, image):
    shown = {"type": "input_image", "image_url": f"data:image/png;base64,{image}", "detail": "auto"}
    said = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}, shown]}]
    answer = await client.responses.create(model="eyes", input=said, temperature=0.0, max_output_tokens=8)
    return answer.output_text, answer.usage.input_tokens, answer.usage.output_tokens


async def message(client, image):
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}}
    said = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, shown]}]
    asked = {"model": "eyes", "messages": said, "max_tokens": 8, "extra_body": {"temperature": 0.0}}
    answer = await client.messages.create(**asked)
    text = "".join(block.text for block in answer.content)
    return text, answer.usage.input_tokens, answer.usage.output_tokens


async def test_every_dialect_s_answer_is_vllm_s_own_and_recorded_with_the_image_s_places(stage, eyes_url):
    image = png()
    wanted = await direct(stage, eyes_url, looking_at(image))
    [choice] = wanted["choices"]
    essence = (choice["message"]["content"], wanted["usage"]["prompt_tokens"], wanted["usage"]["completion_tokens"])
    assert essence[1] == len(wanted["prompt_token_ids"])
    client_of = {"api_key": key(stage), "max_retries": 0}
    async with (
        openai.AsyncOpenAI(base_url=f"{stage.url}/v1", **client_of) as openai_client,
        anthropic.AsyncAnthropic(base_url=stage.url, **client_of) as anthropic_client,
    ):
        told = [await ask(openai_client, image) for ask in (chat, chat_streamed, response)]
        told.append(await message(anthropic_client, image))
    assert told == [essence] * 4
    turns = await stage.turns(4)
    assert {turn.policy for turn in turns} == {"eyes"}
    for turn in resolve(turns):
        assert turn.prompt_ids.tolist() == wanted["prompt_token_ids"]
        assert turn.sampled_ids.tolist() == choice["token_ids"]
    assert wanted["prompt_token_ids"].count(place()) == WIDE * HIGH


async def test_what_is_in_an_image_reaches_the_model(stage):
    """The same words and places, another picture: other probabilities."""
    fields = {"model": "eyes", "temperature": 0.0, "max_tokens": 1}
    for colour in ("teal", "indigo", "teal"):
        await stage.ask(looking_at(png(colour)), key=key(stage), **fields)
    turns = resolve(await stage.turns(3))
    assert len({tuple(turn.prompt_ids) for turn in turns}) == 1
    teal, indigo, again = ((turn.sampled_ids.item(), turn.logprobs.item()) for turn in turns)
    assert again == (teal[0], pytest.approx(teal[1], abs=0.01))
    assert indigo != (teal[0], pytest.approx(teal[1], abs=0.1))


@pytest.mark.parametrize("mode", ["eval", "train"])
async def test_a_conversation_about_images_goes_on(stage, mode):
    said = [looking_at(png(), png("indigo"))]
    for number, following in enumerate((HI, looking_at(png("indigo")), HI), start=1):
        answer = await stage.ask(*said, model="eyes", key=key(stage, mode=mode), seed=number)
        [choice] = answer["choices"]
        assert 0 < answer["usage"]["completion_tokens"] <= 8
        said += [choice["message"], following]
    prompts = [turn.prompt_ids.tolist() for turn in resolve(await stage.turns(3))]
    assert [prompt.count(place()) for prompt in prompts] == [images * WIDE * HIGH for images in (2, 2, 3)]


async def test_a_model_that_takes_text_alone_answers_an_image_with_400(stage):
    status, error = await stage.refused({"model": "main", "messages": [looking_at(png())]}, key=key(stage))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "multimodal" in error["message"]
    await stage.ask(HI, model="main", key=key(stage))


@pytest.mark.parametrize("broken", ["bm8gcGljdHVyZQ==", "%%%", ""], ids=["no picture", "no base64", "nothing"])
async def test_a_broken_image_is_a_400_that_says_so(stage, broken):
    status, error = await stage.refused({"model": "eyes", "messages": [looking_at(broken)]}, key=key(stage))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "image" in error["message"]
    unencoded = {"type": "image_url", "image_url": {"url": "data:image/png,abc"}}  # vLLM's 501
    body = {"model": "eyes", "messages": [{"role": "user", "content": [unencoded]}]}
    assert (await stage.refused(body, key=key(stage)))[0] == 400
    await stage.ask(looking_at(png()), model="eyes", key=key(stage))


async def test_a_truncated_png_is_a_400_in_anthropic_s_form(stage):
    cut = base64.b64encode(base64.b64decode(png())[:60]).decode()
    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": cut}}
    body = {"model": "eyes", "max_tokens": 8, "messages": [{"role": "user", "content": [shown]}]}
    status, _, raw = await stage.post(body, "/v1/messages", key=key(stage))
    assert (status, msgspec.json.decode(raw)["error"]["type"]) == (400, "invalid_request_error")
    assert "image" in msgspec.json.decode(raw)["error"]["message"]


@pytest.fixture
def keep_cache():
    return False


@pytest.fixture
async def trained(eyes_url, amqp_url, run_name, kind, keep_cache):
    urls = {"engine_url": eyes_url, "amqp_url": amqp_url}
    async with real_stage(run_name, tiny_vision_model(kind), **urls, max_tokens=8, keep_cache=keep_cache) as made:
        yield made


@ALL_TRAINED
async def test_a_learner_computes_vllm_s_log_probabilities_from_the_recorded_pixels(trained, kind):
    """In a conversation that shows two images, then another one, and in another conversation about other pictures."""
    teal, indigo, red = (png(colour, kind=kind) for colour in ("teal", "indigo", "red"))
    said = [looking_at(teal, indigo)]
    for number, following in enumerate((HI, looking_at(red), None), start=1):
        answer = await trained.ask(*said, key=trained.key(), seed=number)
        said += [answer["choices"][0]["message"], following]
    await trained.ask(looking_at(red, indigo), key=trained.key(), seed=9)
    turns = await trained.turns(4)
    assert [len(turn.images) for turn in turns] in ([2, 0, 1, 2], [2, 2, 3, 2])  # the second if answers drifted
    model = LayoutModel(load_lm(str(tiny_vision_model(kind)), gradient_checkpointing=False))
    resolved = resolve(turns)
    sampled = [turn.logprobs.tolist() for turn in resolved]
    for way in ("rows", "tree"):
        with torch.no_grad():
            found = compute_logprobs(model, oracle.lay(turns, way, 2000))
        assert [found[turn] for turn in range(4)] == [pytest.approx(each, abs=2e-3) for each in sampled]


@pytest.fixture
async def push(trained, tmp_path, kind, keep_cache):
    """`await push(weights, version)`: the method; afterwards the engine has its first weights again."""
    pusher = WeightPusher([trained.engine.url], tmp_path, secret=SECRET, patience_s=0, keep_cache=keep_cache)

    async def send(weights, version):
        report = await asyncio.to_thread(pusher.push, weights, version)
        return report.methods[trained.engine.url]

    yield send
    await send(name_weights(load_lm(str(tiny_vision_model(kind)), gradient_checkpointing=False)), 0)


def name_weights(lm):
    return to_hf_names(lm, lm.named_parameters())


async def look(trained, kind, episode):
    """The turn of an answer about an image."""
    await trained.ask(looking_at(png("indigo", kind=kind)), key=trained.key(episode), seed=1)
    return await trained.turns(1)


@ALL_TRAINED
@pytest.mark.parametrize("keep_cache", [False, True])
async def test_the_engine_sees_an_image_that_it_knows_with_the_pushed_vision_tower(trained, push, kind):
    """vLLM keeps a tower's outputs for later requests that show the image: a push ends that, for new episodes also where the cache is kept."""
    before, now = (load_lm(str(tiny_vision_model(kind)), gradient_checkpointing=False) for _ in range(2))
    with torch.no_grad():
        for parameter in now.model.visual.parameters():
            parameter.mul_(1.5)
    await push(name_weights(before), 1)
    await look(trained, kind, "e1")
    await push(name_weights(now), 2)
    turns = await look(trained, kind, "e2")
    assert [span.version for span in turns[0].versions] == [2]
    sampled = resolve(turns)[0].logprobs.tolist()
    with torch.no_grad():
        by_now, by_before = (compute_logprobs(LayoutModel(lm), oracle.lay(turns, "rows", 2000)) for lm in (now, before))
    assert by_now[0] == pytest.approx(sampled, abs=2e-3)
    assert by_before[0] != pytest.approx(sampled, abs=0.1)


@ALL_TRAINED
async def test_an_engine_samples_from_what_adapters_learned_about_images(trained, push, kind):
    learner = Trainer(str(tiny_vision_model(kind)), Train(lora=Lora(rank=4, modules=("qkv",)), token_log=False))
    adapters = [each for each in learner.lm.parameters() if each.requires_grad]
    with torch.no_grad():
        for parameter in adapters:
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    assert await push(learner.weights_to_push(), 1) == "adapters"
    turns = await look(trained, kind, "e1")
    sampled = resolve(turns)[0].logprobs.tolist()
    with torch.no_grad():
        assert compute_logprobs(learner.model, oracle.lay(turns, "rows", 2000))[0] == pytest.approx(sampled, abs=2e-3)
        for parameter in adapters:
            parameter.zero_()
        without = compute_logprobs(learner.model, oracle.lay(turns, "rows", 2000))[0]
    assert without != pytest.approx(sampled, abs=0.1)


def compute_logprobs(model, layouts):
    found = defaultdict(list)
    for layout in layouts:
        chosen = model(PlacedLayout.of(layout, torch.device("cpu"))).logprobs.tolist()
        for turn, _, value in sorted(zip(layout.turns.tolist(), layout.offsets.tolist(), chosen, strict=True)):
            found[turn].append(value)
    return found


async def test_a_trained_policy_refuses_what_cannot_be_seen_before_it_samples(trained):
    bomb = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(bomb, "PNG")  # a few hundred kilobytes that would be gigabytes
    refused = {
        "more images than the model takes": looking_at(*[png()] * 5),
        "broken": looking_at("bm8gcGljdHVyZQ=="),
        "huge": looking_at(base64.b64encode(bomb.getvalue()).decode()),
        "missing": {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        "at a private address": {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/cat.png"}}],
        },
    }
    for what, message in refused.items():
        status, error = await trained.refused({"model": "main", "messages": [message]}, key=trained.key())
        assert (status, error["type"]) == (400, "invalid_request_error"), what
    await trained.ask(looking_at(png()), key=trained.key())
    [turn] = await trained.turns(1)
    assert len(turn.images) == 1
