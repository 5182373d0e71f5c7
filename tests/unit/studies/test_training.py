"""What a trial returns. A training's settings are the trial's alone, and its result is that of its last step, or none; a function's
result is finite numbers."""

import pytest

from support.run_folder import MadeRun
from support.small_job import small_job
from swarmq.client.runners.report import EvalReport
from swarmq.config import SwarmJob, resolve_amqp_url
from swarmq.errors import StudyError
from swarmq.studies.study import TrialPlan
from swarmq.studies.training import choose_settings, read_training
from swarmq.studies.trial import Attempt, Order
from swarmq.studies.trial_process import call
from swarmq.whole_run.report import TrainingRecord


def measured(reward, **more):
    fields = dict.fromkeys(EvalReport.__struct_fields__) | {"tasks": 2, "n": 2, "failed": 0, "seconds": 1.0}
    means = {"mean_reward": reward, "success_rate": reward, "reward_by_kind": {}, "failures": {}}
    return {"default": EvalReport(**fields | means | more)}


def test_a_training_that_was_killed_before_it_was_measured_has_no_result(tmp_path):
    made = MadeRun(tmp_path)
    made.finish("taught")
    made.step()
    made.close()
    record = TrainingRecord(held_out={0: measured(0.25)})
    record.save(made.folder.training)
    assert "held_out" not in read_training(made.folder, 1).metrics, "what was measured before is no result"
    record.held_out[1] = measured(0.75)
    record.save(made.folder.training)
    metrics = read_training(made.folder, 1).metrics
    assert (metrics["held_out_before"], metrics["held_out"], metrics["held_out_success"]) == (0.25, 0.75, 0.75)


def test_a_mean_over_the_held_out_attempts_that_did_not_fail_is_no_result(tmp_path):
    made = MadeRun(tmp_path)
    made.finish("taught")
    made.step()
    made.close()
    failed = measured(1.0, failed=1, failures={"TimeoutError: no answer": 3})
    record = TrainingRecord(held_out={0: failed, 1: failed})
    record.save(made.folder.training)
    with pytest.raises(StudyError, match=r"1 of 3 held-out attempts have ended without a reward \(3 x TimeoutError"):
        read_training(made.folder, 1)
    record = TrainingRecord.load(made.folder.training)
    assert list(record.held_out) == [0], "the next start measures the last step again"
    record.held_out[1] = measured(0.5)
    record.save(made.folder.training)
    metrics = read_training(made.folder, 1).metrics
    assert metrics["held_out"] == 0.5
    assert "held_out_before" not in metrics


def test_trainings_share_no_rabbitmq_with_each_other(tmp_path, monkeypatch):
    monkeypatch.delenv("SWARMQ_AMQP_URL", raising=False)
    job = tmp_path / "job.toml"
    job.write_text(small_job("x", train={"max_steps": 9}, broker={"url": "amqp://shared:5672/"}))
    plan = TrialPlan(job=str(job), agent="agent:attempt", max_seconds=9)
    attempt = Attempt(settings={"policies.main.train.learning_rate": 0.5}, seed=3, steps=2, folder=str(tmp_path))
    sets, last = choose_settings(Order(plan=plan, attempt=attempt))
    settings = SwarmJob.load(job, sets=sets)
    assert resolve_amqp_url(settings.broker) is None, "all of them are runs of the same name"
    train = settings.policies["main"].train
    assert (last, train.max_steps, train.seed, train.learning_rate) == ({"main": 2}, 2, 3, 0.5)


def test_the_result_says_how_stale_the_trained_episodes_were_and_what_they_cost(tmp_path):
    made = MadeRun(tmp_path)
    learner = "learner.main"
    made.emit(learner, "step", version=1, reward=0.5, episodes=2, turns=4, staleness={"0": 2}, step_s=3.0)
    made.now += 2
    made.emit(
        learner, "step", version=2, reward=1.0, episodes=2, turns=6, staleness={"1": 1, "3": 1}, dropped={"stale": 4}
    )
    made.close()
    outcome = read_training(made.folder, 2)
    assert outcome.curves == {"reward": (0.5, 1.0), "staleness": (0, 2), "seconds": (3, 5)}
    metrics = outcome.metrics
    assert metrics["staleness"] == 1
    assert (metrics["trained_episodes"], metrics["trained_calls"], metrics["dropped_episodes"]) == (4, 10, 4)


def test_a_function_that_returns_no_finite_number_is_told_which(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "diverges.py").write_text("def trial(attempt): return {'score': float('nan')}\n")
    plan = TrialPlan(function="diverges:trial", max_seconds=9)
    with pytest.raises(StudyError, match="diverges:trial returned nan as 'score'; a metric is a finite number"):
        call(Order(plan=plan, attempt=Attempt(settings={}, seed=0, folder=str(tmp_path))))
