"""`swarmq study` says what is wrong with a study, and leaves nothing behind for one that has never run."""

import os
import sys

import msgspec
import pytest
from click.testing import CliRunner

from support.studies import FIRST, study_of
from swarmq.cli import main
from swarmq.cli.studies import _split_gpus
from swarmq.keys import HostInvite
from swarmq.studies.identity import TrialMaker
from swarmq.studies.ledger import LedgerFile, StudyFolder, read_ledger
from swarmq.studies.records import StudyOpened, StudyStopped
from swarmq.studies.state import StudyState
from swarmq.studies.study import hash_study, load_study

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
     ["fork", "study.toml", "other"], ["invite", "study.toml", "gpu2"]],
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


def test_check_names_imported_modules_that_no_hash_contains(study):
    (study / "helper_of_toys.py").write_text("X = 1\n")
    (study / "importing_toys.py").write_text("import helper_of_toys\n\ndef attempt(one): return {}\n")
    text = STUDY.replace("study_of_toys:", "importing_toys:")
    for code, is_named in (("", True), (', code = ["helper_of_toys.py"]', False)):
        for name in ("importing_toys", "helper_of_toys"):
            sys.modules.pop(name, None)
        (study / "study.toml").write_text(text.replace(", max_seconds", f"{code}, max_seconds"))
        said = CliRunner().invoke(main, ["study", "check"]).output
        assert ("hosts that join by an invite lack it: helper_of_toys.py\n" in said) is is_named, said


def test_check_says_how_many_lost_trials_the_budget_survives(study):
    said = CliRunner().invoke(main, ["study", "check"]).output
    assert "4 trials" in said
    lost = "Each running trial whose worker and leader die together"
    assert f"the budget of 100 GPU seconds is enough for 10 such trials, 6 more than that. {lost}" in said
    (study / "study.toml").write_text(STUDY.replace("= 100", "= 100, trials = 3"))
    said = CliRunner().invoke(main, ["study", "check"]).output
    assert f"the budget of 3 starts is enough for 3 such trials. {lost}" in said


def test_files_that_do_not_travel_are_named_before_a_host_is_invited(study, ledger):
    (study / "x").mkdir()
    (study / "common.py").touch()
    (study / "study_of_toys.py").rename(study / "x" / "study_of_toys.py")
    (study / "studies").rename(study / "x" / "studies")
    for outside, why in [
        ("../common.py", "../common.py: outside "),
        (str(study / "common.py"), "--amqp: missing"),  # it may be at the same path there
    ]:
        plan = f'{{ code = ["{outside}"], function'
        (study / "x" / "study.toml").write_text(STUDY.replace("{ function", plan))
        checked = CliRunner().invoke(main, ["study", "check", str(study / "x" / "study.toml")])
        assert f"not sent to hosts that join by an invite: {outside}\n" in checked.output
        StudyFolder(study / "x" / "study.toml", "toy").endpoint.write_text("amqp://user:secret@127.0.0.1:5672/")
        invited = CliRunner().invoke(main, ["study", "invite", str(study / "x" / "study.toml"), "gpu2"])
        assert (invited.exit_code, why in invited.output) == (1, True), invited.output


@pytest.mark.parametrize(
    ("stopped", "next_step"),
    [
        (StudyStopped(kind="complete", reason="done"), "done; for its report: swarmq study report study.toml"),
        (StudyStopped(kind="asked", reason="enough"), "enough; to go on, give --resume REASON"),
        (
            StudyStopped(kind="budget", reason="spent"),
            "spent; to go on, raise its budget in study.toml and give --amend REASON",
        ),
        (StudyStopped(kind="rule", reason="seen"), "seen; for its report: swarmq study report study.toml"),
    ],
)
def test_a_run_of_a_stopped_study_says_what_can_be_done(study, stopped, next_step):
    told = load_study(study / "study.toml")
    inputs = TrialMaker(told, study).hash_inputs()
    ledger = LedgerFile(StudyFolder(study / "study.toml", "toy").ledger)
    ledger.append([StudyOpened(study=told, digest=hash_study(told), inputs=inputs), stopped])
    ledger.close()
    result = CliRunner().invoke(main, ["study", "run"])
    assert result.output == f"stopped: {next_step}\n"


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A host with four GPUs, of which the last three are this process's."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nfor n in 0 1 2 3; do echo $n, GPU-$n, 80000, 80000, 9.0; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")


@pytest.mark.parametrize(
    ("each", "parallel", "lanes"),
    [(1, None, ["1", "2", "3"]), (1, 2, ["1", "2"]), (2, None, ["1,2"]), (3, 9, ["1,2,3"])],
)
def test_the_lanes_of_a_worker_have_gpus_of_their_own_among_those_that_it_was_given(gpus, each, parallel, lanes):
    study = study_of(trial=FIRST["trial"] | {"gpus": each})
    assert [lane["CUDA_VISIBLE_DEVICES"] for lane in _split_gpus(study, parallel)] == lanes


def test_more_workers_than_gpus_are_refused(study, gpus):
    result = CliRunner().invoke(main, ["study", "run", "--workers", "4"])
    assert (
        result.exit_code,
        "4 workers need 4 GPUs, 1 each (trial.gpus), and this host has enough for 3" in result.output,
    ) == (1, True)
    (study / "study.toml").write_text(STUDY.replace("max_seconds", "gpus = 4, max_seconds"))
    result = CliRunner().invoke(main, ["study", "run"])
    assert (result.exit_code, "a trial needs 4 GPUs, and this host has 3" in result.output) == (1, True)
    assert not (study / "studies").exists()


@pytest.fixture
def ledger(study):
    """The ledger of the study, which was opened."""
    path = StudyFolder(study / "study.toml", "toy").ledger
    ledger = LedgerFile(path)
    ledger.append([StudyOpened(study=load_study(study / "study.toml"), digest="d", inputs="i")])
    ledger.close()
    return path


def test_a_fork_is_a_short_file_that_says_the_same_and_names_its_parent(study, ledger):
    refused = CliRunner().invoke(main, ["study", "fork", "study.toml", "toy"])
    assert (refused.exit_code, "choose another name" in refused.output) == (1, True), refused.output
    assert CliRunner().invoke(main, ["study", "fork", "study.toml", "other"]).exit_code == 0
    fork = load_study(study / "other.toml")
    assert fork.parent.startswith("toy@")
    assert msgspec.structs.replace(fork, name="toy", parent="") == load_study(study / "study.toml")
    assert "max_failures" not in (study / "other.toml").read_text(), "a default"


def test_a_study_that_was_stopped_keeps_its_reason(study, ledger):
    assert CliRunner().invoke(main, ["study", "stop", "--reason", "clear"]).exit_code == 0
    assert "already stopped: clear" in CliRunner().invoke(main, ["study", "stop", "--reason", "no"]).output
    assert StudyState(read_ledger(ledger)).stopped.reason == "clear"


def test_an_invite_to_a_broker_that_other_hosts_cannot_reach_is_refused(study):
    folder = StudyFolder(study / "study.toml", "toy")
    ledger = LedgerFile(folder.ledger)
    ledger.append([StudyOpened(study=load_study(study / "study.toml"), digest="", inputs="")])
    ledger.close()
    folder.endpoint.write_text("amqp://user:secret@127.0.0.1:5672/")
    result = CliRunner().invoke(main, ["study", "invite", "study.toml", "gpu2"])
    assert result.exit_code == 1
    assert "--amqp: missing, and the study's RabbitMQ listens on this host alone" in result.output
    assert not folder.hosts.exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"run": "math"}, "this is an invite to the run 'math', not to a study"), ({"expires_at": 1.0}, "expired at 1970-01-01")],
)  # fmt: skip
def test_an_invite_that_is_no_good_is_refused_before_anything_is_written(tmp_path, monkeypatch, changes, why):
    monkeypatch.chdir(tmp_path)
    fields = {"run": "study-toy", "host": "gpu2", "user": "u", "amqp_url": "amqp://u:p@127.0.0.1:1/", "root": b""}
    invite = HostInvite(**fields | {"engine_secret": "", "expires_at": 1e12} | changes)
    result = CliRunner().invoke(main, ["study", "worker", "--join", invite.encode()])
    assert (result.exit_code, why in result.output) == (1, True), result.output
    assert [*tmp_path.iterdir()] == []


def test_the_options_that_open_the_broker_belong_together(study):
    for options in (["--tls-port", "5671"], ["--certificate", "cert.pem"], ["--key", "key.pem"]):
        result = CliRunner().invoke(main, ["study", "run", *options])
        assert (result.exit_code, "give all three, or none" in result.output) == (1, True)
    (study / "cert.pem").touch()
    (study / "key.pem").touch()
    opened = ["--tls-port", "5671", "--certificate", "cert.pem", "--key", "key.pem"]
    result = CliRunner().invoke(main, ["study", "run", *opened], env={"SWARMQ_AMQP_URL": "amqp://127.0.0.1:1/"})
    assert (result.exit_code, "names another one: give one of them" in result.output) == (1, True), result.output
    assert not (study / "studies").exists()
