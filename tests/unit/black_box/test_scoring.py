import pytest

from swarmq.black_box.process import Finished
from swarmq.black_box.scoring import check_score_function, read_passed_share, score_test
from swarmq.errors import AgentCommandError, TaskError

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase><testcase name="c"><error/></testcase>
<testcase name="d"><skipped/></testcase><testcase name="e"/>
</testsuite></testsuites>"""


def finished(exit_code):
    return Finished(exit_code=exit_code, seconds=1.0, tail="said")


@pytest.mark.parametrize(("code", "reward"), [(0, 1.0), (1, 0.0), (5, 0.0), (-9, 0.0), (None, 0.0)])
def test_the_exit_code_of_a_test_is_its_reward(code, reward):
    outcome = score_test(finished(code), None)
    assert (outcome.reward, outcome.success) == (reward, reward == 1.0)
    assert outcome.metrics["test_timed_out"] == float(code is None)


@pytest.mark.parametrize("code", [126, 127])
def test_a_test_that_cannot_be_run_gives_no_reward(code):
    with pytest.raises(AgentCommandError, match=r"cannot be run.*\nsaid"):
        score_test(finished(code), None)


def test_a_report_gives_the_share_of_passed_tests_without_skipped_ones(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    assert score_test(finished(1), path).reward == 0.5
    assert score_test(finished(None), path).reward == 0.0  # the tests did not end


@pytest.mark.parametrize("text", [None, "", "<testsuites>", "<testsuite/>"])
def test_without_a_usable_report_nothing_has_passed(tmp_path, text):
    path = tmp_path / "report.xml"
    if text is not None:
        path.write_text(text)
    assert read_passed_share(path) == 0.0
    assert not score_test(finished(0), path).success  # a module that exits early must not win


@pytest.mark.parametrize("function", [3, lambda folder: 1.0])
def test_a_score_function_takes_folder_and_task(function):
    with pytest.raises(TaskError, match="--score a:b"):
        check_score_function(function, "a:b")
    check_score_function(lambda folder, task: 1.0, "a:b")
