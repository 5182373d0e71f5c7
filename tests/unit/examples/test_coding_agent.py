"""The tutorial `examples/coding_agent`: the toy agent as a command, its folders and demonstrations; the tasks for real coding agents."""

import json
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from benchmarks.examples import manifest
from benchmarks.examples.course import Course
from examples.coding_agent import demonstrations, editor, environment
from examples.coding_agent.environment import MEANINGS, PAIRS, Problem, evaluate, problems

from support.commands import command_world
from support.scripted_chat import answers_of, scripted_chat, spoken
from swarmq.black_box.agent import CommandAgent, CommandOptions, read_task
from swarmq.cli.run import run
from swarmq.config import SwarmJob

EXAMPLE = Path(__file__).parents[3] / "examples/coding_agent"
TASKS = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
OPTIONS = CommandOptions(argv=("agent",), test="true", folder=EXAMPLE / "repositories")
RIGHT = {meaning: expression for expression, meanings in MEANINGS.items() for meaning in meanings}
ADD = Problem("fan", "Return the sum.", "a + b", "a - b")


@pytest.fixture
def folder(tmp_path):
    for name, text in ADD.files().items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_editor(url, folder):
    environment = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "key", "OPENAI_MODEL": "main"}
    command = [sys.executable, "-S", editor.__file__, ADD.prompt]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def passes(folder):
    return (
        subprocess.run([sys.executable, "-S", "test.py"], cwd=folder, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.parametrize(
    ("script", "line", "passed"),
    [
        (["read", "return a + b"], "    return a + b", True),
        (["return a * b"], "    return a * b", False),
        (["write", "", "read"], "    return a - b", False),
        (["return a +"], "    return a +", False),
    ],
    ids=["read and mended", "guessed", "out of turns", "no expression"],
)
def test_the_toy_agent_replaces_the_last_line(folder, script, line, passed):
    with scripted_chat(script) as chat:
        done = run_editor(chat.url, folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "main.py").read_text().splitlines()[-1] == line
    assert passes(folder) is passed
    assert len(chat.requests) == len(script)


def test_the_toy_agent_fails_if_the_model_does_not_answer(folder):
    with scripted_chat([]) as chat:  # the endpoint breaks the connection
        assert run_editor(chat.url, folder).returncode != 0
    assert not passes(folder)


@pytest.mark.parametrize("way", ["careful", "careless", "blind"])
def test_demonstrations_show_what_the_agent_sends(folder, way):
    shown = demonstrations.chat(ADD, way, random.Random(5))
    with scripted_chat(answers_of(shown)) as chat:
        run_editor(chat.url, folder)
    assert chat.conversation() == spoken(shown[:-1])
    assert passes(folder) is (way == "careful" or shown[-1]["content"] == "return a + b")


def test_no_two_expressions_agree_on_all_pairs_and_no_docstring_means_two():
    assert len({tuple(evaluate(expression, *pair) for pair in PAIRS) for expression in MEANINGS}) == len(MEANINGS)
    assert len(RIGHT) == sum(map(len, MEANINGS.values()))


def test_splits_share_no_function_and_folders_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "FOLDERS", tmp_path)
    names = [
        {problem.name for problem in islice(problems(random.Random(0), split), 500)} for split in ("train", "held_out")
    ]
    assert not names[0] & names[1]
    trained, held_out = (list(environment.tasks(split, 20)) for split in ("train", "held_out"))
    assert len({task["id"] for task in trained + held_out}) == 40
    for task in trained + held_out:
        assert {path.name for path in (tmp_path / task["folder"]).iterdir()} == {"main.py", "test.py"}
    assert trained == list(environment.tasks("train", 20)), "again the same"


async def test_the_command_of_the_manifest_is_scored_by_the_test(tmp_path, monkeypatch):
    """The README's command is that of the manifest; a model that reads passes, one that guesses does not."""
    text = manifest.load("coding_agent").commands["default"]
    assert text in (EXAMPLE / "README.md").read_text()
    name, *words = Course("coding_agent", manifest.load("coding_agent"), 0, tmp_path).command("default", "--queue")
    assert name == "run"
    given = run.make_context("run", words).params
    assert given["queue"]
    assert given["folder"] == environment.FOLDERS
    monkeypatch.setattr(environment, "FOLDERS", tmp_path / "folders")
    (task,) = environment.tasks("train", 1)
    options = CommandOptions(
        argv=(sys.executable, *given["command"][1:]),
        test=given["test"].replace("python", sys.executable),
        restore=given["restore"],
        context=given["context"],
        folder=environment.FOLDERS,
        logs=tmp_path / "logs",
    )

    def read_and_mend(prompt):
        found = re.search('"""(.*)"""', prompt)
        return f"return {RIGHT[found[1]]}" if found else "read"

    for model, reward in ((read_and_mend, 1.0), (lambda _: "return a", 0.0)):
        async with command_world(tmp_path / model.__name__.strip("<>"), model) as world:
            report = await world.client.evaluate([task], CommandAgent(options), progress=False)
        assert (report.mean_reward, report.failed) == (reward, 0)


@pytest.mark.parametrize("task", TASKS, ids=[task["id"] for task in TASKS])
def test_one_of_two_tests_fails_until_the_bug_is_mended(task):
    prompt, folder, _ = read_task(task, OPTIONS)
    assert f"{task['id']}.py" in prompt
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--disable-plugin-autoload",  # whose imports take seconds
        "--import-mode=prepend",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        [*command, "--rootdir", ".", "tests"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in done.stdout or "2 failed" in done.stdout, done.stdout


def test_every_folder_has_a_task():
    assert {path.name for path in (EXAMPLE / "repositories").iterdir()} == {task["folder"] for task in TASKS}


def test_the_job_is_valid():
    assert SwarmJob.load(EXAMPLE / "job_h200.toml").policies["main"].engine.max_model_len == 65_536
