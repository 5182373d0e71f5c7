"""What `swarmq train` lacks is said before anything starts."""

import pytest

from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, TaskError
from swarmq.whole_run.plan import assign_kinds, make_plan


def job(*kinds):
    mix = {kind: 1 / len(kinds) for kind in kinds}
    return SwarmJob.build({"run": "r", "mix": mix, "policies": {"main": {"model": "m"}}})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan_agent.py").write_text("def attempt(ep): return 1.0\ndef other(ep): return 0.0\n")
    (tmp_path / "plan_order.py").write_text(
        "def back(tasks, epoch): return range(len(tasks))[::-1]\ndef few(*_): return []\n"
    )
    for name in ("tasks", "more"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"id": "{name}"}}\n')
    return tmp_path


def plan(folder, *kinds, agents=("plan_agent:attempt",), tasks=(), held_out=(), curricula=()):
    return make_plan(job(*kinds), agents, tasks, held_out, curricula, beside=folder / "tasks.jsonl", concurrency=4)


def names(data):
    return {kind: [task.id for task in one.tasks] for kind, one in data.items()}


def test_one_agent_and_the_tasks_beside_the_job_are_for_all_kinds(folder):
    found = plan(folder, "math", "code")
    assert set(found.agents) == {"math", "code"}
    assert names(found.tasks) == {"math": ["tasks"], "code": ["tasks"]}
    assert found.held_out == {}


def test_each_kind_may_have_its_own(folder):
    found = plan(
        folder, "math", "code",
        agents=("math=plan_agent:attempt", "code=plan_agent:other"), tasks=("code=more.jsonl",), held_out=("math=more.jsonl",),
    )  # fmt: skip
    assert {kind: function(None) for kind, function in found.agents.items()} == {"math": 1.0, "code": 0.0}
    assert names(found.tasks) == {"math": ["tasks"], "code": ["more"]}
    assert names(found.held_out) == {"math": ["more"]}


def test_a_curriculum_orders_the_tasks_of_a_kind_and_a_wrong_one_is_refused(folder):
    found = plan(folder, "math", "code", curricula=("code=plan_order:back",))
    assert {kind: data.curriculum for kind, data in found.tasks.items()} == {"math": None, "code": "plan_order:back"}
    with pytest.raises(TaskError, match=r"--curriculum plan_order:few: epoch 0 leaves out 1 task, such as 'tasks'"):
        plan(folder, "math", curricula=("plan_order:few",))
    with pytest.raises(ConfigError, match="--curriculum maths=plan_order:back: no such kind"):
        plan(folder, "math", "code", curricula=("maths=plan_order:back",))


@pytest.mark.parametrize(
    ("texts", "flaw"),
    [
        (("maths=a:b",), "--agent maths=a:b: no such kind"),
        (("a:b", "c:d"), "--agent a:b: names no kind"),
        (("math=a:b", "math=c:d"), "--agent math=c:d: a second one for its kind"),
    ],
)
def test_a_kind_that_is_wrong_is_said_with_those_there_are(texts, flaw):
    with pytest.raises(ConfigError, match=flaw) as error:
        assign_kinds(job("math", "code"), "--agent", texts)
    assert "write KIND=... with one of math, code" in str(error.value)


def test_a_kind_without_agent_and_tasks_that_are_not_there_are_said(folder):
    with pytest.raises(ConfigError, match="--agent: nothing attempts kind 'code'"):
        plan(folder, "math", "code", agents=("math=plan_agent:attempt",))
    (folder / "tasks.jsonl").unlink()
    with pytest.raises(TaskError, match="tasks.jsonl: cannot be read"):
        plan(folder, "math")
