"""docs/client.md is one program, and runs as it stands: with OpenAI's library, through the proxy, on a scripted model."""

import asyncio
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from support.proxy import ROOT, served
from swarmq import keys
from swarmq.broker import topology
from swarmq.client.loops import in_thread
from swarmq.config import SwarmJob
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, Turn, decode
from swarmq.proxy.app import create_app
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
RUN, POLICIES = "r1", ("planner", "executor")
INVITE = keys.Invite(
    run=RUN,
    client="alice",
    secret=keys.client_secret(ROOT, "alice"),
    amqp_url="",
    base_url="",
    policies=POLICIES,
    kinds=("default",),
    group_size=2,
)


class Knows(ScriptedEngine):
    """Answers everything with 42."""

    def generate(self, *asked, **how):
        self.say("42")
        return super().generate(*asked, **how)


@pytest.fixture
def program():
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_the_page_runs_as_it_stands_and_its_calls_are_credited(program, openai, monkeypatch, tmp_path, capsys):
    job = SwarmJob.build(
        {"run": RUN, "groups": {"group_size": 2}, "policies": {name: {"model": "x"} for name in POLICIES}}
    )
    (tmp_path / "job.toml").write_text(job.to_toml())
    broker, names = MemoryBroker(), {"__name__": "client_page"}
    await broker.declare(RUN, policies=POLICIES, kinds=["default"])
    for number in range(100):
        ticket = Ticket(run=RUN, ticket_id=f"ticket-{number}", kind="default")
        await broker.publish(topology.tickets(RUN, "default"), ticket)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path / "spool"))
    engines = {name: [Knows()] for name in POLICIES}
    async with served(create_app(job, root=ROOT, engines=engines, broker=broker)) as url:
        invite = msgspec.structs.replace(INVITE, base_url=f"{url}/v1")
        monkeypatch.setenv("SWARMQ_INVITE", invite.encode())
        await in_thread(lambda: exec(compile(program, PAGE, "exec"), names))
        await in_thread(lambda: asyncio.run(names["main"]()))
    said = capsys.readouterr().out
    for printed in (
        "8 episodes finished, 0 failed, 0 slots given up, mean reward 1.000",
        "on 2 tasks (8 episodes, 0 failed)",
    ):
        assert printed in PAGE.read_text()
        assert printed in said
    pieces = [decode(one.body) for one in broker.stored(topology.inbox(RUN))]
    ends = [piece for piece in pieces if isinstance(piece, EpisodeEnd)]
    assert Counter(piece.mode for piece in pieces if isinstance(piece, EpisodeBegin)) == {"train": 25, "eval": 8}
    assert [end.rewards for end in ends] == [dict.fromkeys(POLICIES, 1.0)] * 33
    by_call = {call: reward for end in ends for call, reward in end.call_rewards.items()}
    turns = {turn.call_id: turn for turn in pieces if isinstance(turn, Turn)}
    assert len(by_call) == 4
    assert {turns[call].policy for call in by_call} == {"planner"}
    tagged = {(turn.episode_id, turn.policy, turn.agent) for turn in turns.values() if turn.agent}
    assert {
        (end.episode_id, policy, tag) for end in ends for policy, tags in end.agent_rewards.items() for tag in tags
    } == tagged
