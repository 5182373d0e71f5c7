"""What is wrong with a way to join a run from another host is said before anything is connected."""

import time

import pytest
from click.testing import CliRunner

from swarmq import cli, keys
from swarmq.registries.hosts import HostRegistry, InvitedHost

INVITE = keys.HostInvite(
    run="r",
    host="gpu2",
    user="r.host:gpu2",
    amqp_url="amqp://user:word@127.0.0.1:9/",
    root=b"r" * 32,
    engine_secret="s",
    expires_at=1.0,
)


def swarmq(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.main, [str(word) for word in words])


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("proxy", 2, "Missing argument 'JOB', or --join INVITE"),
        ("proxy job.toml --host gpu2", 1, "--host goes with an invite"),
        ("proxy job.toml --join INVITE", 1, "leave out JOB, --set and --number"),
        ("proxy --join INVITE --set groups.group_size=2", 1, "leave out JOB, --set and --number"),
        ("proxy --join INVITE --certificate nothing.pem", 1, "--certificate and --key belong together"),
        ("engine start --join INVITE --certificate nothing.pem --key INVITE", 1, "nothing.pem: no such file"),
        ("engine start runs/r --url http://gpu2:1", 1, "go with an invite"),
        ("proxy --join nothing", 1, "--join nothing: neither an invite nor a file with one"),
        ("proxy --join INVITE", 1, "expired at 1970-01-01"),
        ("engine start", 2, "Name a RUN, or an invite with --join"),
        ("engine start runs/r --join INVITE", 2, "Name a RUN, or an invite with --join"),
        ("engine start --join INVITE", 1, "expired at 1970-01-01"),
    ],
)
def test_a_wrong_way_to_join_is_one_line(line, status, says, tmp_path):
    (tmp_path / "gpu2.invite").write_text(INVITE.encode() + "\n")
    done = swarmq(*line.replace("INVITE", str(tmp_path / "gpu2.invite")).split())
    assert (done.exit_code, says in done.output) == (status, True), done.output


def test_hosts_are_listed_with_what_runs_there_and_until_when_they_may_join(tmp_path):
    run = tmp_path / "r"
    run.mkdir()
    (run / "resolved.toml").write_text(f'run = "r"\nfolder = "{tmp_path}"\n[policies.main]\nmodel = "m"\n')
    assert "no host was invited" in swarmq("host", "list", "--run", run).output
    with HostRegistry.open(run / "hosts.json") as hosts:
        for name, expires_at, engines in [("gpu2", 1.0, {}), ("gpu3", time.time() + 99, {"http://gpu3:1": "main"})]:
            hosts.put(InvitedHost(name=name, added_at=0.5, expires_at=expires_at, broker_user="u", engines=engines))
    lines = swarmq("host", "list", "--run", run).output.splitlines()
    assert ["expired" in line for line in lines if "gpu" in line] == [True, False]
    assert "http://gpu3:1" in lines[-1]
