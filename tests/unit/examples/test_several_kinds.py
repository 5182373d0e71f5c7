"""Agents, demonstrations and manifest of examples/several_kinds."""

import importlib
import itertools
import random
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken
from swarmq.config import SwarmJob

pytest.importorskip("openai")
from examples.retrieval import environment as facts
from examples.several_kinds import agent, demonstrations
from examples.shell_sandbox import environment as files
from examples.tool_api import environment as apps

FOLDER = Path(__file__).parents[3] / "examples" / "several_kinds"
MANIFEST = tomllib.loads((FOLDER / "example.toml").read_text())
TOOLS = {"facts": facts.TOOLS, "files": files.TOOLS, "apps": apps.TOOLS}


def load(target):
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["job.toml", "job_h200.toml"])
def test_every_kind_of_the_job_has_tasks_and_an_agent(name):
    job = SwarmJob.load(FOLDER / name)
    assert sum(job.mix.values()) == pytest.approx(1.0)
    for part in ("feeds", "held_out", "agents"):
        assert MANIFEST[part].keys() == job.mix.keys()


def test_no_task_is_in_two_feeds_or_splits():
    targets = [*MANIFEST["feeds"].values(), *MANIFEST["held_out"].values()]
    ids = Counter((target.partition(".environment")[0], task["id"]) for target in targets for task in load(target)())
    assert max(ids.values()) == 1
    assert len(set(targets)) == 6


@pytest.mark.parametrize("stream", [demonstrations.demonstrations, demonstrations.copying])
def test_demonstrations_come_in_equal_shares_with_the_tools_of_their_kind(stream):
    chats = list(itertools.islice(stream(random.Random(0)), 300))
    kinds = Counter(chat["tools"][0]["function"]["name"] for chat in chats)
    assert all(70 < count < 130 for count in kinds.values())
    assert kinds.keys() == {tools[0]["function"]["name"] for tools in TOOLS.values()}
    for chat in chats:
        offered = {tool["function"]["name"] for tool in chat["tools"]}
        calls = [call for message in chat["messages"] for call in message.get("tool_calls") or ()]
        assert {call["function"]["name"] for call in calls} <= offered


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", TOOLS)
def test_each_agent_plays_its_own_kind(kind):
    task = next(iter(load(MANIFEST["held_out"][kind])()))
    with scripted_chat(["<answer>nobody</answer>"]) as chat:
        outcome = getattr(agent, kind)(chat.episode(task))
    assert outcome.reward == 0.0
    assert chat.requests[0]["tools"] == TOOLS[kind]
    assert MANIFEST["agents"][kind] == f"agent:{kind}"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_demonstrations_replay_in_the_agent_of_their_kind():
    shown = next(chat for chat in demonstrations.copying(random.Random(3)) if chat["tools"] == facts.TOOLS)
    task = {"size": "toy", "question": shown["messages"][1]["content"], "answer": "?"}
    with scripted_chat(answers_of(shown["messages"])) as chat:
        agent.facts(chat.episode(task))
    assert chat.conversation()[:2] == spoken(shown["messages"][:2])
