"""`swarmq train` begins only with the tasks that an earlier call fed, and does nothing once the last step is made."""

import io

import msgspec
import pytest
from rich.console import Console

from support.run_folder import MadeRun
from swarmq.client.data.feed import FeedProgress, _write_progress, default_progress_file
from swarmq.client.data.tasks import SwarmTask, hash_source_name
from swarmq.config import SwarmJob
from swarmq.errors import SwarmqError, TaskError
from swarmq.whole_run.plan import DataSet, TrainPlan
from swarmq.whole_run.report import TrainingRecord
from swarmq.whole_run.run import _feed_options, train


def plan(job: SwarmJob) -> TrainPlan:
    tasks = {kind: DataSet("tasks.jsonl", [SwarmTask("t")]) for kind in job.task_kinds}
    agents = {kind: lambda _: 1.0 for kind in job.task_kinds}
    return TrainPlan(job=job, agents=agents, tasks=tasks, held_out={}, concurrency=1)


async def test_other_tasks_than_those_of_an_earlier_call_are_refused_before_anything_starts(tmp_path):
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "nowhere"}}})
    fed = default_progress_file(job.run_folder.path, "r", "default", hash_source_name("tasks.jsonl"))
    fed.parent.mkdir()
    _write_progress(fed, FeedProgress(data="other", confirmed=8))
    with pytest.raises(TaskError, match="belongs to a feed of other data.*or remove the file"):
        await train(plan(job), Console(file=io.StringIO()))
    assert list(job.run_folder.path.iterdir()) == [fed]


def finish_run(tmp_path) -> tuple[MadeRun, SwarmJob]:
    """Make a run that has made its last step, 1."""
    made = MadeRun(tmp_path)
    made.finish("taught")
    made.step()
    made.close()
    job = SwarmJob.build(
        {
            "run": "r",
            "folder": str(tmp_path),
            "mix": made.job.mix,
            "policies": {"main": {"model": str(tmp_path / "model")}},
        },
        sets=["policies.main.train.max_steps=1", "groups.group_size=2"],
    )
    made.folder.job.write_text(job.to_toml())
    return made, job


async def test_a_run_whose_last_step_is_made_is_only_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, job = finish_run(tmp_path)
    shown = io.StringIO()
    await train(plan(job), Console(file=shown))
    assert "has made its last step, 1" in shown.getvalue()
    assert "| steps | 1" in made.folder.report.read_text()
    assert not made.folder.lock.exists(), "nothing was started"


async def test_a_run_that_died_after_its_last_step_is_brought_up_again_for_its_held_out_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made, job = finish_run(tmp_path)
    held_out = {kind: DataSet("held.jsonl", [SwarmTask("h")]) for kind in job.task_kinds}
    made.folder.training.write_bytes(msgspec.json.encode(TrainingRecord(held_out={0: {}})))
    shown = io.StringIO()
    with pytest.raises(SwarmqError, match=r"config\.json"):  # the model of this run cannot be served
        await train(msgspec.structs.replace(plan(job), held_out=held_out), Console(file=shown))
    assert "has made its last step" not in shown.getvalue()


@pytest.mark.parametrize("seed", [0, 7])
def test_the_order_of_tasks_follows_the_seed_of_the_job(tmp_path, seed):
    policies = {"main": {"model": "nowhere", "train": {"seed": seed}}}
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": policies})
    assert _feed_options(job, "default", DataSet("tasks.jsonl", [SwarmTask("t")]))["seed"] == seed
