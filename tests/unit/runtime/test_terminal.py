"""Names of episodes, tasks, kinds and clients are other people's words: a terminal shows them, and does not obey them."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.table import Table

from swarmq.cli.common import errors_as_lines
from swarmq.errors import SwarmqError
from swarmq.messages import Event
from swarmq.observe.board import Board
from swarmq.observe.board_terminal import draw
from swarmq.observe.lines import wrap_beside
from swarmq.runtime import terminal
from swarmq.runtime.logs import log, redirect_to

CLEAR, RIGHT_TO_LEFT = "\x1b[2J", "\u202e"
EVIL = f"task{CLEAR}\x07\r\x9b2J{RIGHT_TO_LEFT}[/red]"
HARMFUL = ("\x1b[2J", "\x07", "\r", "\x9b", RIGHT_TO_LEFT)


def harmless(text: str) -> bool:
    return "task" in text and not [one for one in HARMFUL if one in text]


def test_control_characters_are_shown_and_lines_stay() -> None:
    assert terminal.visible("a\x1b[2J\r\n\tb\x7f") == "a␛[2J␍\n\tb␡"
    assert terminal.visible("naïve 數學 \U0001f600") == "naïve 數學 \U0001f600"


def test_a_table_shows_names_and_takes_no_markup_from_them() -> None:
    console = terminal.console(file=io.StringIO(), width=80, force_terminal=True)
    table = Table("kind", "reason")
    table.add_row(EVIL, "[bold]no[/bold]")
    console.print(table)
    text = console.file.getvalue()
    assert harmless(text)
    assert "[bold]no[/bold]" in text
    assert "[/red]" in text


def test_the_picture_of_a_run_shows_what_its_parts_said() -> None:
    board = Board(run="r")
    for name, fields in (("warning", {"text": EVIL}), ("stage", {"stage": EVIL}), ("state", {})):
        board.fold(Event(run="r", source=f"client.{EVIL}", name=name, at=1.0, fields=fields))
    console = terminal.console(file=io.StringIO(), width=100, force_terminal=True)
    console.print(draw(board, now=2.0))
    assert harmless(console.file.getvalue())


def test_lines_of_up_and_doctor_and_errors_of_commands_show_them() -> None:
    assert harmless(wrap_beside("1.0 s  ", EVIL, width=80))
    told_lines: list[str] = []
    with redirect_to(told_lines.append):
        log.warning("task_given_up", task=EVIL)
    assert harmless(told_lines[0])

    import click

    @click.command()
    def command() -> None:
        with errors_as_lines():
            raise SwarmqError(f"no dead letter has the id {EVIL}")

    assert harmless(CliRunner().invoke(command, color=True).output)


LOGGING = {
    "client": "",
    "daemon": "from swarmq.runtime import logs; logs.configure(role='collector', run='r')",
    "worker": "from swarmq.runtime import logs; logs.write_lines_whole()",
}


@pytest.mark.parametrize("setup", LOGGING.values(), ids=LOGGING)
def test_a_log_line_on_a_terminal_shows_them(setup: str) -> None:
    ours, theirs = pty.openpty()
    program = f"{setup}\nfrom swarmq.runtime.logs import log\nlog.warning('task_given_up', task={EVIL!r})"
    if setup.endswith("'r')"):
        program = program.replace(
            "from swarmq.runtime.logs import log", "import structlog; log = structlog.get_logger()"
        )
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, check=True)
    said = os.read(ours, 65536).decode().replace("\r\n", "\n")
    os.close(ours), os.close(theirs)
    assert harmless(said)
