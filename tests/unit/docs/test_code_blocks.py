"""Every example on a page works: commands parse, jobs load, JSON is JSON, and Python is checked against the package's types.

tests/http/test_pages.py also runs the programs of the README and of the page of the client.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import pytest

from swarmq.cli import main
from swarmq.config import SwarmJob
from swarmq.studies.study import Study

ROOT = Path(__file__).parents[3]
SKILL = ROOT / "skills/swarmq"
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted(SKILL.rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
FENCE = re.compile(r"^( *)```([\w+-]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
IN_PROSE = re.compile(r"(?<!`)`(swarmq [^`]+)`(?!`)")
SHELL, CONTROL = ("sh", "bash"), set(";&|()<>")
LANGUAGES = {"", "text", "sh", "bash", "python", "toml", "json", "yaml", "ini", "mermaid"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in FENCE.finditer(text):
            indent, language, content = found.groups()
            lines = [line.removeprefix(indent) + "\n" for line in content.splitlines()]
            line = text.count("\n", 0, found.start()) + 2
            yield Block(page.relative_to(ROOT).as_posix(), line, language, "".join(lines))


def split_line(line: str) -> list[str]:
    """Split a line of a shell script; operators are words of their own."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="".join(CONTROL))
    lexer.whitespace_split = True
    return list(lexer)


def commands_in(script: str) -> Iterator[list[str]]:
    """Yield the calls of swarmq in a shell script, behind other commands and inside `$(...)` too."""
    for line in script.replace("\\\n", " ").splitlines():
        words = split_line(line)
        for at, word in enumerate(words):
            if word == "swarmq" and at + 1 < len(words) and "install" not in words[:at]:
                rest = words[at:]
                yield rest[: next((end for end, one in enumerate(rest) if set(one) <= CONTROL), len(rest))]


BLOCKS = list(read_blocks())
COMMANDS = [(str(block), words) for block in BLOCKS if block.language in SHELL for words in commands_in(block.text)]
NAMED = sorted(
    {(page.relative_to(ROOT).as_posix(), code) for page in PAGES for code in IN_PROSE.findall(page.read_text())}
)


def blocks_in(language: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == language], ids=str)


def test_the_pages_have_examples_of_every_sort():
    pages = {where.partition(":")[0] for where, _ in COMMANDS}
    assert {"README.md", "docs/reference/client.md", "docs/how-to/swarm.md", "docs/how-to/access.md"} <= pages
    assert {"python", "toml", "json"} <= {block.language for block in BLOCKS}
    assert {block.language for block in BLOCKS} <= LANGUAGES, "a language that no test here knows"


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[f"{where} {' '.join(words)}" for where, words in COMMANDS])
def test_a_command_can_be_typed(where, words):
    command, context, rest = main, None, words[1:]
    while True:
        context = command.make_context(words[0], list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize(("page", "code"), NAMED, ids=lambda value: str(value).replace("/", "."))
def test_a_command_in_a_sentence_has_the_named_options(page, code):
    command, words = main, split_line(code)[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name.isupper() or name == "...":
            return
        assert name in command.commands, f"{page}: `{code}`: there is no command {name}"
        command = command.commands[name]
    known = {
        "--help",
        "--version",
        "--",
        *(name for one in command.params for name in (*one.opts, *one.secondary_opts)),
    }
    named = {
        word.partition("=")[0]
        for word in words[: words.index("--") if "--" in words else None]
        if word.startswith("--")
    }
    assert named <= known, f"{page}: `{code}`"


STUDY = {
    "name": "study",
    "question": "?",
    "metric": {"name": "score"},
    "smallest_effect": 1.0,
    "trial": {"function": "work:trial", "max_seconds": 1.0},
    "seeds": [0],
    "budget": {"trials": 1},
}


@blocks_in("toml")
def test_a_job_or_a_study_loads(block):
    tree = tomllib.loads(block.text)
    if {"question", "space", "planner"} & tree.keys():  # a study, or a part of one
        arms = {} if "space" in tree else {"arms": {"a": {}, "b": {"settings": {"x": 1}}}}
        msgspec.convert(tree if "question" in tree else STUDY | arms | tree, Study)
        return
    given = {"run": "run", "policies": {"main": {}}, **tree}
    for policy in given["policies"].values():
        policy.setdefault("model", "model")
    if "dependencies" not in str(tree) and "project" not in tree:
        SwarmJob.build(given)


@blocks_in("json")
def test_json_is_json(block):
    json.loads(block.text)


@blocks_in("python")
def test_python_compiles_and_what_it_imports_of_the_package_exists(block):
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "swarmq":
            module = importlib.import_module(node.module)
            assert not [name.name for name in node.names if not hasattr(module, name.name)]


@pytest.mark.slow
def test_python_uses_the_package_as_its_types_allow(tmp_path):
    by_page = defaultdict(list)
    for block in BLOCKS:
        if block.language == "python":
            by_page[block.page].append(block)
    for page, parts in by_page.items():
        text = ""
        for part in parts:  # at the lines that they have on the page
            text += "\n" * (part.line - 1 - text.count("\n")) + part.text
        (tmp_path / f"{re.sub(r'[/.-]', '_', page)}.py").write_text(text)
    (tmp_path / "wrong.py").write_text(
        "import swarmq\nswarmq.SwarmClient(invitation='x')  # shows that wrong use is found\n"
    )
    errors = [line for line in check_types(tmp_path).splitlines() if ": error: " in line]
    assert [line for line in errors if "wrong.py" not in line] == []
    assert ['Unexpected keyword argument "invitation"' in line for line in errors] == [True]


MYPY = """[mypy]
mypy_path = $MYPY_CONFIG_FILE_DIR/src
disable_error_code = arg-type, name-defined, no-redef, top-level-await, import-not-found, import-untyped
ignore_missing_imports = True
follow_imports = skip
[mypy-swarmq.*]
follow_imports = silent
"""
"""What is allowed to parts of programs: other parts define names, a stand-in may be given. Other packages are not looked at, which takes minutes."""


def check_types(folder: Path) -> str:
    """Return what mypy finds."""
    settings = folder / "mypy.ini"
    settings.write_text(MYPY.replace("$MYPY_CONFIG_FILE_DIR", str(ROOT)))
    command = [sys.executable, "-m", "mypy", f"--config-file={settings}", f"--cache-dir={folder}", *folder.glob("*.py")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


FROM_PYPI = re.compile(r"""pip install(?=\s)[^`\n#;]*[ '"]swarmq(?=[\['"`\s]|$)""", re.MULTILINE)
"""Pattern of a command that would install another project: the name `swarmq` on PyPI is not ours."""


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("pip install swarmq", True),
        ("pip install 'swarmq[data]'", True),
        ("`pip install -c tested.txt openai swarmq`", True),
        ("pip install './swarmq[host]' openai   # the swarmq on PyPI is another project's", False),
        ("pip install dist/swarmq-0.1.0-py3-none-any.whl", False),
        ("pip install openai; swarmq up job.toml", False),
    ],
)
def test_only_the_name_alone_is_found(text, is_found):
    assert bool(FROM_PYPI.search(text)) == is_found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_swarmq_from_pypi(page):
    assert not [found[0] for found in FROM_PYPI.finditer(page.read_text())]
