"""`swarmq client`: one line to paste, who has one, and no more."""

import pytest
from click.testing import CliRunner

from swarmq import cli, keys
from swarmq.config import SwarmJob
from swarmq.keys import Invite
from swarmq.members import read_members


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
        secret=keys.client_secret(root, "local"),
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
    assert read_members(run / "clients.json")["alice"].removed_at
    again = swarmq("client", "add", "alice", "--http")
    assert (again.exit_code, "was removed" in again.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["add", "Alice", "--http"], "lower-case"),
        (["add", "alice"], "--management"),
        (["add", "alice", "--amqp", "gpu.example.org"], "give amqp:// or amqps:// and a host"),
        (["add", "alice", "--http", "--proxy", "gpu"], "give http:// or https://"),
        (["add", "alice", "--http", "--ca", "nothing.pem"], "not a certificate in PEM form"),
        (["remove", "bob"], "no client 'bob': this run has invited nobody"),
        (["list", "--run", "elsewhere"], None),
    ],
)
def test_what_is_wrong_is_one_line_and_nobody_is_invited(run, arguments, says):
    done = swarmq("client", *arguments)
    assert done.exit_code == (1 if says else 0)
    assert (says or "nobody was invited") in done.output
    assert not read_members(run / "clients.json")


def test_several_runs_must_be_told_apart(run):
    (run.parent / "second").mkdir()
    (run.parent / "second" / "resolved.toml").touch()
    done = swarmq("client", "list")
    assert (done.exit_code, "there are math, second" in done.output) == (1, True)
