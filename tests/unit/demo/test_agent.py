"""The demo's agent, against a model that follows a script."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from swarmq.demo.agent import MAX_TURNS, attempt, concise_score, run_tool, simplify
from swarmq.demo.problems import problems, score, solution
from swarmq.demo.warmup import reductions

PROBLEM = next(p for p in problems("sum", "train", 50) if solution(p)[0].count(" ") == 4)
EXPRESSION, ANSWER = solution(PROBLEM)


class Script:
    """Stands where the `openai` client stands; keeps the messages of each request."""

    def __init__(self, *says: str | tuple[str, str]) -> None:
        self.requests: list[list[Any]] = []
        self._says = iter(says)
        self.chat = SimpleNamespace(completions=self)

    def create(self, **request: Any) -> ChatCompletion:
        self.requests.append(list(request["messages"]))
        said = next(self._says)
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            function = {"name": said[0], "arguments": said[1]}
            message["tool_calls"] = [{"id": f"c{len(self.requests)}", "type": "function", "function": function}]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
        return ChatCompletion.model_validate(body)


def call(expression: str) -> tuple[str, str]:
    return ("simplify", json.dumps({"expression": expression}))


def run(script: Script, **options: Any) -> Any:
    return attempt(script, "m", PROBLEM, **options)  # type: ignore[arg-type]


def test_results_of_the_tool_reach_the_next_request():
    steps = reductions(EXPRESSION)
    script = Script(*(call(step) for step, _ in steps), f"<answer>{ANSWER}</answer>")
    done = run(script)
    assert (done.reward, done.success, done.turns, done.tool_calls) == (1.0, True, 3, 2)
    assert [m["content"] for m in script.requests[-1] if m["role"] == "tool"] == [result for _, result in steps]


def test_a_wrong_answer_earns_nothing_more_by_ending_early():
    done = run(Script("<answer>no idea</answer>"))
    assert (done.reward, done.success, done.turns) == (0.0, False, 1)


def test_a_model_that_never_answers_is_stopped():
    done = run(Script(*[call("1 + 1")] * MAX_TURNS))
    assert (done.reward, done.success, done.turns, done.reply) == (0.0, False, MAX_TURNS, "")


@pytest.mark.parametrize(
    "wrong",
    [
        ("simplify", "not json"),
        ("simplify", "{}"),
        ("simplify", "[1]"),
        call("1 + 2 * 3"),
        call("2 ** 9"),
        ("x", "{}"),
    ],
)
def test_a_bad_tool_call_is_answered_with_words_and_the_episode_goes_on(wrong):
    script = Script(wrong, f"<answer>{ANSWER}</answer>")
    assert run(script).reward == 1.0
    assert script.requests[1][-1]["content"].startswith("error: ")
    assert run_tool(*wrong).startswith("error: ")


@pytest.mark.parametrize(
    ("text", "left"),
    [("12 + 30", "42"), ("-5 - 6 + 1", "-11 + 1"), ("9 * -3 * 2", "-27 * 2"), ("1 - 2 + 3 - 4", "-1 + 3 - 4")],
)
def test_the_tool_does_the_first_operation_and_leaves_the_rest(text, left):
    assert simplify(text) == left


def test_the_changed_reward_pays_for_brevity_only_on_top_of_a_right_answer():
    right, wordy, wrong = f"<answer>{ANSWER}</answer>", f"So <answer>{ANSWER}</answer>", "<answer>x</answer>"
    assert [concise_score(PROBLEM, reply) for reply in (right, wordy, wrong)] == [1.1, 1.0, 0.0]
    assert [score(PROBLEM, reply) for reply in (right, wordy, wrong)] == [1.0, 1.0, 0.0]


def test_success_is_honest_under_a_changed_reward():
    assert not run(Script("<answer>1</answer>"), reward=lambda _problem, _reply: 5.0).success
