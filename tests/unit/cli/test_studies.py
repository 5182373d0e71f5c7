"""`swarmq study` says what is wrong with a study, and leaves nothing behind for one that has never run."""

import pytest
from click.testing import CliRunner

from swarmq.cli import main

STUDY = """
name = "toy"
question = "Is b better?"
smallest_effect = 0.1
seeds = [0, 1]
metric = { name = "score" }
trial = { function = "study_of_toys:attempt", max_seconds = 9 }
arms = { a = {}, b = { settings = { x = 1 } } }
budget = { gpu_seconds = 100 }
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "study_of_toys.py").write_text("def attempt(one): return {'score': 1.0}\n")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [["status"], ["report"], ["stop", "--reason", "x"], ["approve", "study.toml", "b", "--by", "ada"],
     ["fork", "study.toml", "other"]],
)  # fmt: skip
def test_commands_on_a_study_that_has_never_run_say_so_and_write_nothing(study, command):
    before = sorted(study.rglob("*"))
    result = CliRunner().invoke(main, ["study", *command])
    assert result.exit_code == 1
    assert "the study has never run; start it with `swarmq study run`" in str(result.output)
    assert sorted(study.rglob("*")) == before


def test_new_refuses_a_name_that_no_study_may_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["study", "new", "Loss_A"])
    assert (result.exit_code, [*tmp_path.iterdir()]) == (2, [])
    assert "at most 32 lower-case letters" in result.output


def test_check_finds_a_function_that_is_not_there(study):
    assert CliRunner().invoke(main, ["study", "check"]).exit_code == 0
    (study / "study.toml").write_text(STUDY.replace(":attempt", ":attemt"))
    result = CliRunner().invoke(main, ["study", "check"])
    assert (result.exit_code, "did you mean 'attempt'?" in result.output) == (1, True), result.output
