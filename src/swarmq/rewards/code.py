"""Rewards for programs: standard output against expected output, and tests with asserts. Both run in a sandbox.

The verdict is never computed where the answer's program runs. `outputs_match` compares in this process; `asserts_pass` runs the tests
in a second sandbox, which calls the functions of the answer through pipes (see code_process.py).
"""

from __future__ import annotations

import ast
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmq.errors import RewardError, SandboxError
from swarmq.rewards.sandbox import ProgramRun, Sandbox
from swarmq.rewards.score import RIGHT, Score, wrong

PROCESS = Path(__file__).with_name("code_process.py")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


def extract_code(answer: str) -> str:
    """Return the last fenced block marked `python` or `py`, else the last fenced block, else the whole answer."""
    blocks = _FENCE.findall(answer)
    python = [text for language, text in blocks if language.lower() in ("python", "py", "python3")]
    return str((python or [text for _, text in blocks] or [answer])[-1])


def outputs_match(
    sandbox: Sandbox, answer: str, cases: Sequence[tuple[str, str]], *, all_or_nothing: bool = False
) -> Score:
    """Return the share of cases (standard input, expected output) for which the answer's program ends with exit code 0 and
    prints the expected lines; white space at the ends of lines and of the output does not count.

    Each case is a fresh sandbox, which holds neither the other cases nor an expected output. `all_or_nothing`: 0 unless all
    are right, and no case is run after a wrong one. Raises RewardError for cases that an empty program would pass.
    """
    if not cases:
        raise RewardError("cases is empty: give at least one (standard input, expected output)")
    for place, (_, expected) in enumerate(cases):
        if not expected.strip():
            raise RewardError(f"cases[{place}]: the expected output is empty, so a program without output would pass")
    code, right, first = extract_code(answer), 0, ""
    for place, (stdin, expected) in enumerate(cases):
        run = sandbox.run(["python", "main.py"], files={"main.py": code}, stdin=stdin)
        problem = run.problem or ("" if _lines(run.stdout) == _lines(expected) else "the output is another one")
        right += not problem
        first = first or (f"case {place}: {problem}" if problem else "")
        if problem and all_or_nothing:
            return wrong(first)
    return RIGHT if not first else Score(right / len(cases), first)


def asserts_pass(sandbox: Sandbox, answer: str, tests: str, *, all_or_nothing: bool = True) -> Score:
    """Return 1 if the answer's code passes the tests, or with `all_or_nothing=False` the share of cases that pass.

    A case is a function `test_*` without arguments, or an `assert` at the top level; tests without either are one case. Tests use
    the answer's functions and classes by name, or import them from `solution`. Numbers, texts, bytes, lists, tuples, sets and
    dicts are compared as Python's own types; other objects by their own methods, such as
    `__eq__`. Tests cannot use pytest's fixtures.

    Raises RewardError for tests that are empty or not valid Python.
    """
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"tests cannot be parsed: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    for function in functions:
        if function.args.args or function.args.posonlyargs:
            raise RewardError(f"tests: {function.name} has arguments; fixtures are not supported")
    if not any(isinstance(node, (ast.Assert, ast.Call)) for node in ast.walk(tree)):
        raise RewardError("tests contain neither an assert nor a call, so that every answer would pass")
    number = len(functions) + sum(isinstance(node, ast.Assert) for node in tree.body) or 1
    code = extract_code(answer)
    try:
        compile(code, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        return wrong(f"the code cannot be compiled: {error}"[:200])
    ran, lines, solution = _run_both(sandbox, code, tests)
    cases, end = [line for line in lines if "case" in line], next((line for line in lines if "ended" in line), {})
    passed = sum(not case["problem"] for case in cases)
    if end and not end["broken"] and passed == number == len(cases):
        return RIGHT
    case, first = next(((f"{case['case']}: ", case["problem"]) for case in cases if case["problem"]), ("", ""))
    first = first or (end["broken"] if end else f"the tests {ran.problem or 'ended early'}")
    if end and end["solution_ended"] and first == end["broken"] and solution.problem:
        first = f"the solution {solution.problem}" if solution.stopped else f"{first}: {solution.problem}"
    return Score(0.0 if all_or_nothing else min(passed, number) / number, f"{case}{first}"[:300])


def _run_both(sandbox: Sandbox, code: str, tests: str) -> tuple[ProgramRun, list[dict[str, Any]], ProgramRun]:
    """Return how the tests ended, the JSON lines that they wrote (`run_tests` in code_process.py), and how the solution ended."""
    program = PROCESS.read_text()
    to_solution, from_tests = os.pipe()
    to_tests, from_solution = os.pipe()
    ours = [to_solution, from_tests, to_tests, from_solution]
    ended: list[ProgramRun] = []
    failed: list[BaseException] = []
    try:
        with (
            sandbox.start(
                ["python", "-I", "-B", "process.py", "solution", str(to_solution), str(from_solution)],
                files={"process.py": program, "solution.py": code},
                keep_fds=[to_solution, from_solution],
            ) as solution,
            # Tests may wait for the solution as long as it may run.
            sandbox.with_limits(wall_s=2 * sandbox.limits.wall_s).start(
                ["python", "-I", "-B", "process.py", "tests", str(to_tests), str(from_tests)],
                files={"process.py": program, "tests.py": tests},
                keep_fds=[to_tests, from_tests],
            ) as tested,
        ):
            while ours:
                os.close(ours.pop())

            def wait_for_solution() -> None:
                try:
                    ended.append(solution.wait())
                except SandboxError as error:
                    failed.append(error)
                    tested.stop()

            thread = threading.Thread(target=wait_for_solution, name="swarmq-sandbox")
            thread.start()
            lines: list[dict[str, Any]] = []
            try:
                ran = tested.wait()
                lines = [json.loads(line) for line in ran.stdout.splitlines()]
            finally:
                if not (
                    lines and lines[-1].get("solution_ended")
                ):  # then its pipes are closed, and its error is to come
                    solution.stop()
                thread.join()
    finally:
        for fd in ours:
            os.close(fd)
    if failed:
        raise failed[0]
    return ran, lines, ended[0]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
