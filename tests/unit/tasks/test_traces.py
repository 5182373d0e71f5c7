"""Traces become tasks: one for each conversation, in each of the forms in which they are logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from swarmq.cli import main

SYSTEM = {"role": "system", "content": "You book trains."}
USER = {"role": "user", "content": "A seat to Bergen on Friday, please, by the window if there is one."}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "find_train", "arguments": "{}"}}]}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "08:05"}


def logged(*messages: dict, answer: str | None) -> dict:
    return {"request": {"messages": list(messages)}, "response": {"choices": [{"message": {"content": answer}}]}}


def span(**attributes: str) -> dict:
    pairs = [{"key": key.replace("__", "."), "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"spanId": "ab", "attributes": pairs}


def convert(path: Path, *lines: object) -> tuple[str, list[dict], int]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    out = path.with_suffix(".out")
    ran = CliRunner().invoke(main, ["tasks", "from-traces", str(path), "--out", str(out)])
    return (
        ran.output,
        [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else [],
        ran.exit_code,
    )


def test_calls_of_one_conversation_are_one_task_with_the_final_answer(tmp_path: Path) -> None:
    calls = [logged(SYSTEM, USER, answer=None), logged(SYSTEM, USER, CALL, TOOL, answer="08:05 it is.")]
    said, tasks, status = convert(tmp_path / "calls.jsonl", *calls, logged(SYSTEM, answer="hm"))
    assert status == 0, said
    (task,) = tasks
    assert task["messages"] == [SYSTEM, USER]
    assert (task["question"], task["reference"], task["tools"]) == (USER["content"], "08:05 it is.", ["find_train"])
    assert "1 task from 3 calls; dropped: no user message 1" in said


def test_both_conventions_of_opentelemetry_are_read(tmp_path: Path) -> None:
    new = span(
        gen_ai__system_instructions=json.dumps([{"type": "text", "content": "You book trains."}]),
        gen_ai__input__messages=json.dumps(
            [{"role": "user", "parts": [{"type": "text", "content": "To Oslo at noon tomorrow"}]}]
        ),
        gen_ai__output__messages=json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "12:00"}]}]),
    )
    old = span(
        gen_ai__prompt__0__role="user",
        gen_ai__prompt__0__content="A ferry to the island with two bicycles",
        gen_ai__completion__0__content="At nine.",
    )
    trace = {"resourceSpans": [{"scopeSpans": [{"spans": [new, old, {"attributes": [{"key": "http.method"}]}]}]}]}
    said, tasks, _ = convert(tmp_path / "trace.json", trace)
    assert [(task["question"], task["reference"]) for task in tasks] == [
        ("To Oslo at noon tomorrow", "12:00"),
        ("A ferry to the island with two bicycles", "At nine."),
    ], said
    assert tasks[0]["messages"][0] == {"role": "system", "content": "You book trains."}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [', "line 2: not JSON"),
        ("[1]", "line 2: a list"),
        ('{"x": 1}', "line 2: neither `resourceSpans` nor `messages`"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    said, tasks, status = convert(tmp_path / "calls.jsonl", logged(USER, answer="yes"), line)
    assert status == 1
    assert says in said
    assert tasks == []


def test_traces_without_users_are_no_empty_file(tmp_path: Path) -> None:
    said, tasks, status = convert(tmp_path / "calls.jsonl", logged(SYSTEM, answer="x"))
    assert status == 1
    assert "none has a user's message" in said
    assert tasks == []
