"""Games on a real OpenEnv server, played by its public client against an episode's endpoint.

openenv needs other versions than the test environment has of a few packages: it gets an interpreter of its own, which finds all
others there. One program serves and plays all scenarios, because openenv takes seconds to import.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from support.clients import python_with

HERE = Path(__file__).parent / "openenv"
ROOT = Path(__file__).parents[3]
GAME = "openenv:{url}?seed=7&tasks=1"
SCENARIOS = {
    "won": (GAME, ['{"guess": 5}', '```json\n{"guess": 8}\n```', "7"]),
    "illegal": (GAME, ["seven", '{"guess": 7, "why": "luck"}', "{}", '{"guess": 7}']),
    "cut": (f"{GAME}&max_steps=2", ["1", "2", "3"]),
    "nan": (f"{GAME}&flaw=nan", ["1"]),
    "text": (f"{GAME}&flaw=text", ["1"]),
    "step": (f"{GAME}&flaw=step", ["1"]),
    "reset": (f"{GAME}&flaw=reset", []),
    "model down": (GAME, [400]),
    "nobody": ("openenv:http://127.0.0.1:1", []),
    "other server": ("openenv:{url}/health", []),
}


@pytest.fixture(scope="module")
def played():
    """What became of every scenario."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", HERE)))
    done = subprocess.run(
        [python_with("openenv", HERE / "requirements.txt"), HERE / "driver.py"],
        input=json.dumps(SCENARIOS),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_observations_are_asked_and_answers_become_actions_until_the_game_ends(played):
    done = played["won"]
    assert done["reward"] == -0.25 - 0.25 + 1.0
    assert done["metrics"] == {"steps": 3, "illegal_actions": 0, "done": 1.0}
    system, first = done["asked"][0]["messages"]
    assert '"guess": {"title": "Guess", "type": "integer"}' in system["content"]
    assert first["content"] == "Guess a number below 10."
    assert [body["messages"][-1]["content"] for body in done["asked"][1:]] == ["higher", "lower"]


def test_an_answer_that_fits_no_action_is_told_to_the_model_and_counted(played):
    done = played["illegal"]
    assert (done["reward"], done["metrics"]) == (1.0, {"steps": 1, "illegal_actions": 3, "done": 1.0})
    assert [body["messages"][-1]["content"] for body in done["asked"][1:]] == [
        "Illegal action: $.guess: 'seven' is not of type 'integer'",
        "Illegal action: $: Additional properties are not allowed ('why' was unexpected)",
        "Illegal action: $: 'guess' is a required property",
    ]


def test_a_game_is_cut_at_its_limit(played):
    done = played["cut"]
    assert (done["reward"], done["metrics"]) == (-0.5, {"steps": 2, "illegal_actions": 0, "done": 0.0})


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("nan", "OutcomeError", "ended after step 1 without a reward: none of its steps had a finite one"),
        ("text", "RolloutError", "Server error: Invalid message"),
        ("step", "RolloutError", "Server error: the sandbox is gone"),
        ("reset", "RolloutError", "Server error: no sandbox is left"),
        ("model down", "EpisodeError", "scripted 400"),
        ("nobody", "TaskError", "no OpenEnv server answers there: URLError: .*Connection refused"),
        ("other server", "TaskError", "no OpenEnv server answers there: HTTPError: HTTP Error 404: Not Found"),
    ],
)
def test_what_breaks_is_an_error_and_never_a_reward(played, name, kind, says):
    assert played[name]["error"][0] == kind, played[name]
    assert re.search(says, played[name]["error"][1]), played[name]["error"][1]
