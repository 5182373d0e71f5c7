"""Programs as agents: what they are given, what becomes of their calls, and how their episodes end."""

import asyncio
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from structlog.testing import capture_logs

from support.commands import command_world
from swarmq.black_box.agent import CommandAgent, CommandOptions, check_command
from swarmq.black_box.relay import EpisodeRelay
from swarmq.errors import TaskError
from swarmq.outcome import Outcome

ASK = """
import json, os, sys, urllib.error, urllib.request
def ask(text, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + key}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
BODY = {"model": "main", "messages": [{"role": "user", "content": "hi"}]}
WRITE = ASK + "open('answer', 'w').write(ask(sys.stdin.read()))"


@pytest.fixture
def world(tmp_path):
    """`async with world(respond) as world`."""
    return lambda respond=lambda _prompt: "42", **settings: command_world(tmp_path, respond, **settings)


@pytest.fixture
def attempt(tmp_path):
    """Run Python code as the agent of one episode; returns the episode's end."""

    async def run(world, code, *arguments, task=None, score=None, **options):
        if score is None:
            options = {"test": "grep -q 42 answer", **options}
        else:
            options["score"] = "checks:score"
        chosen = CommandOptions(argv=(sys.executable, "-c", code, *arguments), logs=tmp_path / "logs", **options)
        tasks = [task or {"id": "sum", "prompt": "What is 6 * 7?"}]
        await world.client.run_episodes_until_all_complete(tasks, CommandAgent(chosen, score), max_attempts=1)
        return world.ends[-1]

    return run


async def test_what_a_program_leaves_behind_is_scored(world, attempt, tmp_path):
    async with world() as swarm:
        end = await attempt(swarm, WRITE)
        (turn,) = swarm.stage.turns()
        assert "What is 6 * 7?" in swarm.engine.prompts[0]
    assert (end.status, end.rewards, end.success) == ("finished", {"main": 1.0}, True)
    assert end.received == (turn.call_id,)
    assert turn.observed
    assert end.metrics["calls"] == 1
    assert end.metadata["exit_code"] == "0"
    assert (tmp_path / "logs").is_dir()


async def test_a_wrong_result_is_a_reward_of_0(world, attempt):
    async with world(lambda _prompt: "41") as swarm:
        end = await attempt(swarm, WRITE)
    assert (end.status, end.rewards, end.success) == ("finished", {"main": 0.0}, False)


@pytest.mark.parametrize(
    ("read", "arguments"),
    [("sys.argv[1]", ["say {prompt}"]), ("open(sys.argv[1]).read()", ["{prompt_file}"]), ("sys.stdin.read()", [])],
)
async def test_the_task_comes_by_argument_file_or_standard_input(world, attempt, read, arguments):
    async with world() as swarm:
        end = await attempt(swarm, ASK + f"open('answer', 'w').write(ask({read}))", *arguments)
        assert "What is 6 * 7?" in swarm.engine.prompts[0]
    assert end.rewards == {"main": 1.0}


async def test_the_working_copy_is_that_of_the_task(world, attempt, tmp_path):
    (tmp_path / "repos/one/tests").mkdir(parents=True)
    (tmp_path / "repos/one/tests/check").write_text("grep -q 42 answer")
    code = WRITE + "\nopen('tests/check', 'w').write('true')"
    async with world(lambda _prompt: "41") as swarm:
        task = {"id": "a", "prompt": "hi", "folder": "one"}
        options = {"task": task, "folder": tmp_path / "repos", "test": "sh tests/check"}
        assert (await attempt(swarm, code, **options)).rewards == {"main": 1.0}  # the agent has cheated
        assert (await attempt(swarm, code, **options, restore=("tests",))).rewards == {"main": 0.0}
    assert not (tmp_path / "repos/one/answer").exists()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_function_scores_the_working_copy(world, attempt, is_async):
    def score(folder, task):
        return Outcome(reward=0.5, success=(folder / "answer").read_text() == task["wanted"])

    async def score_async(folder, task):
        return score(folder, task)

    async with world() as swarm:
        task = {"id": "sum", "prompt": "What is 6 * 7?", "wanted": "42"}
        end = await attempt(swarm, WRITE, score=score_async if is_async else score, task=task)
    assert (end.rewards, end.success) == ({"main": 0.5}, True)


@pytest.mark.parametrize("returned", [None, float("nan"), "1", ZeroDivisionError()])
async def test_a_score_that_is_no_number_is_no_reward(world, attempt, returned):
    def score(_folder, _task):
        if isinstance(returned, Exception):
            raise returned
        return returned

    async with world() as swarm:
        end = await attempt(swarm, WRITE, score=score)
    assert (end.status, end.rewards) == ("failed", {})


@pytest.mark.parametrize(
    ("code", "options", "why"),
    [
        ("sys.exit(3)", {}, "ended with exit code 3, which is not scored (--scored-exit)"),
        ("raise SystemError('bug')", {}, "SystemError: bug"),
        ("os.kill(os.getpid(), 9)", {"scored_exits": None}, "was killed by signal 9"),
        ("sys.exit(137)", {"scored_exits": None}, "was killed by signal 9"),
        ("sys.exit(127)", {"scored_exits": None}, "cannot be run (exit code 127)"),
        ("print('waits', flush=True)\nimport time; time.sleep(600)", {"timeout_s": 5.0}, "did not end within 5 s"),
    ],
)
async def test_a_crash_or_a_timeout_is_a_reason_and_never_a_reward(world, attempt, code, options, why):
    async with world() as swarm:
        end = await attempt(swarm, f"{WRITE}\n{code}", **options)
    assert (end.status, end.rewards) == ("failed", {})
    assert why in end.reason


async def test_exit_codes_that_are_to_be_scored_are_scored(world, attempt):
    async with world() as swarm:
        code = WRITE + "\nsys.exit(3)"
        assert (await attempt(swarm, code, scored_exits=frozenset({0, 3}))).rewards == {"main": 1.0}
        assert (await attempt(swarm, code, scored_exits=None)).rewards == {"main": 1.0}


async def test_a_model_that_went_away_is_a_reason_although_the_agent_ends_well(world, attempt):
    code = WRITE + "\ntry: ask('SECOND')\nexcept urllib.error.HTTPError: pass"

    def respond(prompt):
        swarm.engine.down = "SECOND" in prompt
        return "42"

    async with world(respond) as swarm:
        end = await attempt(swarm, code)
    assert (end.status, end.rewards) == ("failed", {})
    assert "the last call of" in end.reason
    assert "got 503" in end.reason


async def test_what_the_policy_is_to_blame_for_is_scored(world, attempt):
    """A conversation that does not fit is refused with 400: that is no fault of the infrastructure."""
    code = WRITE + "\ntry: ask('x' * 1_000_000)\nexcept urllib.error.HTTPError: pass"
    async with world() as swarm:
        assert (await attempt(swarm, code)).rewards == {"main": 1.0}


async def test_an_agent_that_makes_no_call_is_named_within_seconds_and_fails(world, attempt, tmp_path):
    code = "import time; time.sleep(1.5); open('answer', 'w').write('42')"
    async with world() as swarm:
        with capture_logs() as logs:
            end = await attempt(swarm, code, first_call_s=0.2)
    assert (end.status, end.rewards) == ("failed", {})
    assert "no turn arrived" in end.reason
    assert "made no request at http://127.0.0.1:" in end.reason
    assert "OPENAI_BASE_URL" in end.reason
    (warning,) = [entry for entry in logs if entry["event"] == "no_model_call_yet"]
    assert warning["after_s"] == 0.2
    assert "ANTHROPIC_BASE_URL" in warning["seen"]
    (file,) = (tmp_path / "logs").iterdir()
    assert "after 0.2 s" in file.read_text()


async def test_an_agent_that_asks_elsewhere_is_told_what_it_asked_for(world, attempt):
    code = ASK + (
        "\ntry: urllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/embeddings', b'{}')"
        "\nexcept urllib.error.HTTPError: pass"
    )
    async with world() as swarm:
        end = await attempt(swarm, code, any_key=True)
    assert "asked only for POST /v1/embeddings (404)" in end.reason


async def test_the_port_is_enough_for_an_agent_that_cannot_be_told_a_key(world, attempt):
    code = WRITE.replace("ask(sys.stdin.read())", "ask('hi', key='sk-mine')")
    async with world() as swarm:
        refused = await attempt(swarm, code)
        assert "carried another key than the episode's" in refused.reason
        assert swarm.stage.turns() == []
        assert (await attempt(swarm, code, any_key=True)).rewards == {"main": 1.0}


async def test_a_prompt_that_no_argument_can_hold_is_a_reason(world, attempt):
    async with world() as swarm:
        task = {"id": "long", "prompt": "x" * 200_000}
        end = await attempt(swarm, WRITE, "{prompt}", task=task)
        assert "use {prompt_file}" in end.reason
        assert (await attempt(swarm, WRITE, "{prompt_file}", task=task)).status == "finished"


@pytest.mark.parametrize("payload", [{"id": "a"}, {"id": "a", "prompt": 3}, {"id": "a", "prompt": ""}])
async def test_a_task_without_text_is_a_reason(world, attempt, payload):
    async with world() as swarm:
        assert "no text in its field 'prompt'" in (await attempt(swarm, WRITE, task=payload)).reason


def test_a_program_that_is_not_installed_is_named_before_an_episode_begins(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TaskError, match="claude: not installed.*npm install -g @anthropic-ai/claude-code"):
        check_command(CommandOptions(argv=("claude",), test="true"))
    with pytest.raises(TaskError, match="--container needs docker or podman"):
        check_command(CommandOptions(argv=("claude",), test="true", container="image"))


async def test_a_program_that_went_away_since_is_a_reason(world, attempt, tmp_path):
    async with world() as swarm:
        chosen = CommandOptions(argv=("no-such-agent",), test="true", logs=tmp_path / "logs")
        await swarm.client.run_episodes_until_all_complete(["hi"], CommandAgent(chosen), max_attempts=1)
        assert "no-such-agent cannot be started: No such file" in swarm.ends[-1].reason


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"argv": ()}, "no command"),
        ({"argv": ("x",), "test": None}, "give either --test COMMAND or --score"),
        ({"argv": ("x",), "score": "a:b"}, "give either --test COMMAND or --score"),
        ({"argv": ("x",), "restore": ("tests",)}, "--restore needs --folder"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, why):
    with pytest.raises(TaskError, match=why):
        CommandOptions(**{"test": "true", **options})


# The relay


@asynccontextmanager
async def relayed(swarm, **options):
    async with (
        swarm.client.episode({"id": "a"}) as ep,
        EpisodeRelay.open(ep, **options) as relay,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {ep.api_key}"}) as http,
    ):
        yield ep, relay, http
        await ep.end(1.0)


def ask_for_stream(http, relay):
    return http.post(f"{relay.base_url}/chat/completions", json=BODY | {"stream": True})


async def test_streams_pass_as_they_come(world):
    async with world() as swarm:
        gate = asyncio.Event()
        swarm.engine.respond = lambda _prompt: "begun and ended"
        plain_say = swarm.engine.say
        swarm.engine.say = lambda text: plain_say(text, gate=gate)
        async with relayed(swarm) as (_, relay, http), ask_for_stream(http, relay) as answer:
            first = await answer.content.readuntil(b"\n\n")
            assert first.startswith(b"data: ")
            assert relay.num_answered == 0
            gate.set()
            assert b"[DONE]" in await answer.read()
        (turn,) = swarm.stage.turns()
        assert swarm.ends[-1].received == (turn.call_id,)
        assert [call.is_answered for call in relay.calls] == [True]


FRAMES = {
    "length": b"content-length: 2\r\n\r\n{}",
    "chunks": b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("frame", FRAMES)
async def test_an_answer_is_whole_before_the_proxy_closes_its_connection(world, frame):
    async def answer_and_stay(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx-swarmq-call-id: c1\r\n" + FRAMES[frame])
        await reader.read()
        writer.close()

    proxy = await asyncio.start_server(answer_and_stay, "127.0.0.1", 0)
    async with world() as swarm, proxy, swarm.client.episode({"id": "a"}) as ep:
        ep._record.base_url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/v1"
        async with (
            EpisodeRelay.open(ep, any_key=True) as relay,
            aiohttp.ClientSession() as http,
            http.post(f"{relay.base_url}/chat/completions") as answer,
        ):
            assert await answer.read() == b"{}"
        assert [(call.is_answered, call.agent_left) for call in relay.calls] == [(True, False)]
        await ep.end(1.0)


async def test_an_agent_that_leaves_ends_the_sampling(world):
    async with world() as swarm:
        plain_say = swarm.engine.say
        swarm.engine.say = lambda text: plain_say(text, gate=asyncio.Event())
        async with relayed(swarm) as (_, relay, http):
            async with ask_for_stream(http, relay) as answer:
                await answer.content.readuntil(b"\n\n")
                answer.close()
            async with asyncio.timeout(60):
                await swarm.engine.cancelled.wait()
        assert swarm.ends[-1].received == ()
        (call,) = relay.calls
        assert call.agent_left
        assert not call.failed_by_infrastructure


async def test_a_stream_that_breaks_off_is_no_answer_and_no_fault_of_the_agent(world):
    async with world() as swarm:
        plain_say = swarm.engine.say
        swarm.engine.say = lambda text: plain_say(text, error="the engine fell over")
        async with relayed(swarm) as (_, relay, http), ask_for_stream(http, relay) as answer:
            await answer.read()
        assert swarm.ends[-1].received == ()
        assert [call.failed_by_infrastructure for call in relay.calls] == [True]


async def test_a_proxy_that_is_away_is_a_503(world, monkeypatch):
    async with world() as swarm, swarm.client.episode({"id": "a"}) as ep:
        ep._record.base_url = "http://127.0.0.1:1/v1"
        async with (
            EpisodeRelay.open(ep, any_key=True) as relay,
            aiohttp.ClientSession() as http,
            http.post(f"{relay.base_url}/chat/completions", json=BODY) as answer,
        ):
            assert answer.status == 503
            assert "cannot be reached" in (await answer.json())["error"]["message"]
        assert [call.failed_by_infrastructure for call in relay.calls] == [True]
        await ep.fail("done")


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_and_other_dialects_pass(world, chunked):
    async with world() as swarm, relayed(swarm) as (_, relay, http):
        text = "x" * 300_000
        body = {"model": "main", "max_tokens": 100, "messages": [{"role": "user", "content": text}]}
        headers = {"anthropic-version": "2023-06-01", "expect": "100-continue"}
        async with http.post(
            f"{relay.base_url}/messages", json=body, headers=headers, chunked=chunked or None
        ) as answer:
            assert answer.status == 200
            assert (await answer.json())["content"][0]["text"] == "42"
        async with http.get(f"{relay.base_url}/models") as answer:
            assert answer.status == 200
        assert relay.other_paths == {"GET /v1/models": 200}
        assert relay.num_answered == 1


async def test_a_head_that_is_too_long_is_refused(world):
    headers = {"x-long": "x" * 100_000}
    async with (
        world() as swarm,
        relayed(swarm) as (_, relay, http),
        http.get(f"{relay.base_url}/models", headers=headers) as answer,
    ):
        assert answer.status == 431
