import pytest

from swarmq.client.runners.attempts import AttemptResult
from swarmq.client.runners.report import Tally, format_reward, make_eval_report, summarize_error


def done(reward, *, task="t", success=None, kind="math", error=None):
    return AttemptResult(
        episode_id="e", task_id=task, kind=kind, attempt=0, reward=reward, success=success, error=error, seconds=1.0
    )


def test_repeats_of_one_task_do_not_make_the_error_smaller():
    once = make_eval_report([done(0.0, task="a"), done(1.0, task="b")], failed=0, failures={}, seconds=1)
    often = make_eval_report([done(0.0, task="a")] * 50 + [done(1.0, task="b")] * 50, failed=0, failures={}, seconds=1)
    assert once.standard_error == often.standard_error == pytest.approx(0.5)


def test_one_task_has_a_mean_but_no_error():
    report = make_eval_report([done(0.5), done(1.0)], failed=0, failures={}, seconds=1)
    assert (report.mean_reward, report.standard_error, report.reward_interval) == (0.75, None, None)


def test_nothing_finished_is_no_mean_of_zero():
    report = make_eval_report([], failed=3, failures={}, seconds=1)
    assert report.mean_reward is None
    assert str(report) == "no episode finished, 3 failed"


def test_success_is_judged_only_where_it_was_said():
    report = make_eval_report(
        [done(1.0, task="a", success=True), done(0.0, task="b")], failed=0, failures={}, seconds=1
    )
    assert report.success_rate == 1.0
    assert make_eval_report([done(1.0)], failed=0, failures={}, seconds=1).success_rate is None


def test_rewards_are_told_apart_by_kind():
    report = make_eval_report([done(1.0, task="a"), done(0.0, task="b", kind="code")], failed=0, failures={}, seconds=1)
    assert report.reward_by_kind == {"code": 0.0, "math": 1.0}


def test_a_summary_reads_as_a_sentence():
    tally = Tally()
    tally.add(done(0.5, success=True))
    tally.add(done(None, error=ValueError("bad\nlong story")))
    tally.slots, tally.given_up = 2, 1
    assert str(tally.summary(1.0)) == (
        "1 episode finished, 1 failed, 1 slot given up, mean reward 0.500, success 100.0%, 1.0 s"
    )
    assert tally.summary(1.0).failures == {"ValueError: bad": 1}


def test_a_failure_without_words_is_named_by_its_type():
    assert summarize_error(ValueError()) == "ValueError"
    assert summarize_error(None) == "ended by the agent without a reward"


def test_the_count_of_different_failures_is_bounded():
    tally = Tally()
    for number in range(5000):
        tally.add(done(None, error=ValueError(f"number {number}")))
    assert len(tally.failures) <= 1001
    assert sum(tally.failures.values()) == 5000


def test_a_large_reward_is_no_row_of_digits():
    assert [format_reward(value) for value in (0.49642274560421273, -12.5, 1e30)] == ["0.496", "-12.500", "1e+30"]
