"""The client of a vLLM server, against canned answers: what is read from them, and which error each failure becomes."""

import asyncio
import base64
import io
import json
import time
from contextlib import asynccontextmanager, closing

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from swarmq.engine.client.protocol import RenderedPrompt
from swarmq.engine.client.vllm import EngineFaultError, EngineRouteError, VllmEngine
from swarmq.errors import EngineAnswerError, EngineError, EngineRefusedError
from swarmq.messages import VersionSpan
from swarmq.proxy.completions.deadline import Deadline
from swarmq.proxy.http_errors import DeadlineError

PROMPT = RenderedPrompt(token_ids=[1, 2], sampling={"n": 1})


def choice(text="", ids=(), *, index=0, finish=None, version="default", stop=None):
    content = [{"token": "t", "logprob": -1.5, "bytes": [116], "top_logprobs": []} for _ in ids]
    spans = [{"version": version, "start": 0, "end": len(ids)}] if finish else None
    return {
        "index": index,
        "text": text,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "finish_reason": finish,
        "stop_reason": stop,
        "weight_versions": spans,
    }


def event(*choices):
    return b"data: " + json.dumps({"request_id": "r", "choices": choices, "usage": None}).encode() + b"\n\n"


@asynccontextmanager
async def answering(path, handler, *, deadline_s=30.0, more=None):
    """A client of a server whose `path` is answered by `handler`."""

    async def models(_):
        return web.json_response({"data": [{"id": "served", "max_model_len": 64}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(path, handler)
    for other, answer in (more or {}).items():
        app.router.add_get(other, answer)
    async with TestServer(app) as server, VllmEngine.open(str(server.make_url("")), deadline_s=deadline_s) as engine:
        yield engine


def generating(*blocks):
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
            await asyncio.sleep(0)  # the server writes it out
        return response

    return answering("/inference/v1/generate", handler)


async def collected(engine, *, stream=True):
    return [delta async for deltas in engine.generate(PROMPT, stream=stream) for delta in deltas]


async def test_render_fills_in_the_model_and_keeps_what_generate_wants_back():
    async def handler(request):
        assert (await request.json())["model"] == "served"
        reply = {"token_ids": [7], "sampling_params": {"seed": 1}, "reasoning_parser_kwargs": {}, "features": None}
        return web.json_response(reply)

    async with answering("/v1/chat/completions/render", handler) as engine:
        rendered = await engine.render({"messages": []})
    assert rendered == RenderedPrompt(
        token_ids=[7], sampling={"seed": 1}, passthrough={"reasoning_parser_kwargs": {}}, needs_parsing=True
    )


@pytest.mark.parametrize(("image", "passthrough"), [([9, 9, 9], True), ([8, 9, 9], False)])
async def test_an_image_that_vllm_would_die_of_is_refused(image, passthrough):
    """With other tokens around those of its parts, as in Idefics3 and Gemma 3."""
    features = {"mm_placeholders": {"image": [{"offset": 1, "length": 3}]}}

    async def handler(_request):
        return web.json_response({"token_ids": [7, *image, 7], "sampling_params": {}, "features": features})

    async with answering("/v1/chat/completions/render", handler) as engine:
        if passthrough:
            assert (await engine.render({"messages": []})).passthrough == {"features": features}
        else:
            with pytest.raises(EngineRefusedError, match="several different tokens") as refused:
                await engine.render({"messages": []})
            assert (refused.value.status, refused.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("chat", "parsed"), [({}, False), ({"tools": [1]}, True), ({"tools": [1], "tool_choice": "none"}, False)]
)
async def test_an_answer_is_parsed_where_it_may_call_tools(chat, parsed):
    async def handler(_):
        return web.json_response({"token_ids": [7], "sampling_params": {}})

    async with answering("/v1/chat/completions/render", handler) as engine:
        assert (await engine.render(chat)).needs_parsing is parsed


async def test_events_are_read_however_the_wire_cuts_them():
    whole = event(choice("ab", [5])) + event(choice("c", [6], finish="stop")) + b"data: [DONE]\n\n"
    for size in (13, 100, len(whole)):
        async with generating(*(whole[at : at + size] for at in range(0, len(whole), size))) as engine:
            deltas = await collected(engine)
        assert "".join(delta.text for delta in deltas) == "abc"
        assert [token for delta in deltas for token in delta.token_ids] == [5, 6]
        assert deltas[-1].finish_reason == "stop"


async def test_events_that_are_here_together_become_one_delta_per_choice():
    async with generating(
        event(choice("a", [5])) + event(choice("x", [8], index=1)) + event(choice("b", [6]))
    ) as engine:
        deltas = await collected(engine)
    assert [(delta.index, delta.text, delta.token_ids) for delta in deltas] == [(0, "ab", [5, 6]), (1, "x", [8])]


@pytest.mark.parametrize(("name", "version"), [("default", 0), ("17", 17)])
async def test_weight_versions_are_numbers(name, version):
    async with generating(event(choice("a", [5], finish="stop", version=name))) as engine:
        [delta] = await collected(engine)
    assert delta.versions == (VersionSpan(version=version, start=0, end=1),)


def npy(array):
    """The array as vLLM sends it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
async def test_routed_experts_are_those_of_the_last_tokens(kind):
    experts = np.arange(3 * 2 * 4, dtype=kind).reshape(3, 2, 4)
    last = choice("a", [5], finish="stop") | {"routed_experts": npy(experts)}
    async with generating(event(choice("x", [4])), event(last)) as engine:
        routed = (await collected(engine))[-1].routed_experts
    assert (routed.of_last(2), routed.num_tokens) == (experts[1:].tobytes(), 3)
    with pytest.raises(EngineAnswerError, match="of 3 tokens, not of 4"):
        routed.of_last(4)


@pytest.mark.parametrize(
    "sent", ["?", base64.b64encode(b"x").decode(), npy(np.zeros((3, 2))), npy(np.zeros((3, 2, 4)))]
)
async def test_routed_experts_in_another_form_are_refused(sent):
    last = choice("a", [5], finish="stop") | {"routed_experts": sent}
    async with generating(event(last)) as engine:
        with pytest.raises(EngineAnswerError, match="routed experts have an unexpected format"):
            await collected(engine)


async def test_an_answer_that_is_not_streamed_is_one_delta_per_choice():
    async with generating(json.dumps({"choices": [choice("ab", [5, 6], finish="length")]}).encode()) as engine:
        [delta] = await collected(engine, stream=False)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("ab", [5, 6], "length")


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (event(choice("a", [5], finish="stop", version="other")), None),
        (event(choice("a", [5], finish="abort")), None),
        (event({**choice("a", [5]), "logprobs": None}), "logprobs"),
        (b'data: {"error": {"message": "died"}}\n\n', None),
        (b'data: {"choices": 3}\n\n', "malformed"),
        (event(choice("a", [5])).replace(b"-1.5", b"NaN"), "malformed"),
    ],
)
async def test_what_cannot_be_trusted_is_the_engine_s_fault(block, reason):
    """With a reason where the next answer would hardly be another."""
    async with generating(block) as engine:
        with pytest.raises(EngineError) as caught:
            await collected(engine)
    assert getattr(caught.value, "reason", None) == reason


@pytest.mark.parametrize(
    ("status", "error", "kind", "code"),
    [
        (
            400,
            {"message": "This model's maximum context length is 64 tokens"},
            EngineRefusedError,
            "context_length_exceeded",
        ),
        (
            400,
            {"message": "temperature must be non-negative", "param": "temperature"},
            EngineRefusedError,
            "invalid_value",
        ),
        (404, {"message": "The model does not exist", "param": "model"}, EngineError, None),
        (404, None, EngineRouteError, None),
        (500, {"message": "EngineCore encountered an issue"}, EngineFaultError, None),
        (501, {"message": "Only base64 data URLs are supported for now."}, EngineRefusedError, None),
    ],
)
async def test_a_status_says_whose_fault_it_is(status, error, kind, code):
    async def handler(_):
        return web.json_response({"error": error} if error else {"detail": "Not Found"}, status=status)

    async with answering("/v1/chat/completions/render", handler) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.render({})
    assert type(caught.value) is kind
    assert getattr(caught.value, "code", None) == code
    if kind is EngineRefusedError:
        assert (caught.value.status, caught.value.param) == (400, error.get("param"))


@pytest.mark.parametrize("version", ["0.29.1", "0.40.0", "1.2"])
async def test_a_server_out_of_the_range_is_named_before_anything_is_asked_of_it(version):
    asked = []

    async def handler(request):
        asked.append(request.path)
        return web.json_response({"version": version})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server, VllmEngine.open(str(server.make_url("")), deadline_s=30.0) as engine:
        with pytest.raises(EngineError, match=rf"{engine.url} runs vLLM {version}; 0\.30 to 0\.33 are supported"):
            await engine.render({"messages": []})
    assert asked == ["/version"]


async def test_nobody_there_is_an_engine_error_and_unhealthy():
    async with VllmEngine.open("http://127.0.0.1:9", deadline_s=1) as engine:
        with pytest.raises(
            EngineError, match=r"9 cannot be reached: nothing answers there \(Connection refused\); is vLLM"
        ):
            await engine.info()
        assert not await engine.is_healthy()


@pytest.mark.parametrize("closes", [1, 2])
async def test_an_engine_that_closes_a_connection_in_the_moment_of_asking_is_asked_once_more(closes):
    asked = []

    async def handler(request):
        asked.append(request.path)
        if len(asked) > closes:
            return web.json_response({"tokens": [7]})
        request.transport.close()
        return web.Response()

    async with answering("/tokenize", handler) as engine:
        if closes == 1:
            assert await engine.tokenize("x") == [7]
        else:
            with pytest.raises(EngineError, match="cannot be reached"):
                await engine.tokenize("x")
    assert len(asked) == 2


async def test_an_answer_that_takes_too_long_is_an_engine_error():
    async def handler(_):
        await asyncio.Event().wait()

    async with answering("/inference/v1/generate", handler, deadline_s=0.05) as engine:
        with pytest.raises(EngineError, match="within"):
            await collected(engine)


async def test_without_a_deadline_an_answer_takes_as_long_as_its_caller_lets_it():
    async def handler(_):
        await asyncio.Event().wait()

    async with answering("/inference/v1/generate", handler, deadline_s=None) as engine:
        with closing(Deadline(time.monotonic(), 0.05)) as deadline, pytest.raises(DeadlineError), deadline:
            await collected(engine)


async def test_something_else_that_listens_is_an_engine_error():
    async def handler(_):
        return web.Response(text="<html>")

    async with answering("/tokenize", handler) as engine:
        with pytest.raises(EngineError, match="did not answer with JSON"):
            await engine.tokenize("x")


@pytest.mark.parametrize(
    ("sampling", "health", "kind"),
    [
        ({"structured_outputs": {"grammar": "x"}}, 200, EngineRefusedError),
        ({"structured_outputs": {"grammar": "x"}}, 503, EngineError),
        ({}, 200, EngineError),
    ],
)
async def test_a_grammar_that_a_healthy_engine_fails_on_is_the_agent_s_fault(sampling, health, kind):
    async def fail(_):
        return web.json_response({"error": {"message": "Internal server error"}}, status=500)

    async def healthy(_):
        return web.Response(status=health)

    app = web.Application()
    app.router.add_post("/inference/v1/generate", fail)
    app.router.add_get("/health", healthy)
    async with TestServer(app) as server, VllmEngine.open(str(server.make_url("")), deadline_s=30.0) as engine:
        with pytest.raises(EngineError) as caught:
            await anext(engine.generate(RenderedPrompt(token_ids=[1], sampling=sampling), stream=True))
    assert isinstance(caught.value, EngineRefusedError) is (kind is EngineRefusedError)


@pytest.mark.parametrize(("health", "kind"), [(200, EngineRefusedError), (503, EngineFaultError)])
async def test_messages_that_a_healthy_engine_fails_on_are_the_agent_s_fault(health, kind):
    async def fail(_):
        return web.json_response({"error": {"message": "maximum recursion depth exceeded"}}, status=500)

    async def healthy(_):
        return web.Response(status=health)

    async with answering("/v1/chat/completions/render", fail, more={"/health": healthy}) as engine:
        with pytest.raises(kind, match="maximum recursion depth"):
            await engine.render({"messages": []})


async def test_parsers_get_what_they_look_at_and_not_the_whole_conversation_with_every_portion():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    seen = []

    async def handler(request):
        seen.append((await request.json())["chat_request"])
        return web.json_response({"chunk": {"choices": []}, "stream_state": 7})

    said = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y", "tool_calls": [call]}]
    async with answering("/v1/chat/completions/derender", handler) as engine:
        for messages in (said, said[:1]):
            chat = {"messages": messages, "tools": [1]}
            await engine.derender_delta(chat, [1], [2], finish_reason=None, state=None)
    assert seen[0] == {"model": "served", "tools": [1], "messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert seen[1]["messages"] == [{"role": "user", "content": ""}]


async def test_streams_are_parsed_one_at_a_time_but_nobody_s_first_portion_waits():
    """Prompts are rendered on the same thread of vLLM."""
    asked, busy, most, gate = [], 0, 0, asyncio.Event()

    async def handler(request):
        nonlocal busy, most
        state = (await request.json())["stream_state"]
        asked.append(state)
        if state is not None:
            busy += 1
            most = max(most, busy)
            await gate.wait()
            busy -= 1
        return web.json_response({"chunk": {"choices": []}, "stream_state": 7})

    async with answering("/v1/chat/completions/derender", handler) as engine, asyncio.TaskGroup() as tasks:

        async def parse(state):
            await engine.derender_delta({"messages": []}, [1], [2], finish_reason=None, state=state)

        for _ in range(3):
            tasks.create_task(parse({}))
        await parse(None)
        gate.set()
    assert (len(asked), most) == (4, 1)
