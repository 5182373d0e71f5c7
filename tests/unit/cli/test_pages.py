"""Every `swarmq` command on a page can be typed: its subcommand and options exist, and its values are of the right type."""

import re
import shlex
from pathlib import Path

import pytest

from swarmq.cli import main

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def commands(page):
    lines = (line for block in BLOCK.findall(page.read_text()) for line in block.splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == ["swarmq"]]


COMMANDS = [(page.name, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_a_command_of_a_page_is_one(page, words):
    command, context, rest = main, None, words[1:]
    while True:
        context = command.make_context(words[0], list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


def test_there_are_commands_on_the_pages():
    assert {"README.md", "client.md", "swarm.md", "five-examples.md"} <= {page for page, _ in COMMANDS}
