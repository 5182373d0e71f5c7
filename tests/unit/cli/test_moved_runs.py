"""The run folder that is named is the one that is meant; a copy of a run whose parts look elsewhere is no place for changes."""

import shutil
import sqlite3

import msgspec
import pytest
from click.testing import CliRunner

from swarmq import cli
from swarmq.config import SwarmJob
from swarmq.config_errors import list_file_settings
from swarmq.messages import Change, Control
from swarmq.up.deployment import _with_whole_paths

ENGINES = ("http://127.0.0.1:1", "http://127.0.0.1:2")


def swarmq(*arguments):
    return CliRunner().invoke(cli.main, [str(one) for one in arguments])


@pytest.fixture
def run(tmp_path):
    tree = {
        "run": "math",
        "folder": str(tmp_path / "runs"),
        "policies": {"main": {"model": "m", "engine": {"urls": list(ENGINES)}}},
        "broker": {"url": "amqp://u:p@127.0.0.1:1/"},
    }
    folder = tmp_path / "runs" / "math"
    folder.mkdir(parents=True)
    (folder / "resolved.toml").write_text(SwarmJob.build(tree).to_toml())
    return folder


@pytest.fixture
def moved(run):
    return run.rename(run.parent / "math-of-may")


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_engines_of_a_moved_run_are_those_of_the_folder_that_is_named(run, moved):
    assert swarmq("engine", "remove", moved, ENGINES[0]).exit_code == 0
    assert msgspec.json.decode((moved / "engines.json").read_bytes()) == {"main": [ENGINES[1]]}
    listed = swarmq("engine", "list", moved).output
    assert (ENGINES[0] in listed, ENGINES[1] in listed) == (False, True)
    assert not run.exists(), "nothing is made where the run was before"


def test_a_feed_into_a_moved_run_knows_what_was_changed_there(moved, tmp_path):
    change = Change(number=1, path="mix", before={"default": 1.0}, value={"code": 1.0}, base={"default": 1.0})
    with sqlite3.connect(moved / "collector.sqlite") as ledger:
        ledger.execute("CREATE TABLE control (body BLOB)")
        ledger.execute(
            "INSERT INTO control VALUES (?)", [msgspec.msgpack.encode(Control(run="math", number=1, changes=(change,)))]
        )
    ledger.close()
    fed = swarmq("feed", moved, tmp_path / "data.jsonl", "--kind", "default")
    assert (fed.exit_code, "--kind default: unknown kind; choose one of code" in fed.output) == (1, True), fed.output


def test_the_clients_of_a_moved_run_are_those_of_the_folder_that_is_named(run, moved):
    (moved / "clients.json").write_text('[{"name": "alice", "added_at": 0}]')
    assert "alice" in swarmq("client", "list", "--run", moved).output
    assert swarmq("client", "remove", "alice", "--run", moved).exit_code == 0
    assert not run.exists()


@pytest.mark.parametrize(
    "line",
    [
        "status RUN",
        "watch RUN --once",
        "set RUN groups.group_size=2",
        "pause RUN",
        "drain RUN",
        "resume RUN",
        "checkpoint RUN",
        "stop RUN --after 3",
        "feed RUN data.jsonl",
        "feed RUN data.jsonl --eval",
        "engine list RUN",
        "engine add RUN http://127.0.0.1:3",
        "engine remove RUN http://127.0.0.1:1",
        "engine start RUN",
        "dead list RUN",
        "dead show RUN id",
        "dead requeue RUN",
        "dead purge RUN --all",
        "token RUN --role read",
        "token RUN --revoke",
        "viewer RUN",
        "client add bob --http --run RUN",
        "client list --run RUN",
        "client remove bob --run RUN",
        "host add gpu2 --run RUN",
        "host list --run RUN",
        "host remove gpu2 --run RUN",
    ],
)
def test_what_reaches_the_parts_of_a_run_is_not_done_in_a_copy_of_its_folder(run, tmp_path, line):
    copy = shutil.copytree(run, tmp_path / "copy")
    before = files(tmp_path)
    done = swarmq(*line.replace("RUN", str(copy)).split())
    assert done.exit_code == 1
    assert (
        done.output
        == f"swarmq: {copy}: a copy of a run folder; the processes of this run use {run}: name that folder\n"
    )
    assert files(tmp_path) == before


def test_a_link_to_a_run_folder_is_no_copy(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    done = swarmq("engine", "remove", tmp_path / "link", ENGINES[0])
    assert done.exit_code == 0, done.output


def test_the_job_of_a_run_continues_that_run_wherever_it_is_started(run, tmp_path, monkeypatch):
    job = SwarmJob.build({"run": "math", "folder": "runs", "policies": {"main": {"model": "m"}}})
    (run / "job.toml").write_text(job.to_toml())
    monkeypatch.chdir("/")
    assert SwarmJob.load(run / "job.toml").run_folder.path == run
    monkeypatch.chdir(run)
    assert SwarmJob.load("job.toml").run_folder.path == run
    (tmp_path / "elsewhere").mkdir()
    moved = run.rename(tmp_path / "elsewhere" / "math")
    assert SwarmJob.load(moved / "job.toml").run_folder.path == moved
    assert SwarmJob.load(moved / "job.toml", sets=["folder=other"]).folder == "other"
    assert SwarmJob.load(moved / "job.toml", sets=["run=second"]).folder == "runs", "another run"


def test_the_job_of_a_run_finds_its_files_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    (tmp_path / "shown.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    train = {
        "advantage": "gae",
        "critic": {"model": "toy"},
        "sft": {"demonstrations": "shown.jsonl"},
        "loss": {"kl": 0.1},
        "reference": "toy",
    }
    taught = {"loss": {"name": "distill"}, "teacher": "toy"}
    policies = {
        "main": {"model": "toy", "train": train},
        "taught": {"model": "Qwen/Qwen3-4B", "train": taught},
        "other": {"model": "Qwen/Qwen3-4B", "train": taught | {"teacher": "policies.served"}},
        "served": {"model": "Qwen/Qwen3-4B", "trained": False},
    }
    secured = {"certificate": "shown.jsonl", "key": "shown.jsonl"}
    files = {"broker": secured, "proxy": secured, "methods_folder": "."}
    stored = _with_whole_paths(SwarmJob.build({"run": "math", "policies": policies, **files}))
    main, taught, other, served = stored.policies.values()
    model, shown = (str(tmp_path / name) for name in ("toy", "shown.jsonl"))
    assert (main.model, main.train.critic.model, main.train.reference, taught.train.teacher) == (model,) * 4
    assert (main.train.sft.demonstrations, stored.broker.key, stored.proxy.certificate) == (shown,) * 3
    assert stored.methods_folder == str(tmp_path)
    assert (served.model, served.train.critic.model, other.train.teacher) == ("Qwen/Qwen3-4B", None, "policies.served")
    named = {path.replace("main", "*").replace("taught", "*") for path, _ in stored.list_files()}
    settings = {path for path, _ in list_file_settings(SwarmJob)}
    assert settings - named == {"policies.*.train.teacher_tokenizer"}, "only for served teachers"
