"""`swarmq run` as typed, on a real RabbitMQ: one task, a task file, and the queue."""

import asyncio
import contextlib
import json
import os
import signal
import sys

import msgspec
import pytest

from support.commands import ConversingEngine
from support.proxy import ROOT, served
from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.config import SwarmJob
from swarmq.keys import Invite, derive_client_secret
from swarmq.messages import EpisodeEnd, Slot, Task, Ticket, Turn
from swarmq.proxy.http.app import create_app

pytestmark = pytest.mark.broker

AGENT = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer", "w").write(answer)
"""
PATIENCE_S = 120.0


class Far:
    """The far side of a run: its broker, and what arrives in `in`."""

    def __init__(self, broker, invite, folder):
        self.broker, self.invite, self.folder = broker, invite, folder

    async def ends(self, count):
        ends, turns = {}, {}
        async with (
            asyncio.timeout(PATIENCE_S),
            self.broker.consume(topology.inbox(self.invite.run), prefetch=9) as came,
        ):
            while len(ends) < count:
                delivery = await anext(came)
                if isinstance(piece := delivery.message, EpisodeEnd):
                    ends[piece.episode_id] = piece
                elif isinstance(piece, Turn):
                    turns[piece.call_id] = piece
                await delivery.ack()
        return list(ends.values()), list(turns.values())

    async def start(self, *arguments):
        environment = {**os.environ, "SWARMQ_INVITE": self.invite.encode(), "SWARMQ_SPOOL": str(self.folder / "spool")}
        command = [sys.executable, "-m", "swarmq", "run", *arguments]
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=self.folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def run(self, *arguments):
        process = await self.start(*arguments)
        try:
            async with asyncio.timeout(PATIENCE_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode, output.decode()


@pytest.fixture
def far(amqp_url, run_name, tmp_path):
    """`async with far() as far`."""

    @contextlib.asynccontextmanager
    async def open_far():
        policy = {"model": "x", "engine": {"urls": ["scripted://0"]}}
        job = SwarmJob.build({"run": run_name, "folder": str(tmp_path / "runs"), "policies": {"main": policy}})
        engine = ConversingEngine(url="scripted://0")
        engine.respond = lambda _prompt: "42"
        async with AmqpBroker.open(amqp_url, name="test", deadline_s=PATIENCE_S) as broker:
            await broker.declare(run_name, policies=job.policies, kinds=job.task_kinds)
            kind = job.task_kinds[0]
            for number in range(8):
                ticket = Ticket(run=run_name, ticket_id=f"t{number}", kind=kind)
                await broker.publish(topology.tickets(run_name, kind), ticket)
            async with served(create_app(job, root=ROOT, engines={"main": [engine]}, broker=broker)) as url:
                invite = Invite(
                    run=run_name,
                    client="c",
                    secret=derive_client_secret(ROOT, "c"),
                    amqp_url=amqp_url,
                    base_url=f"{url}/v1",
                    policies=("main",),
                    kinds=job.task_kinds,
                    group_size=2,
                )
                yield Far(broker, invite, tmp_path)

    return open_far


COMMAND = ("--test", "grep -q 42 answer", "--", sys.executable, "-c", AGENT)


async def test_one_task_of_the_command_line_is_a_group(far):
    async with far() as run:
        status, output = await run.run("--prompt", "What is 6 * 7?", *COMMAND)
        assert status == 0, output
        assert "2 episodes finished, 0 failed" in output
        ends, turns = await run.ends(2)
    assert [end.rewards for end in ends] == [{"main": 1.0}] * 2
    assert {call for end in ends for call in end.received} == {turn.call_id for turn in turns}
    assert len(list((run.folder / "swarmq-logs").iterdir())) == 2


async def test_a_task_file_is_evaluated(far, tmp_path):
    rows = [{"id": "a", "question": "What is 6 * 7?"}, {"id": "b", "question": "And 2 * 21?"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checks.py").write_text(
        "def score(folder, task): return float((folder / 'answer').read_text() == '42' and task['id'] == 'a')"
    )
    async with far() as run:
        arguments = ("--tasks", "tasks.jsonl", "--eval", "--prompt-field", "question", "--score", "checks:score")
        status, output = await run.run(*arguments, "--", sys.executable, "-c", AGENT)
        assert status == 0, output
        assert "reward 0.500" in output
        assert "on 2 tasks (2 episodes, 0 failed)" in output


async def test_tasks_of_the_queue_are_attempted_until_ctrl_c(far):
    async with far() as run:
        kind = run.invite.kinds[0]
        for name in ("a", "b", "c"):
            payload = msgspec.Raw(msgspec.msgpack.encode({"prompt": "hi"}))
            task = Task(run=run.invite.run, slot=Slot(task_id=name), kind=kind, group_size=1, payload=payload)
            await run.broker.publish(topology.tasks(run.invite.run, kind), task)
        process = await run.start("--queue", "--concurrency", "2", *COMMAND)
        try:
            ends, _ = await run.ends(3)
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(PATIENCE_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert [end.rewards for end in ends] == [{"main": 1.0}] * 3, [end.reason for end in ends]
    assert b"3 episodes finished" in output


DOCKER = f"""#!{sys.executable}
import os, sys
if sys.argv[1] == "run":
    image = sys.argv.index("agents:1")
    os.environ.update(part.split("=", 1) for part in sys.argv[:image] if part.startswith(("HOME=", "XDG_")))
    if sys.argv[image + 1] == "sh":
        sys.exit(125)
    os.execvp(sys.argv[image + 1], sys.argv[image + 1 :])
"""
"""A docker that runs agents where it is, and fails to start a container for their test."""


async def test_slots_that_are_given_up_are_an_error_that_says_why(far, tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with far() as run:
        status, output = await run.run(
            "--prompt", "What is 6 * 7?", "--container", "agents:1", "--max-attempts", "1", *COMMAND
        )
        ends, turns = await run.ends(2)
    assert status == 1
    assert "2 of 2 slots were given up (--max-attempts 1)" in output
    assert "2 x AgentCommandError: no container of agents:1 could be run" in output
    assert len(turns) == 2, "the agents were well"
    assert {end.status for end in ends} == {"failed"}


def test_a_task_without_a_prompt_is_refused_before_an_episode_begins(tmp_path):
    from click.testing import CliRunner

    from swarmq.cli import main

    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "question": "y"}\n')
    result = CliRunner().invoke(main, ["run", "--tasks", f"{tmp_path}/tasks.jsonl", "--test", "true", "true"])
    assert (result.exit_code, "tasks.jsonl, task 'b': the task has no text in its field 'prompt'" in result.output) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--prompt", "x", "--test", "true", "no-such-agent"), "no-such-agent: not installed, or not on PATH"),
        (("--test", "true", "true"), "give one of --prompt TEXT, --tasks DATA and --queue"),
        (("--prompt", "", "--test", "true", "true"), "--prompt is empty: give the text of the task"),
        (("--prompt", " \n", "--test", "true", "true"), "--prompt is empty: give the text of the task"),
        (("--prompt", "x", "true"), "give either --test COMMAND or --score"),
        (("--prompt", "x", "--score", "nowhere:f", "true"), "there is no module 'nowhere'"),
        (("--prompt", "x", "--test", "true", "--port", "9000", "true"), "give --concurrency 1 (got 4)"),
        (("--prompt", "x", "--test", "true", "--scored-exit", "x", "true"), "--scored-exit x"),
        (("--prompt", "x", "--test", "true", "--env", "x", "true"), "--env x: write NAME=VALUE"),
        (("--queue", "--eval", "--test", "true", "true"), "--eval: cannot be combined with --queue"),
    ],
)
def test_what_cannot_be_run_is_refused_before_an_episode_begins(arguments, why):
    from click.testing import CliRunner

    from swarmq.cli import main

    result = CliRunner().invoke(main, ["run", *arguments], terminal_width=200)
    assert result.exit_code == 1
    assert why in result.output
