"""Rewards for what a command left in its working copy: a test command, or the user's function.

A test command gives 1.0 if it exits with 0 and 0.0 otherwise, also when it is killed or its time is up, because then the agent's
code is to blame. With `{report}` in the command it writes a JUnit report there, and the reward is the share of the tests that
passed, 0.0 without a report. A test command that cannot be run (exit codes 126 and 127) fails the episode.
"""

from __future__ import annotations

import inspect
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmq.black_box.process import Finished
from swarmq.errors import AgentCommandError, TaskError
from swarmq.outcome import Outcome

REPORT = "{report}"
NOT_RUNNABLE = (126, 127)
"""Exit codes with which shells report a command that they cannot run."""

ScoreFunction = Callable[[Path, Any], Any]
"""A user's function of the working copy and the task's data; returns a reward or an Outcome, or a coroutine of one."""


def check_score_function(function: Any, name: str) -> None:
    """Raise TaskError unless the function can be called with the working copy and the task."""
    if not callable(function):
        raise TaskError(f"--score {name}: not a function of (folder, task)")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TaskError(f"--score {name}: must be callable as f(folder, task) ({error})") from error
    except ValueError:  # a builtin without a signature
        return


def score_test(done: Finished, report: Path | None) -> Outcome:
    """Return the reward for a finished test command. Raises AgentCommandError if the command could not be run."""
    if done.exit_code in NOT_RUNNABLE:
        raise AgentCommandError(f"the test command cannot be run (exit code {done.exit_code})\n{done.tail}")
    metrics = {"test_s": done.seconds, "test_timed_out": float(done.exit_code is None)}
    if report is None:
        passed = done.exit_code == 0
        return Outcome(reward=float(passed), success=passed, metrics=metrics)
    share = read_passed_share(report) if done.exit_code is not None else 0.0
    return Outcome(reward=share, success=share == 1.0 and done.exit_code == 0, metrics=metrics)


def read_passed_share(report: Path) -> float:
    """Return the share of passed tests in a JUnit report, without the skipped ones; 0.0 if there is none or it is damaged."""
    try:
        root = ET.fromstring(report.read_bytes())  # noqa: S314 - its own tests write it; entities are not expanded from files
    except (OSError, ET.ParseError):
        return 0.0
    cases = [case for case in root.iter("testcase") if case.find("skipped") is None]
    passed = sum(case.find("failure") is None and case.find("error") is None for case in cases)
    return passed / len(cases) if cases else 0.0
