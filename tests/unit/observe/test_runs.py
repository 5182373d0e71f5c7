"""The list of runs says of each whether it is up, how far it came and when."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from swarmq.cli import main
from swarmq.collector.decide.effects import SaveControl
from swarmq.collector.store import Store
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Change, Control, Event
from swarmq.observe.runs import format_age, list_runs


def made(folder: Path, run: str, *steps: tuple[int, float | None], control: Control | None = None) -> RunFolder:
    """A run that was started at second 50 and made these steps, one a second from 100 on."""
    job = SwarmJob.build({"run": run, "folder": str(folder), "policies": {"main": {"model": "m"}}})
    files = job.run_folder
    files.path.mkdir(parents=True)
    files.resolved.write_text(job.to_toml())
    os.utime(files.resolved, (50, 50))
    events = [
        Event(run=run, source="learner.main", name="step", at=100.0 + step, fields={"version": step, "reward": reward})
        for step, reward in steps
    ]
    other = Event(run=run, source="collector", name="state", at=999.0)
    files.events.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in (*events, other)))
    if control:
        store = Store(files.inbox, run=run)
        with store.transaction():
            store.write(SaveControl(msgspec.msgpack.encode(control)))
        store.close()
    return files


def test_each_run_has_its_state_its_newest_step_and_its_reward_the_newest_first(tmp_path: Path) -> None:
    made(tmp_path, "old", (1, 0.25), (2, -0.5))
    up = made(tmp_path, "new", (1, 0.5), (2, 0.5), (3, 0.75), control=Control(run="new", number=1, pace="paused"))
    made(tmp_path, "empty")
    last = Change(number=1, path="policies.main.train.max_steps", before=0, value=1, base=0)
    made(tmp_path, "over", (1, None), control=Control(run="over", number=1, changes=(last,)))
    (tmp_path / "no-run").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "resolved.toml").write_text("run = ")
    os.utime(tmp_path / "broken" / "resolved.toml", (1, 1))
    with up.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rows = list_runs(tmp_path)
    assert [(row.run, row.state, row.at) for row in rows[:4]] == [
        ("new", "up, paused", 103.0),
        ("old", "stopped", 102.0),
        ("over", "stopped, ended", 101.0),
        ("empty", "stopped", 50.0),
    ]
    assert [(row.policies["main"].step, row.policies["main"].reward) for row in rows[:4]] == [
        (3, 0.75),
        (2, -0.5),
        (1, None),
        (0, None),
    ]
    assert "not TOML" in rows[4].state


def test_a_run_whose_parts_were_started_by_hand_is_up_while_its_learner_is(tmp_path: Path) -> None:
    files = made(tmp_path, "parts")
    lock = files.path / "main" / "lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert list_runs(tmp_path)[0].state == "up"
    assert list_runs(tmp_path)[0].state == "stopped"


def test_the_command_prints_a_table_or_an_object_a_line(tmp_path: Path) -> None:
    made(tmp_path, "math", (1, 0.25), (12, -0.125))
    listed = CliRunner().invoke(main, ["runs", str(tmp_path)])
    assert listed.exit_code == 0
    heading, row = listed.output.splitlines()
    assert heading.split() == ["run", "state", "step", "reward", "newest", "step"]
    assert row.split()[:4] == ["math", "stopped", "12", "-0.125"]
    assert row.rstrip().endswith(" d ago")
    (line,) = CliRunner().invoke(main, ["runs", str(tmp_path), "--json"]).output.splitlines()
    data = msgspec.json.decode(line)
    assert data["policies"] == {"main": {"step": 12, "reward": -0.125, "at": 112.0}}
    (tmp_path / "none").mkdir()
    assert "no runs in" in CliRunner().invoke(main, ["runs", str(tmp_path / "none")]).output


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    made(tmp_path, "whole", (1, 0.5))
    broken = made(tmp_path, "broken").events
    broken.unlink()
    broken.mkdir()  # cannot be read, whoever runs this test
    states = {row.run: row.state for row in list_runs(tmp_path)}
    assert states["whole"] == "stopped"
    assert "events.jsonl: cannot be read" in states["broken"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: there is no such folder"):
        list_runs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 s"), (1, "1 s"), (119, "119 s"), (150, "2 min"), (9000, "2 h"), (250_000, "3 d")]
)
def test_an_age_is_told_in_one_unit(seconds: float, words: str) -> None:
    assert format_age(seconds) == words
