"""`swarmq feed` and `swarmq worker` with environments."""

import contextlib

import pytest
from click.testing import CliRunner

from swarmq import cli
from swarmq.broker import topology
from swarmq.messages import decode
from swarmq.testing import MemoryBroker

pytest.importorskip("gymnasium")
LAKE = "gymnasium:FrozenLake-v1?tasks=3&eval_tasks=2"
JOB = 'run = "r"\n[policies.main]\nmodel = "m"\n[groups]\ngroup_size = 2\n[mix]\nlake = 1\n'


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "resolved.toml").write_text(f'folder = "{tmp_path / "runs"}"\n{JOB}')
    (folder / "secret").write_bytes(b"s" * 32)
    return folder


@pytest.fixture
def broker(monkeypatch):
    broker = MemoryBroker()

    @contextlib.asynccontextmanager
    async def broker_of(_job, _name):
        await broker.declare("r", policies=["main"], kinds=["lake"])
        yield broker

    monkeypatch.setattr("swarmq.observe.feeding.open_broker", broker_of)
    return broker


def swarmq(*words):
    return CliRunner().invoke(cli.main, list(map(str, words)))


def test_feed_takes_the_training_tasks_of_an_environment(folder, broker):
    done = swarmq("feed", folder, f"lake={LAKE}")
    assert done.output == "published 6 slots\n", done.output
    tasks = [decode(stored.body) for stored in broker.stored(topology.tasks("r", "lake"))]
    assert [task.slot.task_id.rpartition(":")[2] for task in tasks] == [
        f"FrozenLake-v1-{n}" for n in (0, 0, 1, 1, 2, 2)
    ]


def test_two_kinds_for_one_data_set_are_refused(folder, broker):
    done = swarmq("feed", folder, f"lake={LAKE}", "--kind", "sea")
    assert done.exit_code
    assert "names kind 'lake', and --kind names 'sea'" in done.output


@pytest.mark.parametrize("command", ["feed", "worker"])
def test_an_environment_that_cannot_be_made_is_one_line_before_anything_begins(folder, broker, command):
    words = ("feed", folder) if command == "feed" else ("worker", "--invite", folder)
    done = swarmq(*words, "gymnasium:NoSuch-v1")
    assert done.exit_code
    [line] = done.output.strip().splitlines()
    assert "gymnasium:NoSuch-v1: cannot be made: NameNotFound" in line
