"""`swarmq client`: one line to paste, who has one, and no more."""

import os

import pytest
from click.testing import CliRunner

from swarmq import cli, keys
from swarmq.config import SwarmJob
from swarmq.errors import KeyRefusedError
from swarmq.keys import Invite
from swarmq.registries.clients import RevokedNames, read_clients


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that was up, the only one in `runs`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "math"
    folder.mkdir(parents=True)
    tree = {"run": "math", "policies": {"main": {"model": "x"}}, "broker": {"url": "amqp://u:p@127.0.0.1:1/"}}
    (folder / "resolved.toml").write_text(SwarmJob.build(tree).to_toml())
    root = keys.load_root(folder / "secret")
    invite = Invite(
        run="math",
        client="local",
        secret=keys.derive_client_secret(root, "local"),
        amqp_url="amqp://u:p@127.0.0.1:1/",
        base_url="http://127.0.0.1:2/v1",
        policies=("main",),
        kinds=("default",),
        group_size=8,
    )
    (folder / "invite").write_text(invite.encode())
    return folder


def swarmq(*arguments):
    return CliRunner().invoke(cli.main, [str(one) for one in arguments])


def test_a_client_is_invited_listed_and_removed(run):
    added = swarmq("client", "add", "alice", "--http", "--proxy", "https://gpu.example.org/v1")
    assert added.exit_code == 0, added.output
    [line] = added.output.splitlines()
    invite = Invite.decode(line.removeprefix("export SWARMQ_INVITE="))
    assert (invite.client, invite.over_http, invite.base_url) == ("alice", True, "https://gpu.example.org/v1")
    claims = keys.Claims(run="math", client="alice", episode_id="e", policies=("main",), expires_at=1e12)
    root = (run / "secret").read_bytes()
    assert keys.verify(root, keys.mint(invite.secret, claims), run="math", now=0.0).client == "alice"
    assert "alice" in swarmq("client", "list").output
    assert swarmq("client", "remove", "alice").exit_code == 0
    assert read_clients(run / "clients.json")["alice"].removed_at
    again = swarmq("client", "add", "alice", "--http")
    assert (again.exit_code, "was removed" in again.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add", "Alice", "--http"], "lower-case"),
        (["add", "alice"], "--management"),
        (
            ["add", "alice", "--amqp", "gpu.example.org"],
            "--amqp: the broker's url needs amqp:// or amqps:// and a host",
        ),
        (["add", "alice", "--http", "--proxy", "gpu"], "give http:// or https://"),
        (["add", "alice", "--http", "--ca", "nothing.pem"], "not a certificate in PEM form"),
        (["remove", "bob"], "no client 'bob': this run has invited nobody"),
        (["add", "bob", "--http", "--run", "elsewhere"], "elsewhere: not the folder of a run"),
        (["list", "--run", "elsewhere"], "elsewhere: not the folder of a run"),
        (["remove", "bob", "--run", "elsewhere"], "elsewhere: not the folder of a run"),
    ],
)
def test_what_is_wrong_is_one_line_and_nobody_is_invited(run, arguments, says):
    done = swarmq("client", *arguments)
    assert (done.exit_code, says in done.output) == (1, True), done.output
    assert not read_clients(run / "clients.json")
    assert swarmq("client", "list").output == "nobody was invited\n"
    assert not (run.parent.parent / "elsewhere").exists()


def test_several_runs_must_be_told_apart(run):
    (run.parent / "second").mkdir()
    (run.parent / "second" / "resolved.toml").touch()
    done = swarmq("client", "list")
    assert (done.exit_code, "there are math, second" in done.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "broker.url is not set: set it"),
        (["--set", "broker.url=nonsense", "--proxy", "http://h/v1"], "the broker's url needs amqp:// or amqps://"),
        (["--set", "broker.url=amqp://u:p@h/"], "--proxy is missing: give the URL by which clients reach the proxy"),
        (
            ["--set", "broker.url=amqp://u:p@h/", "--proxy", "h:8000"],
            "--proxy 'h:8000' is not a valid address: give http:// or https://",
        ),
        (
            ["--set", "broker.url=amqp://u:p@h/", "--proxy", "http://h/v1", "--amqp", "h"],
            "--amqp: the broker's url needs amqp:// or amqps:// and a host",
        ),
    ],
)
def test_a_run_that_cannot_be_opened_is_not_opened(tmp_path, monkeypatch, arguments, says):
    monkeypatch.delenv("SWARMQ_AMQP_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('run = "r"\n[policies.main]\nmodel = "m"\n')
    done = swarmq("invite", "job.toml", *arguments)
    assert (done.exit_code, says in done.output) == (1, True), done.output
    assert not (tmp_path / "runs").exists()


def test_every_proxy_of_a_run_in_parts_is_in_its_invite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(
        'run = "r"\n[policies.main]\nmodel = "m"\n[broker]\nurl = "amqp://u:p@h/"\n[proxy]\nport = 8000\ncount = 2\n'
    )
    done = swarmq("invite", "job.toml")
    invite = Invite.decode(done.output.removeprefix("export SWARMQ_INVITE="))
    assert invite.base_urls == ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8001/v1")
    (tmp_path / "runs" / "r" / "endpoints.json").touch()
    again = swarmq("invite", "job.toml")
    assert (again.exit_code, "started by `swarmq up`" in again.output) == (1, True)


def test_an_operators_tokens_are_revoked_by_name(run):
    made = {name: swarmq("token", run, "--role", "read", "--name", name).output.strip() for name in ("java", "ops")}
    root = (run / "secret").read_bytes()
    removed = RevokedNames(run / "clients.json")
    assert keys.verify_operator(root, made["java"], run="math", now=0.0, removed=removed).name == "java"
    done = swarmq("token", run, "--revoke", "--name", "java")
    assert (done.exit_code, done.output) == (0, "revoked: all tokens of java are refused\n")
    removed = RevokedNames(run / "clients.json")
    with pytest.raises(KeyRefusedError, match="operator 'java' were revoked"):
        keys.verify_operator(root, made["java"], run="math", now=0.0, removed=removed)
    assert keys.verify_operator(root, made["ops"], run="math", now=0.0, removed=removed).name == "ops"
    assert swarmq("client", "list").output == "nobody was invited\n", "who has a token is no client"
    again = swarmq("token", run, "--role", "read", "--name", "java")
    assert (again.exit_code, "revoked permanently: choose another name" in again.output) == (1, True)
    assert swarmq("client", "add", "java", "--http").exit_code == 0, "a client of that name is somebody else"


@pytest.mark.parametrize(("days", "says"), [("nan", "not a number of days"), ("inf", "range"), ("3651", "range")])
def test_every_token_ends_one_day(run, days, says):
    done = swarmq("token", run, "--role", "read", "--days", days)
    assert (done.exit_code > 0, says in done.output) == (True, True)


@pytest.mark.parametrize("arguments", [[], ["--role", "read", "--revoke"]])
def test_a_token_is_made_for_roles_or_revoked(run, arguments):
    done = swarmq("token", run, *arguments)
    assert (
        done.exit_code,
        "--role: name at least one role, or revoke tokens with --revoke and no role" in done.output,
    ) == (1, True)


def test_no_name_is_revoked_that_was_not_said(run):
    done = swarmq("token", run, "--revoke")
    assert (done.exit_code, "--revoke needs --name NAME" in done.output) == (1, True)
    assert swarmq("token", run, "--role", "read").exit_code == 0, "the default name is as good as before"


@pytest.mark.parametrize("name", ["", "Ada", "a b", "../a"])
def test_a_token_and_a_viewer_have_a_name_that_can_be_said_again(run, name):
    for command in ("token", "viewer"):
        done = swarmq(command, run, "--name", name, *(["--role", "read"] if command == "token" else []))
        assert (done.exit_code, f"--name {name!r}: 1 to 40 lower-case letters" in done.output) == (1, True)


def test_a_run_folder_is_its_owners_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('run = "r"\n[policies.main]\nmodel = "m"\nengine.urls = ["http://h"]\n')
    before = os.umask(0o022)
    try:
        swarmq("invite", "job.toml", "--set", "broker.url=amqp://u:p@h/", "--proxy", "http://h/v1")
        monkeypatch.setattr("swarmq.collector.main.run", lambda job, **_: job.run_folder.inbox.write_text("prompts"))
        assert swarmq("collector", "runs/r/resolved.toml").exit_code == 0
        assert os.umask(0o022) == 0o022, "only our own files are meant"
    finally:
        os.umask(before)
    made = [tmp_path / "runs" / "r", *(tmp_path / "runs" / "r").iterdir()]
    assert len(made) >= 5
    assert [path.name for path in made if path.stat().st_mode & 0o77] == []
