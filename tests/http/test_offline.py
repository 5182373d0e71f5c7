"""`swarmq train --offline`: the agent meets the real client and proxy, and is told what was asked, answered and missing."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from swarmq.cli import main
from swarmq.offline.run import describe_calls

AGENT = """
import openai

def attempt(ep):
    client = openai.OpenAI(base_url=ep.base_url, api_key=ep.api_key)
    asked = [{"role": "user", "content": ep.payload["question"]}]
    answer = client.chat.completions.create(model=ep.model, messages=asked, max_tokens=2).choices[0].message
    if ep.payload.get("then"):
        asked += [answer, {"role": "user", "content": ep.payload["then"]}]
        stream = client.chat.completions.create(model=ep.model, messages=asked, stream=True)
        return float("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    return {"4": 1.0}[answer.content]
"""


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"agent_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(AGENT)
    (tmp_path / "job.toml").write_text('run = "off"\n[policies.main]\nmodel = "nowhere"\n')

    def run(answers, tasks=None):
        (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
        if tasks:
            (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
        found = CliRunner().invoke(
            main, ["train", "job.toml", "--agent", f"{name}:attempt", "--offline", "answers.jsonl"]
        )
        assert not (tmp_path / "runs").exists()
        return found.exit_code, found.output

    return run


def test_calls_and_rewards_of_every_episode_are_shown(offline):
    long = "a long answer of many tokens, of which max_tokens cuts off none"
    chat = [user("q"), {"role": "assistant", "content": long}, user("sure?"), {"role": "assistant", "content": "0.5"}]
    status, shown = offline(
        [{"messages": [user("2 + 2?")], "answer": "4"}, {"messages": chat}],
        [{"id": "sum", "question": "2 + 2?"}, {"id": "talk", "question": "q", "then": "sure?"}],
    )
    assert status == 0, shown
    first, second = shown.split("task talk (2 of 2)")
    assert [line.strip() for line in first.splitlines() if line] == [
        "task sum (1 of 2)", "user: 2 + 2?", "call 1: 4", "reward main 1",
    ]  # fmt: skip
    assert f"call 1: {long}" in second
    assert "user: sure?\n  call 2: 0.5\n  reward main 0.5" in second
    assert "2 episodes finished, 0 failed" in second


def test_an_exception_is_shown_with_its_line_once_and_a_script_answers_whatever_is_asked(offline):
    status, shown = offline([{"task": {"id": name, "question": name}, "answers": ["5"]} for name in ("a", "b")])
    assert status == 1
    assert shown.count("KeyError: '5'\n") == 1, shown
    assert 'return {"4": 1.0}[answer.content]' in shown
    assert ".py:12" in shown.split("as before, KeyError at")[1]


def test_what_was_not_recorded_is_refused_with_the_nearest_prompt(offline):
    status, shown = offline([{"messages": [user("2 + 2?")], "answer": "4"}], [{"id": "t", "question": "2 + 3?"}])
    assert status == 1
    assert "asked:    user: 2 + 3?\n  recorded: user: 2 + 2?" in shown, shown
    assert "failed: NotFoundError at" in shown
    assert "after a call without an answer" in shown
    assert "Traceback" not in shown


def test_a_script_that_is_too_short_is_said(offline):
    task = {"id": "t", "question": "q", "then": "more"}
    status, shown = offline([{"task": task, "answers": ["5"]}])
    assert status == 1
    assert "has 1 answer for task 't', and the agent asked once more" in shown, shown


def test_an_answer_that_an_agent_sends_back_is_shown_once_and_one_that_it_changes_again():
    def message(role, content=None, arguments=None):
        called = [{"function": {"name": "find", "arguments": arguments}}] if arguments else []
        return {"role": role, "content": content, "tool_calls": called}

    def turn(*messages):
        return SimpleNamespace(messages=json.dumps(messages).encode())

    answer = message("assistant", arguments='{"item": "drum"}')
    sent_back = message("assistant", "", '{"item":"drum"}')
    changed = message("assistant", arguments='{"item": "rope"}')
    assert list(
        describe_calls(
            [
                turn(user("bring it"), answer),
                turn(sent_back, message("tool", "a1"), answer),
                turn(changed, message("tool", "a2"), message("assistant", "done")),
            ]
        )
    ) == [
        "  user: bring it",
        '  call 1: -> find({"item": "drum"})',
        "  tool: a1",
        '  call 2: -> find({"item": "drum"})',
        '  assistant: -> find({"item": "rope"})',
        "  tool: a2",
        "  call 3: done",
    ]


def test_without_an_agent_named_attempt_of_agent_py_is_the_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not Path(one, "agent.py").exists()])
    (tmp_path / "job.toml").write_text('run = "off"\n[policies.main]\nmodel = "nowhere"\n')
    (tmp_path / "answers.jsonl").write_text('{"task": {"id": "t", "question": "2 + 2?"}, "answers": ["4"]}')
    command = ["train", "job.toml", "--offline", "answers.jsonl"]
    refused = CliRunner().invoke(main, command)
    assert (refused.exit_code, "'agent:attempt': there is no module 'agent' in" in refused.output) == (1, True)
    (tmp_path / "agent.py").write_text(AGENT)
    importlib.invalidate_caches()
    found = CliRunner().invoke(main, command)
    sys.modules.pop("agent")
    assert (found.exit_code, "1 episode finished, 0 failed" in found.output) == (0, True), found.output
