"""Chat completions over HTTP, against a scripted engine: answers, turns, sampling."""

import asyncio
import json
import re
from types import SimpleNamespace
from urllib.parse import unquote

import msgspec
import pytest
from structlog.testing import capture_logs

from support.proxy import events
from swarmq import messages
from swarmq.broker import topology
from swarmq.client.ask import ask_async
from swarmq.client.episodes import received_answers
from swarmq.errors import EngineRefusedError
from swarmq.messages import Sampling, VersionSpan, unpack_floats, unpack_ids
from swarmq.proxy.deltas import extend
from swarmq.testing.scripted_engine import END, ScriptedEngine, decode, encode

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_an_answer_is_in_openai_s_form(stage):
    stage.engine.say("hello")
    answer = await stage.ask(HI)
    [turn] = stage.turns()
    assert answer["id"] == turn.call_id
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "main"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"
    sampled = len(encode("hello")) + 1
    prompt = len(stage.engine.requests[0].token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


async def test_a_turn_has_exactly_the_tokens_of_the_call(stage):
    stage.engine.version = 17
    stage.engine.say("hello")
    await stage.ask(HI, key=stage.key("e7"), headers={"x-swarmq-agent": "planner", "x-stainless-retry-count": "2"})
    [turn] = stage.turns()
    assert (turn.episode_id, turn.policy, turn.mode, turn.agent, turn.retry) == ("e7", "main", "train", "planner", 2)
    assert unpack_ids(turn.prompt_ids).tolist() == stage.engine.requests[0].token_ids
    assert unpack_ids(turn.sampled_ids).tolist() == [*encode("hello"), END]
    assert set(unpack_floats(turn.logprobs)) == {-0.5}
    assert turn.versions == (VersionSpan(version=17, start=0, end=4),)
    assert json.loads(turn.messages) == [HI, {"role": "assistant", "content": "hello"}]


async def test_turns_go_to_the_queue_of_their_episode(stages):
    names = [f"e{number}" for number in range(6)]
    async with stages(processes=3) as stage:
        for name in names:
            stage.engine.say("hello")
            await stage.ask(HI, key=stage.key(name))
        assert stage.turns() == []
        recorded = {
            queue: {messages.decode(stored.body).episode_id for stored in stage.broker.stored(queue)}
            for queue in topology.list_turns(stage.job.run, 2)
        }
    assert recorded == {
        queue: {name for name in names if topology.turns_of("r", name, 2) == queue} for queue in recorded
    }
    assert all(recorded.values())


@pytest.mark.parametrize(
    ("of_the_key", "of_the_header", "credited"),
    [(None, None, None), ("writer", None, "writer"), (None, "tester", "tester"), ("writer", "tester", "tester")],
)
async def test_a_turn_is_credited_to_whom_the_header_names_else_to_whom_the_key_does(
    stage, of_the_key, of_the_header, credited
):
    stage.engine.say("hello")
    headers = {"x-swarmq-agent": of_the_header} if of_the_header else None
    await stage.ask(HI, key=stage.key(agent=of_the_key), headers=headers)
    assert [turn.agent for turn in stage.turns()] == [credited]


async def test_only_new_tokens_and_messages_travel(stage):
    stage.engine.say("one")
    first = await stage.ask(HI)
    more = {"role": "user", "content": "more"}
    stage.engine.say("two")
    await stage.ask(HI, first["choices"][0]["message"], more)
    earlier, later = stage.turns()
    assert later.parent == earlier.call_id
    assert later.shared == len(unpack_ids(earlier.prompt_ids)) + len(unpack_ids(earlier.sampled_ids))
    sequence = [*unpack_ids(earlier.prompt_ids), *unpack_ids(earlier.sampled_ids), *unpack_ids(later.prompt_ids)]
    assert sequence == stage.engine.requests[1].token_ids
    assert json.loads(later.messages) == [more, {"role": "assistant", "content": "two"}]


async def test_two_sendings_of_a_request_have_one_digest(stage):
    body = {"model": "main", "messages": [HI], "seed": 1}
    other = {"seed": 1, "messages": [HI], "model": "main"}
    for sent in (body, other, {**body, "seed": 2}):
        stage.engine.say("x")
        await stage.post(sent)
    one, same, different = stage.turns()
    assert one.request_digest == same.request_digest != different.request_digest
    assert one.call_id != same.call_id


async def test_every_choice_is_a_turn(stage):
    for text in ("a", "bb", "cc"):
        stage.engine.say(text)
    answer = await stage.ask(HI, n=3)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a", "bb", "cc"]
    assert sorted(turn.call_id for turn in stage.turns()) == [f"{answer['id']}.{i}" for i in range(3)]


async def test_a_stream_begins_with_the_first_token(stage):
    gate = asyncio.Event()
    stage.engine.say("abcd", gate=gate)
    body = {"model": "main", "messages": [HI], "stream": True}
    headers = {"authorization": f"Bearer {stage.key()}"}
    async with stage.http.post(f"{stage.url}/v1/chat/completions", json=body, headers=headers) as response:
        seen = b""
        while b'"ab"' not in seen:
            seen += await response.content.readany()
        gate.set()
        seen += await response.read()
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(seen)[:-1]) == "abcd"
    assert events(seen)[-1] == "[DONE]"


async def test_the_usage_chunk_comes_when_asked_for(stage):
    stage.engine.say("ab")
    *_, usage, done = await stage.stream(HI, stream_options={"include_usage": True})
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], 2, "[DONE]")


@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_calls_and_text_before_them_are_parsed(stage, streamed):
    stage.engine.say("ok " + CALL)
    if streamed:
        deltas = [event["choices"][0] for event in (await stage.stream(HI, tools=[TOOL]))[:-1]]
        text = "".join(choice["delta"].get("content") or "" for choice in deltas)
        calls = [call for choice in deltas for call in choice["delta"].get("tool_calls", ())]
        finish = deltas[-1]["finish_reason"]
    else:
        [choice] = (await stage.ask(HI, tools=[TOOL]))["choices"]
        text, calls, finish = choice["message"]["content"], choice["message"]["tool_calls"], choice["finish_reason"]
    assert (text, finish) == ("ok ", "tool_calls")
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    [turn] = stage.turns()
    assert turn.finish_reason == "tool_calls"
    assert unpack_ids(turn.sampled_ids).tolist() == [*encode("ok " + CALL), END]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("said", "content"),
    [
        ("\n\n" + CALL, ""),
        ("\n\n" + CALL + "\n" + CALL, ""),
        ("\n ok" + CALL, "\n ok"),
        ("\n\n", "\n\n"),
        ("\nok", "\nok"),
    ],
)
async def test_white_space_before_tool_calls_is_no_text_streamed_or_whole(stage, said, content, streamed):
    stage.engine.say(said)
    if streamed:
        deltas = [event["choices"][0]["delta"] for event in (await stage.stream(HI, tools=[TOOL]))[:-1]]
        heard = "".join(delta.get("content") or "" for delta in deltas)
    else:
        heard = (await stage.ask(HI, tools=[TOOL]))["choices"][0]["message"]["content"] or ""
    assert heard == content
    [turn] = stage.turns()
    assert json.loads(turn.messages)[-1]["content"] == content


class Counting(ScriptedEngine):
    """How many portions it is asked to parse, each of which takes it a while."""

    portions = 0

    async def derender_delta(self, *given, **more):
        self.portions += 1
        await asyncio.sleep(0.005)
        return await super().derender_delta(*given, **more)


class OneCallAtMost(Counting):
    async def render(self, chat):
        if any(len(message.get("tool_calls") or ()) > 1 for message in chat["messages"]):
            raise EngineRefusedError("one call at a time", status=400)
        return await super().render(chat)


@pytest.mark.parametrize("kind", [Counting, OneCallAtMost])
async def test_few_portions_are_parsed_where_parsers_have_shown_that_they_find_calls_in_large_ones(stages, kind):
    async with stages(engine=kind) as stage:
        for text in ("a", "a" * 200):  # before the second there was a rehearsal
            stage.engine.portions = 0
            stage.engine.say(text)
            chunks = (await stage.stream(HI, tools=[TOOL]))[:-1]
            assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
        sampled = len(encode(text)) + 1
        assert kind is Counting or "stream_interval" not in stage.engine.requests[-1].sampling
        parsed = stage.engine.portions + 1  # the last portion is parsed with the whole answer
        assert parsed == sampled if kind is OneCallAtMost else parsed < sampled / 3


class Eager(ScriptedEngine):
    """Its parser of streams tells of a call as soon as there is a name, and swallows one that stays broken, as vLLM's do.
    That of whole answers takes a broken one for text."""

    async def derender(self, chat, prompt_ids, answers):
        try:
            return await super().derender(chat, prompt_ids, answers)
        except (KeyError, ValueError):
            return [{"role": "assistant", "content": decode(answer.token_ids)} for answer in answers]

    async def derender_delta(self, _chat, _prompt, token_ids, *, finish_reason, state):
        seen, told = [*(state[0] if state else ()), *token_ids], state[1] if state else 0
        text = decode(seen)
        before, mark, call = text.partition("<tool_call>")
        gain = {"content": before[told:]} if len(before) > told and (mark or "<" not in before) else {}
        named = re.search(r'"name": "(\w+)"', call)
        if named and not re.search(r'"name": "(\w+)"', decode(state[0] if state else ()).partition("<tool_call>")[2]):
            gain["tool_calls"] = [{"index": 0, "id": "s", "function": {"name": named[1], "arguments": ""}}]
        return gain, (seen, max(told, len(before)) if gain.get("content") else told)


@pytest.mark.parametrize(
    "said",
    [
        "ok " + CALL,
        'ok <tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
        'ok <tool_call>{"name": "add", "argu',
        "ok <tool_call>",
        "ok <tool_call>{}</tool_call> and more",
        CALL + CALL,
        "no call",
    ],
)
@pytest.mark.parametrize("ended", [True, False])
async def test_a_stream_of_broken_and_cut_calls_adds_up_to_the_answer_at_once(stages, said, ended):
    async with stages(engine=Eager) as stage:
        for _ in range(2):
            stage.engine.say(said, finish_reason="stop" if ended else "length")
        whole = (await stage.ask(HI, tools=[TOOL], key=stage.key("e1")))["choices"][0]
        chunks = [event["choices"][0] for event in (await stage.stream(HI, tools=[TOOL], key=stage.key("e2")))[:-1]]
    message = {"role": "assistant", "content": ""}
    for chunk in chunks:
        extend(message, chunk["delta"])
    assert message["content"] == (whole["message"]["content"] or "")
    assert [call["function"] for call in message.get("tool_calls", ())] == [
        call["function"] for call in whole["message"].get("tool_calls") or ()
    ]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


async def test_logprobs_only_for_who_asks(stage):
    stage.engine.say("ab")
    stage.engine.say("ab")
    silent = await stage.ask(HI)
    asked = await stage.ask(HI, logprobs=True)
    assert silent["choices"][0]["logprobs"] is None
    assert [entry["logprob"] for entry in asked["choices"][0]["logprobs"]["content"]] == [-0.5, -0.5]


async def test_training_keeps_to_the_run_s_sampling_and_says_so(stage):
    stage.engine.say("x")
    body = {"model": "main", "messages": [HI], "temperature": 0, "presence_penalty": 1, "max_tokens": 999}
    _, headers, _ = await stage.post(body)
    assert headers["x-swarmq-overridden"] == "temperature, presence_penalty, max_tokens"
    [sampled] = stage.engine.requests
    assert sampled.sampling == {"temperature": 0.8, "max_tokens": 200, "logprobs": 0}
    [turn] = stage.turns()
    assert (turn.sampling.temperature, turn.sampling.max_tokens) == (0.8, 200)


@pytest.mark.parametrize(("asked", "sampled"), [(3000, 3000), (None, 4083), (9999, 4083)])
async def test_a_run_that_sets_no_limit_lets_an_answer_be_as_long_as_asked_and_as_there_is_room(stages, asked, sampled):
    async with stages(sampling={"max_tokens": None}) as stage:
        stage.engine.say("x")
        body = {"model": "main", "messages": [HI]} | ({"max_tokens": asked} if asked else {})
        _, headers, _ = await stage.post(body)
        assert stage.engine.requests[-1].sampling["max_tokens"] == sampled
        assert headers.get("x-swarmq-overridden") == ("max_tokens" if asked and asked > sampled else None)


async def test_who_watches_a_run_hears_that_it_cuts_what_agents_ask_for(stage):
    async with stage.broker.events("r") as heard:
        stage.engine.say("x")
        await stage.ask(HI, max_tokens=999)
        warning = await anext(event async for event in heard if event.name == "warning")
    assert "answers of 999 tokens (max_tokens) and get 200 at most" in warning.fields["text"]


async def test_an_agent_without_an_sdk_logs_once_that_it_was_cut(stage, monkeypatch):
    monkeypatch.setattr(received_answers, "_logged_overrides", set())  # of the process
    ep = SimpleNamespace(base_url=f"{stage.url}/v1", api_key=stage.key(), model="main", ca=b"", episode_id="e")
    for _ in range(2):
        stage.engine.say("x")
    with capture_logs() as lines:
        for _ in range(2):
            await ask_async(ep, "hi", max_tokens=999)
    [line] = [line for line in lines if line["event"] == "sampling_overridden"]
    assert line["overridden"] == "max_tokens"


@pytest.mark.parametrize(
    "asked",
    [
        {"min_p": 0.1},
        {"watermarking": True},
        {"repetition_detection": {"max_pattern_size": 2}},
        {"vllm_xargs": {"a": 1}},
    ],
    ids=lambda asked: next(iter(asked)),
)
async def test_no_parameter_of_an_engine_changes_what_is_trained(stage, asked):
    stage.engine.say("x")
    _, headers, _ = await stage.post({"model": "main", "messages": [HI], "stop": ["q"], **asked})
    assert headers["x-swarmq-overridden"] == next(iter(asked))
    [sampled] = stage.engine.requests
    expected = {"temperature": 0.8, "max_tokens": 200, "logprobs": 0, "stop": ["q"]}
    assert sampled.sampling == expected
    assert stage.turns()[0].sampling == Sampling(temperature=0.8, max_tokens=200, stop=("q",))


@pytest.mark.parametrize("seed", [0, 42])
async def test_a_seed_does_not_make_the_attempts_of_a_group_the_same(stage, seed):
    stage.engine.say("x")
    _, headers, _ = await stage.post({"model": "main", "messages": [HI], "seed": seed})
    assert (headers["x-swarmq-overridden"], "seed" in stage.engine.requests[0].sampling) == ("seed", False)
    stage.engine.say("x")
    _, headers, _ = await stage.post(
        {"model": "main", "messages": [HI], "seed": seed}, key=stage.key("e2", mode="eval")
    )
    assert (headers.get("x-swarmq-overridden"), stage.engine.requests[1].sampling["seed"]) == (None, seed)


async def test_a_turn_says_what_it_was_sampled_with(stage):
    stage.engine.say("x")
    asked = {
        "temperature": 0.5,
        "min_p": 0.1,
        "presence_penalty": 1.5,
        "logit_bias": {"7": -2},
        "stop": "q",
        "watermarking": True,
        "structured_outputs": {"regex": "x+"},
    }
    await stage.ask(HI, key=stage.key(mode="eval"), **asked)
    sampling = stage.turns()[0].sampling
    assert sampling.grammar.startswith("regex ")
    assert msgspec.structs.replace(sampling, grammar="") == Sampling(
        temperature=0.5,
        max_tokens=200,
        min_p=0.1,
        presence_penalty=1.5,
        logit_bias={"7": -2.0},
        stop=("q",),
        others=("watermarking",),
    )


async def test_what_agrees_with_the_run_is_no_override(stage):
    stage.engine.say("x")
    body = {"model": "main", "messages": [HI], "temperature": 0.8, "top_p": 1, "watermarking": False, "max_tokens": 3}
    _, headers, _ = await stage.post(body)
    assert "x-swarmq-overridden" not in headers
    assert stage.turns()[0].sampling.max_tokens == 3


async def test_evaluation_keeps_to_the_agent_s_sampling(stage):
    stage.engine.say("x")
    stage.engine.say("x")
    key = stage.key(mode="eval")
    await stage.ask(HI, key=key, temperature=0, top_p=0.5, max_tokens=999)
    await stage.ask(HI, key=key)
    asked, silent = stage.turns()
    assert (asked.mode, asked.sampling.temperature, asked.sampling.top_p) == ("eval", 0, 0.5)
    assert asked.sampling.max_tokens == 999
    assert (silent.sampling.temperature, silent.sampling.max_tokens) == (0.8, 200)


async def test_an_answer_cut_off_by_length_is_continued_exactly(stage):
    stage.engine.say("abcdef", finish_reason="length")
    first = await stage.ask(HI)
    assert first["choices"][0]["finish_reason"] == "length"
    stage.engine.say("x")
    await stage.ask(HI, first["choices"][0]["message"], HI)
    earlier, later = stage.turns()
    assert (later.parent, later.branch) == (earlier.call_id, None)


async def test_the_model_field_chooses_the_policy(stage):
    stage.engine.say("x")
    await stage.ask(HI, key=stage.key(policies=("main", "other")), model="other")
    assert stage.turns()[0].policy == "other"


async def test_models_lists_the_key_s_policies(stage):
    headers = {"authorization": f"Bearer {stage.key(policies=('other', 'gone'))}"}
    async with stage.http.get(f"{stage.url}/v1/models", headers=headers) as response:
        listed = msgspec.json.decode(await response.read())
    assert [model["id"] for model in listed["data"]] == ["other"]
    async with stage.http.get(f"{stage.url}/v1/models/gpt-4", headers=headers) as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"].endswith("may call: other")


async def test_health_says_which_policy_has_engines(stage):
    async with stage.http.get(f"{stage.url}/health") as response:
        assert (response.status, (await response.json())["engines"]) == (200, {"main": 1, "other": 1})
    stage.engine.down = True
    async with asyncio.timeout(120):
        while True:  # until a probe has noticed
            async with stage.http.get(f"{stage.url}/health") as response:
                if response.status == 503:
                    break


async def test_state_events_tell_what_was_counted(stage):
    stage.engine.say("x")
    await stage.ask(HI)
    await stage.refused({"model": "no", "messages": [HI]})
    async with stage.broker.events("r") as told:
        fields = (await anext(told)).fields
    assert (fields["calls"], fields["open_calls"], fields["sampled_tokens"], fields["errors"]) == (1, 0, 2, 1)
    assert (fields["branches"], fields["repaired"]) == ({}, 0)


@pytest.mark.parametrize("name", ["gpt-4o", "claude-opus-9"])
async def test_a_policy_answers_to_its_aliases(stages, name):
    async with stages(aliases=["gpt-4o", "claude-*"]) as stage:
        stage.engine.say("x")
        status, _, raw = await stage.post({"model": name, "messages": [HI]})
        assert (status, json.loads(raw)["model"]) == (200, "main")
        status, _, raw = await stage.post({"model": "gpt-4", "messages": [HI]})
        assert (status, "policies.X.aliases" in raw.decode()) == (404, True)


@pytest.mark.parametrize("form", [{}, {"anthropic-version": "2023-06-01"}])
async def test_a_model_is_listed_and_found_under_every_name_it_answers_to(stages, form):
    async with stages(aliases=["gpt-4o", "claude-*", "openai/gpt-4o"]) as stage:

        async def get(path, *policies):
            headers = {"authorization": f"Bearer {stage.key(policies=policies)}", **form}
            async with stage.http.get(f"{stage.url}/v1/models{path}", headers=headers) as response:
                return response.status, await response.json()

        _, listed = await get("", "main", "other")
        assert [model["id"] for model in listed["data"]] == ["main", "other", "gpt-4o", "openai/gpt-4o"]
        _, listed = await get("", "other")
        assert [model["id"] for model in listed["data"]] == ["other"], "aliases of what the key may call"
        for name in ("main", "gpt-4o", "claude-opus-9", "openai/gpt-4o", "openai%2Fgpt-4o"):
            status, card = await get(f"/{name}", "main")
            assert (status, card["id"]) == (200, unquote(name))
        assert (await get("/gpt-4o", "other"))[0] == 404


@pytest.mark.parametrize("body", [{"model": "main", "messages": [HI]}, {"model": "nobody"}])
async def test_every_answer_has_a_request_id(stage, body):
    stage.engine.say("x")
    _, headers, _ = await stage.post(body)
    assert headers["x-request-id"] == headers["request-id"] != ""
