"""Rollouts of the real `verifiers` against an episode's endpoint: its tasks, harness, tools and rewards.

verifiers needs other versions than the test environment has of a few packages: it gets an interpreter of its own, which finds all
others there. One program plays all scenarios, because verifiers takes seconds to import. verifiers' programs for agents run as they
are; only `uv`, which would download their packages once more, is replaced.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from support.clients import python_with

HERE = Path(__file__).parent / "verifiers"
ROOT = Path(__file__).parents[3]
UV = """#!/bin/sh
case "$*" in *--help) echo --script;; "python find"*) echo {python};; esac
"""
SUMS = "verifiers:vf_sums"
DIRECT = f"{SUMS}?env.agent.harness.id=vf-direct"
BEST = f"{DIRECT}&env.id=best-of-n&env.n=2"
FROZEN = "env.user.model=frozen"
CALL = {"name": "calculator_add", "arguments": '{"a": 3, "b": 3}'}
SCENARIOS = {
    "single turn": (SUMS, ["6"]),
    "tools": (f"{SUMS}?task.tool=true", [CALL, "It is 6, as the calculator says."]),
    "user": (f"{SUMS}?env.id=user-sim&{FROZEN}", ["What is 3 + 3?", "6", "###DONE###"]),
    "user that would be trained": (f"{SUMS}?env.id=user-sim", ["###DONE###"]),
    "equal group": (BEST, ["6", "6"]),
    "unequal group": (BEST, ["6", "7"]),
    "nan": (f"{DIRECT}&task.flaw=nan", ["6"]),
    "text": (f"{DIRECT}&task.flaw=text", ["6"]),
    "raises": (f"{DIRECT}&task.flaw=raises", ["6"]),
    "model down": (DIRECT, [400]),
    "unknown": ("verifiers:no-such-sums", []),
    "broken": ("verifiers:vf_broken", []),
    "offline": (f"{SUMS}?offline=true", []),
    "container": (f"{SUMS}?env.agent.harness.id=codex", []),
    "harbor": ('verifiers:harbor?dataset=org/name&tasks=["a"]&env.agent.runtime.type=docker', []),
    "setting": (f"{SUMS}?colour=red", []),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What became of every scenario."""
    python = python_with("verifiers", HERE / "requirements.txt")
    home = tmp_path_factory.mktemp("home")
    uv = home / ".local/bin/uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV.format(python=python))
    uv.chmod(0o755)
    (home / "vf_broken.py").write_text("import a_package_that_is_missing\n")
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", HERE)))
    done = subprocess.run(
        [python, HERE / "driver.py"],
        input=json.dumps(SCENARIOS),
        env={**os.environ, "HOME": str(home), "PYTHONPATH": path},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_single_turn_is_asked_and_scored_by_verifiers_and_its_parts_are_metrics(played):
    done = played["single turn"]
    [asked] = done["asked"]
    assert (asked["model"], asked["key"], asked["agent"]) == ("main", "key", None)
    assert asked["messages"] == [{"role": "user", "content": "What is 3 + 3?"}]
    assert done["reward"] == 1.0 + 0.5 * 1.0
    assert done["metrics"] == {"right": 1.0, "short": 1.0, "letters": 1.0, "turns": 1, "truncated": 0.0}


def test_tools_are_served_and_called_over_several_turns(played):
    done = played["tools"]
    first, second = done["asked"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["calculator_add"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == "6"
    assert done["metrics"] == {"right": 0.0, "short": 0.0, "letters": 32.0, "turns": 2, "truncated": 0.0}
    assert done["reward"] == 0.0


def test_a_conversation_with_a_modelled_user_credits_only_the_agent_that_is_trained(played):
    done = played["user"]
    asked = [(body["agent"], body["model"]) for body in done["asked"]]
    assert asked == [("user", "frozen"), ("assistant", "main"), ("user", "frozen")]
    assert done["agent_rewards"] == {"main": {"assistant": 1.5}}
    assert (done["metrics"]["assistant.right"], done["metrics"]["user.turns"]) == (1.0, 2)
    assert_failed(played["user that would be trained"], "OutcomeError", "name a frozen policy .* env.user.model=NAME")


def test_attempts_that_verifiers_compares_are_one_episode_if_they_earned_the_same(played):
    done = played["equal group"]
    assert (done["reward"], done["agent_rewards"], len(done["asked"])) == (1.5, {}, 2)
    assert (done["metrics"]["best"], done["metrics"]["pass_at_n"]) == (1.0, 1.0)
    assert_failed(played["unequal group"], "OutcomeError", r"different rewards \(1.5, 0.5\).*groups.group_size")


def test_what_breaks_in_a_rollout_is_an_error_and_never_a_reward(played):
    assert_failed(played["nan"], "OutcomeError", "reward 'right' of verifiers:vf_sums is nan")
    assert_failed(played["text"], "OutcomeError", "could not convert string to float: 'very good'.*a finite number")
    assert_failed(played["raises"], "RolloutError", "OSError: the checker is down")
    assert_failed(played["model down"], "RolloutError", "upstream 400")


def test_what_cannot_be_loaded_or_read_is_one_line_that_names_the_cause(played):
    """None of them began an episode."""
    for name, says in {
        "unknown": "taskset 'no-such-sums' not found .*because: ModuleNotFoundError: No module named 'no_such_sums'",
        "broken": "because: ModuleNotFoundError: No module named 'a_package_that_is_missing'",
        "offline": "its tasks cannot be read: ConnectionError: no route to huggingface.co while sums were downloaded",
        "container": "needs a container: add env.agent.runtime.type=docker, or env.agent.harness.id=null",
        "harbor": "its tasks cannot be read: RuntimeError: Harbor tasksets require the Harbor CLI from the `harbor` extra",
        "setting": "taskset.colour Extra inputs are not permitted",
    }.items():
        assert_failed(played[name], "TaskError", says)
        assert "\n" not in played[name]["error"][1]
        assert not played[name]["asked"]


def assert_failed(done, kind, says):
    assert done["error"][0] == kind, done
    assert re.search(says, done["error"][1]), done["error"][1]
