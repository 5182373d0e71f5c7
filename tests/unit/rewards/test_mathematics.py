"""Equal values score 1 in any thread, and an answer that makes the checker compute for ever scores 0."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarmq.errors import RewardError
from swarmq.rewards import combine, math_match
from swarmq.rewards.helper import close_helpers


@pytest.fixture(autouse=True, scope="module")
def helpers():
    yield
    close_helpers()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5"), ("The answer is 84/2.", "42"), ("$x = 42$", "42"), ("1,234", "1234"),
        ("\\boxed{2\\sqrt{2}}", "$\\sqrt{8}$"), ("\\boxed{(x+1)^2}", "$x^2+2x+1$"), ("\\boxed{0.3333333}", "1/3"),
        ("\\boxed{\\{2, 1\\}}", "$\\{1, 2\\}$"), ("I think 41. No: \\boxed{42}", "\\boxed{42}"),
    ],
)  # fmt: skip
def test_equal_values_are_right(answer, expected):
    assert math_match(answer, expected).reason == ""


@pytest.mark.parametrize(
    "answer",
    ["", "\\boxed{41}", "\\boxed{41} \\boxed{42}", "\\boxed{41 \\text{ or } 42}", "\\boxed{x}", "41 < x < 43", "\\boxed{\\infty}",
     "no idea", "\\boxed{" * 500, "(" * 2000, "\\boxed{__import__('os').system('false')}", "\ud800\x00"],
)  # fmt: skip
def test_other_values_several_values_and_nonsense_are_wrong(answer):
    score = math_match(answer, "42")
    assert score.value == 0.0
    assert score.reason


@pytest.mark.parametrize(
    "answer", ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{(10^{9})!}", "\\boxed{\\sum_{k=1}^{10^9} \\sin(k!)}"]
)
def test_an_answer_that_computes_for_ever_is_wrong_and_the_next_one_is_checked(answer):
    score = math_match(answer, "42", timeout_s=0.5)
    assert score.value == 0.0
    assert score.reason
    assert math_match("42", "42").value == 1.0


def test_a_box_can_be_demanded():
    assert math_match("The answer is 42", "42", boxed=True).value == 0.0
    assert math_match("The answer is \\boxed{42}", "42", boxed=True).value == 1.0
    assert math_match("\\boxed{42} and then \\boxed{41}", "42", boxed=True).value == 0.0


@pytest.mark.parametrize("expected", ["", " ", "forty-two", None])
def test_an_expected_answer_without_a_value_fails_the_episode(expected):
    with pytest.raises(RewardError, match="expected is"):
        math_match("42", expected)


def test_threads_check_at_the_same_time():
    assert threading.active_count() < 50
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda number: math_match(f"\\boxed{{{number}}}", str(number % 20)).value, range(40)))
    assert scores == [1.0] * 20 + [0.0] * 20


def test_the_reason_is_kept_by_combine():
    outcome = combine({"right": math_match("41", "42"), "brief": 1.0}, {"brief": 0.1})
    assert outcome.reward == pytest.approx(0.1)
    assert outcome.metadata == {"right": "the result is '41'"}
