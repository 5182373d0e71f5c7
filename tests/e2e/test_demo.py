"""`swarmq demo` from the command line, with a barely warmed model, until the client with the other reward has been trained on."""

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from swarmq.config import RunFolder
from swarmq.demo.client import read_ledger
from swarmq.demo.run import DemoResult
from swarmq.event_fields import undescribed
from swarmq.observe.curves import read_events

pytestmark = [pytest.mark.broker, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 20
"""The kill is half-way; the learner goes on until the test has seen what it wants to see."""
SETTINGS = (
    "policies.main.train.max_steps=1000000",
    "policies.main.train.advantage=ema",  # a model that is never right gives groups of equal rewards
    "policies.main.train.checkpoint_every=5",
    "groups.group_size=2",
    "groups.groups_per_batch=4",
)


def make_model(cache: Path) -> Path:
    """What an earlier demo would have left in its cache, after a few steps of warm-up instead of hundreds."""
    from swarmq.demo.model_recipe import DemoRecipe, model_folder
    from swarmq.demo.warmup import warm_up
    from swarmq.toy_model.network import save

    folder = model_folder(cache, DemoRecipe())
    words, model = warm_up(DemoRecipe(steps=6, settling_steps=2, batch=8, rise=2), report=lambda _: None)
    save(model, words, folder)
    return folder


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def trained_code(folder: RunFolder) -> dict[str, int]:
    """Client code whose episodes have been trained -> version after the newest step with them."""
    if not folder.events.exists():
        return {}
    steps = [event.fields for event in read_events(folder.events) if event.name == "step"]
    return {code: step["version"] for step in steps for code in step.get("code_versions", {})}


def test_a_client_is_killed_another_reward_takes_over_and_every_episode_is_accounted_for(tmp_path):
    cache = tmp_path / "cache" / "swarmq" / "demo-models"
    made = times(make_model(cache))
    folder, log = RunFolder(tmp_path / "runs" / "demo"), tmp_path / "demo.log"
    environment = {key: value for key, value in os.environ.items() if key != "SWARMQ_AMQP_URL"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def swarmq(*arguments: str) -> subprocess.Popen:
        with log.open("ab") as sink:
            command = [sys.executable, "-m", "swarmq", *arguments]
            return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=sink, stderr=sink)

    sets = itertools.chain.from_iterable(("--set", setting) for setting in SETTINGS)
    demo = swarmq("demo", "--plain", "--steps", str(STEPS), *sets)
    try:
        while "reward-concise" not in trained_code(folder):  # the test's own deadline ends this
            assert demo.poll() is None, log.read_text()
            time.sleep(0.2)
        margin = 8
        while swarmq(
            "stop", str(folder.path), "--after", str(max(STEPS, *trained_code(folder).values()) + margin)
        ).wait():
            assert demo.poll() is None, log.read_text()
            margin *= 2  # the step was over before it was said to be the last
        assert demo.wait(1200) == 0, log.read_text()
    finally:
        demo.terminate()
        demo.wait()

    said = log.read_text()
    told = (
        "client a joins",
        "client b joins",
        "killing client a with SIGKILL",
        "client c joins with the concise reward",
    )
    assert sorted(told, key=said.index) == list(told)
    assert re.search(r"step 2: reward \d\.\d{3}, \d+ episodes", said)
    assert "warm-up step" not in said, "a model that is there is not made again"
    assert times(next(cache.iterdir())) == made

    result = msgspec.json.decode((folder.path / "result.json").read_bytes(), type=DemoResult)
    assert (result.account.lost, result.account.twice) == ((), ())
    assert re.search(r"lost\W+0\b", said)
    assert re.search(r"trained twice\W+0\b", said)
    assert result.steps >= STEPS
    assert result.account.trained >= STEPS
    assert set(result.held_out) == {0, result.steps}
    assert any(entry.reward is not None for entry in read_ledger(folder.path / "ledger-c.jsonl"))
    assert set().union(*map(undescribed, read_events(folder.events))) == set(), "docs have every field"
    assert (folder.path / "reward.png").read_bytes().startswith(b"\x89PNG")
