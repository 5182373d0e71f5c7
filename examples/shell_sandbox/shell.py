"""Two shells over files that are kept as data, by path: a tiny one for the toy size, and a real one in a sandbox.

Both take the files, change them as the command does, and return what a terminal would show.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from fnmatch import fnmatch
from functools import cache
from typing import Any

Files = dict[str, str]
"""Path -> text."""

MAX_COMMAND = 200
MAX_OUTPUT = {"toy": 300, "full": 4000}


def run(size: str, files: Files, command: str) -> str:
    """Run a command in the shell of a size; errors come back as text, as in a terminal."""
    output = run_tiny(files, command) if size == "toy" else run_in_sandbox(files, command)
    limit = MAX_OUTPUT[size]
    return (output if len(output) <= limit else f"{output[:limit]}\n(cut)") or "(no output)"


def run_tiny(files: Files, command: str) -> str:
    """Run ls, cat, grep, wc or rm without a process, thousands of times a second. Paths are names of files or patterns."""
    if len(command) > MAX_COMMAND:
        return f"sh: the command has more than {MAX_COMMAND} characters"
    if re.search(r"[|&;<>`$]", command):
        return "sh: one command at a time, without | & ; < > ` $"
    try:
        parts = shlex.split(command)
    except ValueError as error:
        return f"sh: {error}"
    if not parts:
        return "sh: no command"
    if parts[0] not in COMMANDS:
        return f"sh: {parts[0]}: not found; there are {', '.join(COMMANDS)}"
    options = {letter for word in parts[1:] if word.startswith("-") for letter in word[1:]}
    words = [word for word in parts[1:] if not word.startswith("-")]
    try:
        return COMMANDS[parts[0]](files, options, words)
    except FileNotFoundError as error:
        return str(error)


def _match(files: Files, patterns: list[str]) -> list[str]:
    """Return the names that the patterns match. Raises FileNotFoundError for one that matches none."""
    found: list[str] = []
    for pattern in patterns:
        names = [name for name in sorted(files) if fnmatch(name, pattern)]
        if not names:
            raise FileNotFoundError(f"{pattern}: No such file")
        found += names
    return found


def _ls(files: Files, _options: set[str], _words: list[str]) -> str:
    return "\n".join(sorted(files))


def _cat(files: Files, _options: set[str], words: list[str]) -> str:
    return "".join(files[name] for name in _match(files, words)).rstrip()


def _grep(files: Files, options: set[str], words: list[str]) -> str:
    if len(words) < 2:
        return "usage: grep [-l] WORD FILE..."
    names = _match(files, words[1:])
    lines: list[str] = []
    for name in names:
        hits = [line for line in files[name].splitlines() if words[0] in line]
        if "l" in options:
            lines += [name] if hits else []
        else:
            lines += [f"{name}:{hit}" if len(names) > 1 else hit for hit in hits]
    return "\n".join(lines)


def _wc(files: Files, options: set[str], words: list[str]) -> str:
    counts = {
        name: len(files[name].split() if "w" in options else files[name].splitlines()) for name in _match(files, words)
    }
    return "\n".join(f"{count} {name}" for name, count in counts.items())


def _rm(files: Files, _options: set[str], words: list[str]) -> str:
    for name in set(_match(files, words)):
        del files[name]
    return ""


COMMANDS: dict[str, Callable[[Files, set[str], list[str]], str]] = {
    "ls": _ls,
    "cat": _cat,
    "grep": _grep,
    "wc": _wc,
    "rm": _rm,
}

IN_SANDBOX = """
import json, pathlib, subprocess, sys
done = subprocess.run(["sh", "-c", sys.argv[1]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
paths = [path for path in pathlib.Path().rglob("*") if path.is_file() and not path.is_symlink()]
files = {path.as_posix(): path.read_text(errors="replace") for path in paths}
print("\\n" + json.dumps({"output": done.stdout.decode(errors="replace")[:20000], "files": files}))
"""
"""Program that runs a command in a sandbox and prints its output and the files that it leaves. A command that forges these
gains nothing: what it says about the files of its folder, it could as well have written there."""


def run_in_sandbox(files: Files, command: str) -> str:
    """Run a command of `sh` in a fresh sandbox that holds the files. A command that is killed for a limit changes nothing."""
    done = make_sandbox().run(["python", "-c", IN_SANDBOX, command], files=files)
    try:
        report = json.loads(done.stdout.splitlines()[-1])
        left = {str(path): str(text) for path, text in report["files"].items()}
        output = str(report["output"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"sh: {done.problem or 'the command broke the shell'}"
    files.clear()
    files.update(left)
    return output.rstrip()


@cache
def make_sandbox() -> Any:
    """Return the strongest sandbox of this host, made once. Raises SandboxError if the host has none."""
    from swarmq.rewards.sandbox import Limits, Sandbox  # noqa: PLC0415 - the toy size needs none

    return Sandbox.detect(limits=Limits(wall_s=10, cpu_s=10, processes=16, output_bytes=8 * 2**20))
