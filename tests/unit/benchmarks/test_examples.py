"""The runner of the tutorials: manifests, what counts as learned, and what is run again."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from benchmarks.examples import manifest
from benchmarks.examples.__main__ import cells, figures, is_finished, merge, summarize
from benchmarks.examples.course import HeldOut, KindReport, Row, read_report, row_path, rows_in

from swarmq.client.data.feed import feed
from swarmq.client.data.readers import read_tasks
from swarmq.client.runners.attempts import AttemptResult
from swarmq.client.runners.report import make_eval_report
from swarmq.config import SwarmJob
from swarmq.testing.memory_broker import MemoryBroker
from swarmq.toy_model import load_lessons

FEED = re.compile(r"swarmq feed runs/\S+ (\S+)(?: --kind (\S+))?")
"""The command as tutorials write it: tasks and kind."""
MOST_FED = 1000


def point(reward: float) -> HeldOut:
    return HeldOut(reward=reward, standard_error=0.03, episodes=192, failed=0, by_kind={"default": reward})


def row(seed: int, after: float, **more) -> Row:
    return Row(
        name="a",
        seed=seed,
        digest="d",
        commit="c",
        hardware="h",
        before=point(0.3),
        after=point(after),
        minutes=4.0,
        **more,
    )


@pytest.mark.parametrize("name", manifest.names())
def test_a_tutorial_is_complete(name):
    """Manifest, jobs and README fit together: kinds of the job, models where the commands put them, run named like the folder."""
    found, folder = manifest.load(name), manifest.EXAMPLES / name
    job, full = (SwarmJob.load(folder / file) for file in ("job.toml", "job_h200.toml"))
    assert job.run == name.replace("_", "-")
    assert set(full.policies) >= set(found.models)
    assert set(job.task_kinds) == set(found.feeds)
    assert set(found.models) <= set(job.policies)
    assert all(policy.model.startswith(f"runs/toy/{name}") for policy in job.policies.values())
    assert "not run by us" in (folder / "job_h200.toml").read_text().lower()
    readme = (folder / "README.md").read_text()
    assert f"make examples ARGS={name}" in readme.replace('"', "")
    assert f"swarmq up examples/{name}/job.toml" in readme
    for module in found.models.values():
        assert load_lessons(manifest.locate(name, module)).recipe.steps


def task_lists(name: str) -> set[tuple[str, str]]:
    """Return kind and tasks of every list that a tutorial's manifest, README or job at real size feeds or evaluates."""
    found, folder = manifest.load(name), manifest.EXAMPLES / name
    lists = {(k, manifest.locate(name, tasks)) for table in (found.feeds, found.held_out) for k, tasks in table.items()}
    text = (folder / "README.md").read_text() + (folder / "job_h200.toml").read_text()
    return lists | {(kind or "default", tasks) for tasks, kind in FEED.findall(text)}


@pytest.mark.parametrize(("kind", "tasks"), sorted({one for name in manifest.names() for one in task_lists(name)}))
async def test_the_tasks_of_a_tutorial_can_be_fed(kind, tasks, tmp_path: Path):
    broker = MemoryBroker()
    await broker.declare("run", policies=["main"], kinds=[kind])
    listed = read_tasks(tasks, limit=MOST_FED)
    assert await feed(broker, "run", listed, kind, repeats=1, progress_file=tmp_path / "feed.json") > 0


def test_names_in_a_manifest_are_those_of_the_folder_unless_they_have_a_dot():
    assert manifest.locate("countdown", "agent:attempt") == "examples.countdown.agent:attempt"
    assert manifest.locate("several", "examples.countdown.agent:attempt") == "examples.countdown.agent:attempt"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("title = 1", "title"),
        (
            'title = "t"\ngain = 0.2\nsteps = 1\nfeeds = {a = "b:c"}\nheld_out = {a = "b:c"}\nagents = {d = "b:c"}',
            "different kinds",
        ),
        (None, "there is no"),
    ],
)
def test_a_wrong_manifest_is_refused_with_its_file(text, wrong, tmp_path: Path):
    if text is not None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "example.toml").write_text(text)
    with pytest.raises(ValueError, match=wrong) as refused:
        manifest.load("mine", tmp_path)
    assert "mine/example.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "learned", "gain"),
    [
        ([row(0, 0.6), row(1, 0.55)], True, 0.25),
        ([row(0, 0.6), row(1, 0.4)], False, 0.1),
        ([row(0, 0.6), row(1, 0.9, problem="10 minutes were over")], False, 0.3),
        ([], False, None),
    ],
    ids=["both seeds", "one seed too little", "one seed not to its end", "not run"],
)
def test_a_tutorial_has_learned_if_every_seed_gained_enough(rows, learned, gain):
    found = summarize("a", rows, 0.2)
    assert (found["learned"], found["gain"]) == (learned, gain)
    told = figures([found])
    assert (told["tutorials"], told["learned"], told["reward_gain_min"]) == (1, int(learned), gain if learned else 0.0)


def test_the_report_of_a_command_is_read_as_it_is_printed():
    attempts = [
        AttemptResult(episode_id=f"e{n}", task_id=f"t{n % 3}", kind="default", attempt=1, reward=n % 2, seconds=1.0)
        for n in range(8)
    ]
    report = make_eval_report(attempts, failed=1, failures={}, seconds=1.0)
    found = read_report(f"evaluation: 8 of 8\n{report}\noutput of the attempts: logs\n")
    assert found == KindReport(
        pytest.approx(report.mean_reward, abs=1e-3), pytest.approx(report.standard_error, abs=1e-3), 8, 1
    )
    nothing = make_eval_report([], failed=2, failures={}, seconds=1.0)
    assert read_report(f"{nothing}\n").reward is None


def test_a_row_without_a_second_measurement_is_printed():
    assert cells(msgspec.structs.replace(row(0, 0.6), after=None, problem="why"), 0.2)[2:5] == (
        "0.300 ± 0.030",
        "-",
        "-",
    )


def test_a_finished_row_is_kept_until_its_tutorial_changes(tmp_path: Path):
    path = row_path(tmp_path, "countdown", 0)
    assert not is_finished(path, "countdown")
    path.parent.mkdir(parents=True)
    for changes, finished in (({}, True), ({"problem": "x"}, False), ({"digest": "old"}, False)):
        fields = {"name": "countdown", "digest": manifest.digest("countdown"), **changes}
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(row(0, 0.6), **fields)))
        assert is_finished(path, "countdown") is finished
    assert [one.digest for one in rows_in(tmp_path)] == ["old"]


def test_a_call_for_one_tutorial_keeps_the_results_of_the_others():
    earlier = [{"name": name, "gain": 0.1} for name in ("countdown", "frozen_lake", "gone")]
    told = merge(earlier, [{"name": "countdown", "gain": 0.5}])
    assert [(one["name"], one["gain"]) for one in told] == [("countdown", 0.5), ("frozen_lake", 0.1)]
