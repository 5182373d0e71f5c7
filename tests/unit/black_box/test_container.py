"""The command line that docker or podman gets, with a program of that name on PATH."""

import json
import os
import sys

import pytest

from swarmq.black_box import container
from swarmq.black_box.agent import CommandOptions, check_command
from swarmq.errors import TaskError

DOCKER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] in os.environ.get("FAILS", "").split():
    sys.exit(sys.argv[1] + ": no such image")
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A function that returns the calls of docker."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def check(image="agents:1"):
    check_command(CommandOptions(argv=("claude",), test="true", container=image))


def test_an_image_that_is_here_is_not_pulled(calls):
    check()
    assert calls() == [["image", "inspect", "agents:1"]]


def test_an_image_that_is_not_here_is_pulled(calls, monkeypatch):
    monkeypatch.setenv("FAILS", "image")
    check()
    assert calls()[1:] == [["pull", "--quiet", "agents:1"]]


def test_an_image_that_cannot_be_had_is_refused(calls, monkeypatch):
    monkeypatch.setenv("FAILS", "image pull")
    with pytest.raises(
        TaskError, match="--container agents:1: not on this machine, and docker pull failed: pull: no such image"
    ):
        check()


def test_without_docker_and_podman_there_is_no_container(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match="--container needs docker or podman, and neither is installed or on PATH"):
        check()


async def test_a_command_gets_its_folder_its_user_the_network_and_its_variables_but_no_value_of_them(calls, tmp_path):
    folder, work = tmp_path / "attempt", tmp_path / "attempt" / "work"
    variables = {"HOME": "/attempt/home", "OPENAI_API_KEY": "secret"}
    async with container.open_container("agents:1", ["claude", "-p", "a b"], folder, work, variables, "e1") as command:
        assert command == [
            *(str(tmp_path / "bin" / "docker"), "run", "--rm", "-i", "--init", "--name", "swarmq-e1"),
            *("--network", "host", "--user", f"{os.getuid()}:{os.getgid()}"),
            *("-v", f"{folder}:{folder}", "-w", str(work)),
            *("-e", "HOME=/attempt/home", "-e", "OPENAI_API_KEY"),
            *("agents:1", "claude", "-p", "a b"),
        ]
        assert calls() == []
    assert calls() == [["rm", "-f", "swarmq-e1"]]
