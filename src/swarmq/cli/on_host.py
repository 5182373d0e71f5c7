"""The process of a command that a client runs on this host: `python -m swarmq.cli.on_host CALL`, started by the host's daemon.

Parameters are converted and checked as on a command line. A run is given by its name, a folder of it by its path in the run folder, and a
file that the command writes is sent to the client; paths of other files are refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from swarmq.cli import main
from swarmq.cli.common import errors_as_lines, private_files
from swarmq.cli.remote import find_command
from swarmq.config import RunFolder
from swarmq.errors import ConfigError
from swarmq.host_daemon.ledger import HostFolder
from swarmq.messages import NAME
from swarmq.remote.commands import WRITES, Call


def run(call: Call) -> None:
    """Run the command. Raises SwarmqError, and click's exceptions for wrong parameters."""
    command = find_command(main, call.request.command)
    given = call.request.params
    if given.get(WRITES.get(call.request.command, "")) is not None:
        os.chdir(call.written)
    if given.get("management") is not None:
        raise ConfigError(
            "--management: the password of the host's broker is sent there, so the host itself names it: set $SWARMQ_MANAGEMENT_URL "
            "where `swarmq host serve` runs"
        )
    context = click.Context(command, info_name=" ".join(["swarmq", *call.request.command]))
    with context:
        for param in command.params:
            if not param.name or not param.expose_value:
                continue
            value = given.get(param.name)
            if value is None:
                value = param.value_from_envvar(context)
            value = param.type_cast_value(context, value) if value is not None else None
            context.params[param.name] = _Places(call).find(param, value)
        command.invoke(context)


class _Places:
    """Where paths of a command lead on this host."""

    def __init__(self, call: Call) -> None:
        self._call, self._folder = call, Path(call.folder)

    def find(self, param: click.Parameter, value: Any) -> Any:
        """Return the value of a parameter on this host. Raises ConfigError for the path of a file that does not belong there."""
        is_repeated = param.multiple or param.nargs == -1
        if not isinstance(param.type, click.Path):
            return () if value is None and is_repeated else value
        if param.name in {"run", "runs"}:
            return tuple(map(self._find_run, value)) if is_repeated else self._find_run(value)
        if value is None:
            return None
        if param.name == WRITES.get(self._call.request.command):
            return Path(value.name)
        if self._call.request.command == ("replay",):
            return self._find_inside(param, value)
        raise ConfigError(
            f"{param.opts[0]} names a file of this machine, and the command runs on the host: leave it out"
        )

    def _find_run(self, given: Any) -> Path:
        name = str(given or "")
        if not NAME.fullmatch(name) or not RunFolder(self._folder / name).path.is_dir():
            if NAME.fullmatch(name) and HostFolder(self._folder).record(name).exists():
                raise ConfigError(
                    f"run {name!r} has not started yet: `swarmq runs --host URL` shows its place in the queue"
                )
            raise ConfigError(f"{name or '--run'}: name a run of the host; `swarmq runs --host URL` lists them")
        return self._folder / name

    def _find_inside(self, param: click.Parameter, value: Path) -> Path:
        """Return a checkpoint of the run, or the new folder of a replay in it."""
        folder = RunFolder(self._find_run(self._call.request.params.get("run")))
        if param.name == "start":
            if value.is_absolute() or ".." in value.parts:
                raise ConfigError(f"--from {value}: name a folder in the run's, such as main/checkpoints/step-00000010")
            return folder.path / value
        if not NAME.fullmatch(str(value)):
            raise ConfigError(
                f"{value}: give a name; with --host the replay is written to {folder.path.name}/replays/NAME on the host"
            )
        return folder.replays / value


if __name__ == "__main__":
    with private_files(), errors_as_lines():
        try:
            run(msgspec.json.decode(sys.argv[1], type=Call))
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
