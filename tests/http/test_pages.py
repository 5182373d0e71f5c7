"""What the pages show in Python runs as it stands: with OpenAI's library, through the proxy, on a scripted model."""

import asyncio
import contextlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.proxy import ROOT, served
from swarmq import SwarmClient, keys
from swarmq.broker import topology
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.config import SwarmJob
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, Turn, decode
from swarmq.proxy.http.app import create_app
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

PAGES = Path(__file__).parents[2]
HOW_TO = PAGES / "docs/how-to"
CLIENT, README = PAGES / "docs/reference/client.md", PAGES / "README.md"
RUN = "r1"
pytestmark = pytest.mark.timeout(120)


class Knows(ScriptedEngine):
    """Gives the same answer to everything."""

    def __init__(self, answer="42"):
        super().__init__()
        self.answer = answer

    def generate(self, *asked, **how):
        self.say(self.answer)
        return super().generate(*asked, **how)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@contextlib.asynccontextmanager
async def run_of(*policies, answer="42"):
    """A run in this process: its job, its invite, and a function that gives the pieces that its queue has got."""
    job = SwarmJob.build(
        {"run": RUN, "groups": {"group_size": 2}, "policies": {name: {"model": "x"} for name in policies}}
    )
    broker = MemoryBroker()
    await broker.declare(RUN, policies=policies, kinds=["default"])
    for number in range(100):
        ticket = Ticket(run=RUN, ticket_id=f"ticket-{number}", kind="default")
        await broker.publish(topology.tickets(RUN, "default"), ticket)
    engines = {name: [Knows(answer)] for name in policies}
    async with served(create_app(job, root=ROOT, engines=engines, broker=broker)) as url:
        invite = keys.Invite(
            run=RUN,
            client="alice",
            secret=keys.derive_client_secret(ROOT, "alice"),
            amqp_url="",
            base_url=f"{url}/v1",
            policies=policies,
            kinds=("default",),
            group_size=2,
        )

        def pieces(kind):
            return [p for one in broker.stored(topology.inbox(RUN)) if isinstance(p := decode(one.body), kind)]

        yield job, invite, pieces


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_the_page_of_the_client_is_one_program_and_its_calls_are_credited(openai, monkeypatch, tmp_path, capsys):
    names = {"__name__": "client_page"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path / "spool"))
    async with run_of("planner", "executor") as (job, invite, pieces):
        (tmp_path / "job.toml").write_text(job.to_toml())
        monkeypatch.setenv("SWARMQ_INVITE", invite.encode())
        await run_in_thread(lambda: exec(compile("\n\n".join(blocks(CLIENT, "python")), CLIENT, "exec"), names))
        await run_in_thread(lambda: asyncio.run(names["main"]()))
        ends, turns = pieces(EpisodeEnd), {turn.call_id: turn for turn in pieces(Turn)}
    said = capsys.readouterr().out
    for printed in (
        "8 episodes finished, 0 failed, 0 slots given up, mean reward 1.000",
        "reward 1.000 ± 0.000 on 2 tasks (8 episodes, 0 failed)",
    ):
        assert printed in CLIENT.read_text()
        assert printed in said
    assert Counter(begin.mode for begin in pieces(EpisodeBegin)) == {"train": 25, "eval": 8}
    assert [end.rewards for end in ends] == [{"planner": 1.0, "executor": 1.0}] * 33
    by_call = [call for end in ends for call in end.call_rewards]
    assert [turns[call].policy for call in by_call] == ["planner"] * 4
    tagged = {(turn.episode_id, turn.policy, turn.agent) for turn in turns.values() if turn.agent}
    assert {
        (end.episode_id, policy, tag) for end in ends for policy, tags in end.agent_rewards.items() for tag in tags
    } == tagged


async def test_the_first_program_of_the_readme_trains(tmp_path):
    (program,) = blocks(README, "python")
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "runs" / "math").mkdir(parents=True)
    async with run_of("main") as (_, invite, pieces):
        (tmp_path / "runs" / "math" / "invite").write_text(invite.encode())
        program = await asyncio.create_subprocess_exec(sys.executable, "train.py", cwd=tmp_path)
        assert await program.wait() == 0
        assert [end.rewards for end in pieces(EpisodeEnd)] == [{"main": 1.0}] * 2


VERL_ROW = {
    "prompt": [{"role": "user", "content": "6 * 7?"}],
    "data_source": "sums",
    "reward_model": {"ground_truth": "42"},
}


@pytest.mark.parametrize(
    ("page", "answer", "payload", "reward", "metrics"),
    [
        ("first-agent", "Answer: 42.", {"answer": 42}, 1.0, {"characters": 11.0}),
        ("first-agent", "Answer: 41", {"answer": 42}, 0.1, {"characters": 10.0}),
        ("first-agent", "no idea", {"answer": 42}, 0.0, {"characters": 7.0}),
        ("move-from-trl", "it is 42", {"answer": "42"}, 1.0, {}),
        ("move-from-verl", "it is 42", VERL_ROW, 1.0, {}),
        ("move-from-verifiers", "Answer: 42", {"answer": "42"}, 1.2, {"correct": 1.0, "format": 1.0}),
        ("move-from-verifiers", "on and on", {"answer": "42"}, 0.0, {"correct": 0.0, "format": 0.0}),
    ],
)
async def test_the_agents_of_the_how_to_pages_earn_their_rewards(
    openai, monkeypatch, tmp_path, page, answer, payload, reward, metrics
):
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path / "spool"))
    (source,) = (text for text in blocks(HOW_TO / f"{page}.md", "python") if "def attempt" in text)
    names = {"__name__": "agent"}
    exec(compile(source, f"{page}.md", "exec"), names)
    task = {"id": "a", "question": "What is 6 * 7?"} | payload
    async with run_of("main", answer=answer) as (_, invite, pieces):

        def attempt_all():
            with SwarmClient(invite.encode()) as client:
                client.run_episodes_until_all_complete([task], names["attempt"], progress=False, auto_retry=False)

        await run_in_thread(attempt_all)
        ends = pieces(EpisodeEnd)
    assert [end.rewards["main"] for end in ends] == [pytest.approx(reward)] * 2
    assert [end.metrics for end in ends] == [metrics] * 2


def test_the_rewards_of_the_page_on_hacking_pay_for_what_they_say():
    names = {}
    for source in blocks(HOW_TO / "reward-hacking.md", "python"):
        exec(source, names)
    outcome = names["reward"]("Answer: 42", right=True, used_tool=True)
    assert (outcome.reward, outcome.metrics) == (pytest.approx(1.1), {"right": 1.0, "format": 1.0, "tool": 1.0})
    assert names["checked"]("the answer is 42", 1.0) == 1.0
    assert names["checked"]("again and " * 40, 1.0) == 0.0
