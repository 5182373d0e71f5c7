"""Ctrl-C ends a command in silence from its first import on, with the status that shells know: 130."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPTS = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]
PROGRAM = """
import os, runpy, signal, sys

class Interrupt:
    '''Sends a signal to this process when it begins to import a module.'''

    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, {handler})
{enter}
"""
ENTER = {name: "from {0} import {1}; {1}()".format(*path.split(":")) for name, path in SCRIPTS.items()}
ENTER["-m swarmq"] = "runpy.run_module('swarmq', run_name='__main__', alter_sys=True)"


def run(name, *arguments, at, number=signal.SIGINT, handler="signal.default_int_handler"):
    """Return the status of a command that gets a signal when it begins to import the module `at`, and what it prints."""
    program = PROGRAM.format(module=at, number=int(number), handler=handler, enter=ENTER[name])
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("at", ["swarmq.cli", "swarmq.cli.watching"])
@pytest.mark.parametrize("name", ENTER)
def test_ctrl_c_while_commands_are_imported_ends_the_process_at_once(name, at):
    assert run(name, "--version", at=at) == (-signal.SIGINT, "")


def test_so_does_sigterm():
    assert run("swarmq-proxy", "--help", at="click", number=signal.SIGTERM) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("at", ["proxy", "learner", "collector"])
@pytest.mark.parametrize("name", ["swarmq {}", "swarmq-{}"])
def test_ctrl_c_while_a_command_imports_what_it_needs_says_nothing(name, at):
    script, *words = name.format(at).split()
    assert run(script, *words, "job.toml", at=f"swarmq.{at}.main") == (128 + signal.SIGINT, "\n")


def test_ctrl_c_stays_ignored_in_the_background_of_a_script():
    status, text = run("swarmq", "--version", at="click", handler="signal.SIG_IGN")
    assert (status, "version" in text) == (0, True)


def test_entry_points_can_be_imported_by_any_thread():
    program = "import threading; t = threading.Thread(target=__import__, args=['swarmq.__main__']); t.start(); t.join()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
