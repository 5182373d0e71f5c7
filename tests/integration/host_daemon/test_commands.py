"""`swarmq ... --host URL`: commands do the same for a run of another host, and say what the token does not permit."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from click.testing import CliRunner

from support.host import ScriptedLauncher, open_host, token
from support.run_folder import make_whole_run
from swarmq import cli
from swarmq.cli.remote import INSTEAD, find_command
from swarmq.config import SwarmJob
from swarmq.remote.commands import ROLES
from swarmq.runtime.logs import redirect_to


def run_command(*words: object):
    return CliRunner(env={"COLUMNS": "120"}).invoke(cli.main, [str(word) for word in words])


@pytest.fixture
async def host(tmp_path):
    with redirect_to(lambda _: None):  # the output of commands is that of this process
        async with open_host(tmp_path / "runs", ScriptedLauncher()) as opened:
            yield opened


@pytest.fixture
def swarmq(host):
    """`await swarmq("status", "r", role="read")`."""

    def run(*words, role="admin"):
        return asyncio.to_thread(run_command, *words, "--host", host.url, "--token", token(role))

    return run


@pytest.mark.parametrize("words", [*ROLES, *INSTEAD], ids=" ".join)
def test_commands_for_other_hosts_have_their_options(words):
    options = [name for param in find_command(cli.main, words).params for name in param.opts]
    assert options.count("--host") == options.count("--token") == 1


async def test_a_command_prints_what_it_prints_on_the_host(host, swarmq):
    run, ids = make_whole_run(host.folder.path)
    run.close()
    run.write_transcripts()
    for name, *rest in (("inspect", ids["failed"]), ("inspect", "--dropped", "--json")):
        here = run_command(name, run.folder.path, *rest)
        there = await swarmq(name, "r", *rest, role="read")
        assert there.exit_code == here.exit_code == 0, there.output
        assert there.stdout == here.stdout != ""


async def test_an_error_there_is_an_error_here(host, swarmq):
    (host.folder.path / "r").mkdir()
    there = await swarmq("status", "r")
    assert (there.exit_code, "not the folder of a run that was up" in there.stderr) == (1, True), there.output
    for name in ("none", "runs/r", "../runs"):
        there = await swarmq("status", name)
        assert (there.exit_code, f"{name}: name a run of the host" in there.stderr) == (1, True), there.output


async def test_files_of_this_machine_do_not_get_there(host, swarmq):
    (host.folder.path / "r").mkdir()
    there = await swarmq("client", "add", "ann", "--run", "r", "--ca", "ca.pem")
    assert "--ca names a file of this machine" in there.stderr
    assert there.exit_code == 1


async def test_a_host_names_its_management_api_itself(host, swarmq, monkeypatch):
    """The password of its broker would be sent to any other address."""
    (host.folder.path / "r").mkdir()
    invite = ("client", "add", "ann", "--run", "r")
    there = await swarmq(*invite, "--management", "http://elsewhere:15672", role="operate")
    assert (there.exit_code, "--management: the password of the host's broker" in there.stderr) == (1, True), (
        there.output
    )
    monkeypatch.setenv("SWARMQ_MANAGEMENT_URL", "http://laptop:15672")
    there = await swarmq(*invite, role="operate")
    assert "not the folder of a run that was up" in there.stderr


async def test_a_file_that_a_command_writes_comes_back(host, swarmq, tmp_path):
    run, ids = make_whole_run(host.folder.path)
    run.close()
    run.write_transcripts()
    here = run_command("inspect", run.folder.path, ids["trained"], "--html", tmp_path / "here.html")
    assert here.exit_code == 0, here.output
    there = await swarmq("inspect", "r", ids["trained"], "--html", tmp_path / "there.html", role="read")
    assert there.exit_code == 0, there.output
    assert (tmp_path / "there.html").read_bytes() == (tmp_path / "here.html").read_bytes()
    there = await swarmq("plot", "r", "--out", tmp_path / "there.svg", role="read")
    assert (there.exit_code, there.output) == (0, "written to there.svg\n")
    assert b"<svg" in (tmp_path / "there.svg").read_bytes()
    there = await swarmq("plot", "r", "../r", "--out", tmp_path / "no.svg")
    assert (there.exit_code, (tmp_path / "no.svg").exists()) == (1, False)
    assert "../r: name a run of the host" in there.output


async def test_a_replay_is_written_beside_the_run_it_is_of(host, swarmq):
    (host.folder.path / "r").mkdir()
    for words, why in (
        (("/tmp/out",), "/tmp/out: give a name; with --host the replay is written to r/replays/NAME"),
        (("again", "--from", "../other"), "--from ../other: name a folder in the run's"),
        (("again", "--steps", "2:9"), "not the folder of a run that was up"),
    ):
        there = await swarmq("replay", "r", *words)
        assert (there.exit_code, why in there.stderr) == (1, True), there.output
    assert not (host.folder.path / "r" / "replays").exists()


async def test_a_data_set_is_read_here_and_checked_before_it_is_sent(host, swarmq, tmp_path):
    await host.launch("r")
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"id": "a"}\n{"id": "a"}\n')
    for words, why in (
        ((data,), "the id 'a' is already that of"),
        ((tmp_path / "none.jsonl",), "none.jsonl"),
        ((data, "--curriculum", "m:f"), "--curriculum cannot be combined with --host"),
        ((data, "--limit", "1"), "run 'r' is starting: tasks need a run that is up"),
    ):
        there = await swarmq("feed", "r", *words, role="operate")
        assert (there.exit_code, why in there.stderr) == (1, True), there.output
    said = await swarmq("feed", "r", data, "--limit", "1", role="read")
    assert "has the roles read; this needs operate" in said.stderr


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("worker", "m:f"), "swarmq client add NAME --http"),
        (("train", "job.toml"), "swarmq up JOB --host URL"),
        (("dashboard",), "each proxy of a run serves a dashboard"),
        (("warm", "job.toml", "chats.jsonl", "out"), "docs/how-to/laptop.md"),
        (("engine", "start"), "docs/how-to/laptop.md"),
    ],
    ids=lambda words: words[0],
)
def test_a_command_for_this_machine_says_so(words, instead):
    said = run_command(*words, "--host", "http://gpu-box:7000")
    assert said.exit_code == 1
    assert f"--host http://gpu-box:7000: `swarmq {words[0]}" in said.stderr
    assert "works on this machine only" in said.stderr
    assert instead in said.stderr


async def test_parameters_are_checked_there_too(host):
    (host.folder.path / "r").mkdir()
    body = {"command": ["inspect"], "params": {"run": "r", "limit": 0}}
    _, lines = await host.ask_lines("/v1/commands", body)
    assert "'limit'" not in lines
    assert [one for one in lines if one.get("status")] == [{"status": 2}]
    assert any("0 is not in the range" in one.get("text", "") for one in lines)
    for command in (["up"], ["host", "serve"], ["run"], []):
        status, answer = await host.ask("POST", "/v1/commands", {"command": command, "params": {}})
        assert (status, answer["error"]["param"]) == (400, "command")


async def test_a_role_that_lacks_is_named(swarmq):
    for words, least in (
        (("set", "r", "groups.group_size=2"), "operate"),
        (("token", "r", "--role", "admin"), "admin"),
    ):
        there = await swarmq(*words, role="read")
        assert there.exit_code == 1
        assert f"`swarmq {words[0]}` needs the role {least}, and the token has read" in there.stderr


async def test_a_run_is_launched_listed_stopped_and_resumed(host, swarmq, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(SwarmJob.build({"run": "math", "policies": {"main": {"model": "m"}}}).to_toml())
    said = await swarmq("up", job, "--set", "run=code", role="operate")
    assert said.output == f"code: starting\nto follow it: swarmq watch code --host {host.url}\n"
    said = await swarmq("up", job)
    assert said.output.startswith("math: queued, place 1\n")
    assert "code is a run of this host already" in (await swarmq("up", job, "--set", "run=code")).output.replace(
        "'", ""
    )
    listed = await swarmq("runs", role="read")
    assert [line.split()[:2] for line in listed.output.splitlines()[1:]] == [["code", "starting"], ["math", "queued,"]]
    assert [msgspec.json.decode(line)["run"] for line in (await swarmq("runs", "--json")).output.splitlines()] == [
        "code",
        "math",
    ]
    host.is_up("code", steps=1)
    assert (await swarmq("stop", "code")).output == "code: stopping\n"
    await host.end("code")
    assert (await swarmq("resume", "code")).output == "code: queued, place 1\n"
    assert "needs --after" in (await swarmq("stop", "code", "--policy", "main")).output


def test_a_token_without_a_host_is_refused():
    said = run_command("status", "r", "--token", "t")
    assert (said.exit_code, said.output) == (1, "swarmq: --token goes with --host\n")
