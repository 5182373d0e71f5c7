"""Recorded answers are found by prompt; what was not recorded is explained by the nearest prompt; bad lines are named."""

import json

import pytest

from support.run_folder import make_whole_run
from swarmq.errors import ConfigError
from swarmq.offline.recording import Recording, join_messages, read_recording, render_prompt


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def prompt(*messages):
    return render_prompt({"messages": messages})


def write(folder, *rows):
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_assistant_message_of_a_chat_answers_what_precedes_it(tmp_path):
    chat = [user("a"), assistant("1"), user("b"), assistant("2")]
    found = read_recording(write(tmp_path, {"messages": chat}, {"messages": [user("a")], "answer": "3"}))
    assert found.answers == {prompt(user("a")): ["1", "3"], prompt(*chat[:3]): ["2"]}
    assert found.tasks == []


def test_tool_calls_are_answers_too_and_tools_do_not_change_a_prompt(tmp_path):
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"n":1}'}}
    found = read_recording(write(tmp_path, {"messages": [user("a")], "answer": {"tool_calls": [call]}}))
    [answer] = found.answers[render_prompt({"messages": [user("a")], "tools": [{"type": "function"}]})]
    assert answer == '<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>'


def test_a_line_may_have_the_task_and_a_script_of_answers(tmp_path):
    found = read_recording(write(tmp_path, {"task": {"id": "t", "n": 2}, "answers": ["1", assistant("2")]}))
    [task] = found.tasks
    assert (task.id, task.payload["n"], found.scripts) == ("t", 2, {"t": ["1", "2"]})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([user("What is 6 * 8?")], ["Message 1 of 1 differs", "asked:    user: What is 6 * 8?", "recorded: user: What is 6 * 7?"]),
        ([user("hi"), assistant("ho"), user("who?")], ["Message 3 of 3 differs", "asked:    user: who?", "recorded: user: why?"]),
        ([user("hi")], ["nearest recorded prompt continues with assistant: ho"]),
        ([user("hi"), assistant("ho"), user("why?"), user("x")], ["Message 4 of 4 differs", "which ends before it: user: x"]),
    ],
    ids=["text", "later message", "shorter", "longer"],
)  # fmt: skip
def test_the_nearest_prompt_says_what_differs(asked, told):
    known = (prompt(user("What is 6 * 7?")), prompt(user("hi"), assistant("ho"), user("why?")))
    text = Recording(source="answers.jsonl", answers={key: ["1"] for key in known}).explain_missing(prompt(*asked))
    assert all(part in text for part in ("answers.jsonl has no answer", *told)), text


def test_a_task_without_a_script_learns_which_tasks_have_one():
    recording = Recording(source="answers.jsonl", scripts={"t1": ["1"], "t2": ["2"]})
    assert recording.explain_missing(prompt(user("hi"))) == (
        "answers.jsonl has no answers for this task, only for 2 others (ids t1, t2)"
    )


def test_a_long_message_is_shown_around_its_first_difference():
    known, asked = f"{'x' * 900}7{'y' * 900}", f"{'x' * 900}8{'y' * 900}"
    text = Recording(source="a", answers={prompt(user(known)): ["1"]}).explain_missing(prompt(user(asked)))
    assert "user: ...xxx" in text
    assert "x8y" in text
    assert "x7y" in text
    assert len(text) < 500


@pytest.mark.parametrize(
    ("own", "whole"),
    [
        ([user("b"), assistant("2")], ["a", "1", "b", "2"]),
        ([assistant("2")], ["a", "2"]),
        ([user("a"), assistant("2")], ["a", "2"]),
        ([assistant("edited"), user("b"), assistant("2")], ["a", "edited", "b", "2"]),
    ],
    ids=["continued", "another choice", "sent again", "edited answer"],
)
def test_a_turn_holds_only_what_its_parent_lacks(own, whole):
    assert [one["content"] for one in join_messages([user("a"), assistant("1")], own)] == whole


@pytest.mark.parametrize(
    ("row", "flaw"),
    [
        ([], "a list, not an object"),
        ({"a": 1}, 'it has no "answer", no "answers"'),
        ({"answers": ["a"]}, '"answers" needs the "task"'),
        ({"messages": [user("a")], "answer": 3}, "an answer is text or a message with content or tool_calls, not 3"),
        ({"messages": [{"content": "x"}], "answer": "3"}, "a message or call has no 'role'"),
        ({"tokens": []}, "name the run's folder"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, row, flaw):
    source = write(tmp_path, {"messages": [user("a")], "answer": "1"}, row)
    with pytest.raises(ConfigError, match="answers.jsonl line 2: ") as error:
        read_recording(source)
    assert flaw in str(error.value)


def test_a_file_that_is_not_there_or_records_nothing_is_said(tmp_path):
    with pytest.raises(ConfigError, match="none.jsonl: cannot be read"):
        read_recording(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no answer is recorded there"):
        read_recording(write(tmp_path))


def test_the_episodes_of_an_earlier_run_are_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, _ = make_whole_run(tmp_path / "runs")
    run.end(run.begin("talk", turns=1, said=[user("6 * 7?"), assistant("42")]), status="failed", reason="broke")
    run.write_transcripts()
    run.close()
    assert read_recording(str(run.folder.path)).answers[prompt(user("6 * 7?"))] == ["42"]
