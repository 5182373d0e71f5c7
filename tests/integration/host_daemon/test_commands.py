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
    there = await swarmq("inspect", "r", "0001", "--html", "page.html")
    assert "--html names a file of this machine" in there.stderr
    assert there.exit_code == 1


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
