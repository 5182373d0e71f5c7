"""A study that cannot answer its question is refused before anything runs, with the setting that is wrong."""

from pathlib import Path

import msgspec
import pytest

from support.studies import FIRST, study_of
from swarmq.errors import ConfigError, StudyError
from swarmq.studies.identity import TrialMaker
from swarmq.studies.study import hash_study, load_study

JOB = """
run = "r"
[policies.main]
model = "hub/model"
[policies.main.train]
max_steps = 2
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": {}}, "metric"),
        ({"seeds": [0, 1, 0]}, "seeds: 0 is given twice"),
        ({"seeds": []}, "length >= 1"),
        ({"arms": {}}, "arms: give either arms or a search space"),
        ({"arms": {"a": {}}}, "arms: there is only one"),
        ({"budget": {}}, "budget: no cap is set"),
        ({"budget": {"gpu_seconds": 5}}, "budget.gpu_seconds: 5 is less than the 10 that one trial may need"),
        ({"budget": {"wall_clock_s": 5}}, "budget.wall_clock_s: 5 is less than"),
        ({"trial": {"max_seconds": 9}}, "trial: give either job and agent, or function"),
        ({"trial": {"job": "job.toml", "max_seconds": 9}}, "trial.agent: missing"),
        (
            {"trial": {"function": "work.trial", "max_seconds": 9}},
            "trial.function: 'work.trial' is not of the form module:function",
        ),
        ({"arms": {"a": {}, "b": {"agent": "mine"}}}, "arms.b.agent: 'mine' is not of the form module:function"),
        (
            {"trial": {"job": "j", "agent": "a:b", "max_seconds": 9}, "metric": {"name": "held_out"}},
            "trial.held_out: missing",
        ),
        ({"design": {"kind": "halving"}}, "design.rungs: design.kind = 'halving' needs them"),
        ({"design": {"kind": "asha", "rungs": [4, 2]}}, "must ascend"),
        ({"design": {"kind": "random"}}, "space: missing"),
        ({"stopping": {"kind": "anytime"}}, "design.kind must be 'sequential'"),
        ({"arms": {}, "space": {"x": {"low": 1.0, "high": 2.0}}}, "space.x: design.kind = 'grid' needs values"),
        ({"name": "No Spaces"}, "name: 'No Spaces'"),
        ({"metrics": 1}, "unknown field"),
        ({"question": ""}, "question"),
        ({"metric": {"name": ""}}, "metric.name"),
        ({"arms": {}, "space": {"x": {"values": [1, 2, 1]}}}, "space.x: a value is given twice"),
    ],
)
def test_an_impossible_study_is_refused_with_the_reason(changes, words):
    with pytest.raises(msgspec.ValidationError) as refused:
        study_of(**changes)
    assert words in str(refused.value)


def test_the_file_that_study_new_writes_and_the_one_of_the_page_are_studies(tmp_path):
    root = Path(__file__).parents[3]
    page = (root / "docs/how-to/studies.md").read_text().split("```toml\n")
    for text in (
        (root / "src/swarmq/starter/study.toml").read_text().replace("NAME", "x"),
        page[1].partition("```")[0],
    ):
        (tmp_path / "study.toml").write_text(text)
        assert load_study(tmp_path / "study.toml").metric.name == "held_out"


def test_the_error_of_a_file_names_file_and_setting(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('name = "x"\nmetrik = 1\n')
    with pytest.raises(ConfigError, match=r"study.toml: metrik: unknown field"):
        load_study(path)


def write_function(folder, text="def trial(attempt): return {}\n"):
    (folder / "work.py").write_text(text)
    return folder


def test_arms_that_cannot_be_told_apart_are_refused(tmp_path):
    study = study_of(arms={"a": {"settings": {"x": 1}}, "b": {"settings": {"x": 1}}})
    with pytest.raises(StudyError, match="arms.b: cannot be told apart from arms.a"):
        TrialMaker(study, write_function(tmp_path)).check()


@pytest.mark.parametrize("model", ["./models/tiny", "/models/tiny", "runs/models/tiny"])
def test_a_study_whose_model_is_a_folder_that_is_not_there_is_refused(tmp_path, model):
    (tmp_path / "job.toml").write_text(JOB.replace("hub/model", model))
    (tmp_path / "agent.py").write_text("")
    cispo = {"settings": {"policies.main.train.loss.name": "cispo"}}
    trial = {"job": "job.toml", "agent": "agent:attempt", "max_seconds": 9}
    study = study_of(trial=trial, metric={"name": "reward"}, arms={"plain": {}, "cispo": cispo})
    with pytest.raises(
        ConfigError, match=r"policies\.main\.model: .*tiny: no such folder; make or copy the model there"
    ):
        TrialMaker(study, tmp_path).check()
    (tmp_path / "job.toml").write_text(JOB)
    TrialMaker(study, tmp_path).check()


def test_an_arm_that_sets_a_default_is_the_arm_that_leaves_it_out(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "agent.py").write_text("def attempt(ep): return 1.0\n")
    trial = {"job": "job.toml", "agent": "agent:attempt", "max_seconds": 9}
    default = {"settings": {"policies.main.train.loss.name": "tis_mask"}}
    study = study_of(trial=trial, metric={"name": "reward"}, arms={"plain": {}, "named": default})
    with pytest.raises(StudyError, match="arms.named: cannot be told apart from arms.plain"):
        TrialMaker(study, tmp_path).check()
    other = study_of(
        trial=trial,
        metric={"name": "reward"},
        arms={"plain": {}, "cispo": {"settings": {"policies.main.train.loss.name": "cispo"}}},
    )
    TrialMaker(other, tmp_path).check()


def test_a_held_out_task_that_is_trained_on_is_found_by_its_content_whatever_its_id(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"id": "t1", "q": "6 * 7?"}\n{"id": "t2", "q": "1 + 1?"}\n')
    (tmp_path / "held.jsonl").write_text('{"id": "h1", "q": "2 + 2?"}\n{"id": "h2", "q": "6 * 7?"}\n')
    trial = FIRST["trial"] | {"tasks": "tasks.jsonl", "held_out": "held.jsonl"}
    space = {"arms": {}, "space": {"arm": {"values": [1, 2]}}}
    for study in (study_of(trial=trial), study_of(trial=trial, **space)):
        with pytest.raises(StudyError, match="1 of its tasks are also in tasks.jsonl, e.g. 'h2'"):
            TrialMaker(study, write_function(tmp_path)).check()


@pytest.mark.parametrize("shown", ["./held.jsonl", "copy.jsonl"])
def test_held_out_tasks_are_not_shown_to_a_planner(tmp_path, shown):
    for name in ("held.jsonl", "copy.jsonl"):
        (tmp_path / name).write_text('{"id": "h1", "q": "2 + 2?"}\n')
    planner = {"kind": "endpoint", "model": "m", "max_arms": 1, "files": [shown]}
    study = study_of(trial=FIRST["trial"] | {"held_out": "held.jsonl"}, planner=planner)
    with pytest.raises(StudyError, match=f"planner.files: '{shown}' holds the held-out tasks"):
        TrialMaker(study, write_function(tmp_path)).check()


def test_a_trial_is_another_one_when_its_code_settings_or_seed_change_and_the_same_otherwise(tmp_path):
    study = study_of()
    first = TrialMaker(study, write_function(tmp_path)).make("a", study.arms["a"], 0)
    assert TrialMaker(study, tmp_path).make("a", study.arms["a"], 0) == first
    assert TrialMaker(study, tmp_path).make("a", study.arms["a"], 1).id != first.id
    assert TrialMaker(study, tmp_path).make("b", study.arms["b"], 0).id != first.id
    maker = TrialMaker(study, write_function(tmp_path, "def trial(attempt): return {'score': 1.0}\n"))
    assert maker.make("a", study.arms["a"], 0).id != first.id
    assert maker.find_lineage(first) == maker.make("a", study.arms["a"], 0).lineage != first.lineage
    (tmp_path / "work.py").unlink()
    assert TrialMaker(study, tmp_path).find_lineage(first) == ""


def write_job(folder, text=JOB):
    (folder / "job.toml").write_text(text)
    (folder / "agent.py").write_text("def attempt(ep): return 1.0\n")
    return study_of(
        trial={"job": "job.toml", "agent": "agent:attempt", "max_seconds": 9},
        metric={"name": "reward"},
        arms={"plain": {}, "cispo": {"settings": {"policies.main.train.loss.name": "cispo"}}},
    )


def test_a_changed_job_is_a_change_of_the_study_and_of_its_trials(tmp_path):
    study = write_job(tmp_path)
    before = TrialMaker(study, tmp_path)
    first, inputs = before.make("plain", study.arms["plain"], 0), before.hash_inputs()
    write_job(tmp_path, JOB + "learning_rate = 1e-3\n")
    assert TrialMaker(study, tmp_path).hash_inputs() != inputs
    assert TrialMaker(study, tmp_path).find_lineage(first) != first.lineage


def test_a_file_that_is_edited_while_a_leader_runs_makes_no_other_trials(tmp_path):
    study = write_job(tmp_path)
    maker = TrialMaker(study, tmp_path)
    first = maker.make("plain", study.arms["plain"], 0)
    (tmp_path / "agent.py").write_text("def attempt(ep): return 0.0\n")
    assert maker.make("plain", study.arms["plain"], 0) == first
    assert TrialMaker(study, tmp_path).make("plain", study.arms["plain"], 0).id != first.id


def test_a_trial_depends_on_the_version_of_swarmq_and_on_own_methods_and_not_on_its_folder(tmp_path, monkeypatch):
    losses = JOB + 'loss = { name = "losses:own" }\n'
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        study = write_job(tmp_path / name, losses)
        (tmp_path / name / "losses.py").write_text("def own(): ...\n")
        made.append(TrialMaker(study, tmp_path / name).make("plain", study.arms["plain"], 0))
    assert made[0] == made[1]
    (tmp_path / "two" / "losses.py").write_text("def own(): return 1\n")
    assert TrialMaker(study, tmp_path / "two").find_lineage(made[0]) != made[0].lineage
    monkeypatch.setattr("swarmq.studies.identity.__version__", "0.0.0")
    assert TrialMaker(study, tmp_path / "one").find_lineage(made[0]) != made[0].lineage


def test_an_aa_trial_is_no_trial_of_an_arm_that_an_amendment_gives_its_seed(tmp_path):
    study = study_of()
    maker = TrialMaker(study, write_function(tmp_path))
    compared, noise = (maker.make("a", study.arms["a"], 3, purpose=purpose) for purpose in ("compare", "noise"))
    assert compared.id != noise.id
    assert compared.lineage != noise.lineage, "each has a folder of its own"


def test_the_hash_of_a_study_ignores_layout_and_notices_everything_else():
    assert hash_study(study_of()) == hash_study(study_of(name="first"))
    assert hash_study(study_of(question="Other?")) != hash_study(study_of())


def test_arms_may_differ_in_nothing_but_the_function_that_is_the_agent(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "agent.py").write_text("def plain(ep): return 1.0\ndef shaped(ep): return 1.0\n")
    trial = {"job": "job.toml", "agent": "agent:plain", "max_seconds": 9}
    arms = {"plain": {}, "shaped": {"agent": "agent:shaped"}}
    TrialMaker(study_of(trial=trial, metric={"name": "reward"}, arms=arms), tmp_path).check()


def test_workers_elsewhere_need_the_model_and_nothing_of_arms_that_are_gone(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "job.toml").write_text(JOB.replace("hub/model", "./model"))
    (tmp_path / "agent.py").write_text("def attempt(ep): return 1.0\n")
    (tmp_path / "old.py").write_text("def attempt(ep): return 1.0\n")
    trial = {"job": "job.toml", "agent": "agent:attempt", "max_seconds": 9}
    study = study_of(trial=trial, metric={"name": "reward"}, arms={"plain": {}, "old": {"agent": "old:attempt"}})
    maker = TrialMaker(study, tmp_path)
    trials = [maker.make(name, arm, 0) for name, arm in study.arms.items()]
    assert {*maker.list_files(trials)} == {"job.toml", "agent.py", "old.py", "model/config.json"}
    (tmp_path / "old.py").unlink()
    assert {*maker.list_files(trials)} == {"job.toml", "agent.py", "model/config.json"}


def test_a_training_that_would_never_end_is_refused(tmp_path):
    (tmp_path / "job.toml").write_text(JOB.replace("max_steps = 2", ""))
    (tmp_path / "agent.py").write_text("def attempt(ep): return 1.0\n")
    trial = {"job": "job.toml", "agent": "agent:attempt", "max_seconds": 9}
    arms = {"plain": {}, "cispo": {"settings": {"policies.main.train.loss.name": "cispo"}}}
    study = study_of(trial=trial, metric={"name": "reward"}, arms=arms)
    with pytest.raises(StudyError, match="arms.plain: its training never ends; set policies.main.train.max_steps"):
        TrialMaker(study, tmp_path).check()
