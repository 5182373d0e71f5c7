"""The process of a command that a client runs on this host: `python -m swarmq.cli.on_host CALL`, started by the host's daemon.

Parameters are converted and checked as on a command line. Paths of files on this host are refused; a run is given by its name.
"""

from __future__ import annotations

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
from swarmq.messages import NAME
from swarmq.remote.commands import Call


def run(call: Call) -> None:
    """Run the command. Raises SwarmqError, and click's exceptions for wrong parameters."""
    command = find_command(main, call.request.command)
    context = click.Context(command, info_name=" ".join(["swarmq", *call.request.command]))
    given = call.request.params
    with context:
        for param in command.params:
            if not param.name or not param.expose_value:
                continue
            value = param.type_cast_value(context, given.get(param.name)) if given.get(param.name) is not None else None
            context.params[param.name] = _place(param, value, Path(call.folder))
        command.invoke(context)


def _place(param: click.Parameter, value: Any, folder: Path) -> Any:
    """Return the value of a parameter on this host: the folder of a run for its name. Raises ConfigError for the path of a file."""
    if not isinstance(param.type, click.Path):
        return () if value is None and (param.multiple or param.nargs == -1) else value
    if param.name == "run":
        name = str(value or "")
        if not NAME.fullmatch(name) or not RunFolder(folder / name).path.is_dir():
            raise ConfigError(f"{name or '--run'}: name a run of the host; `swarmq runs --host URL` lists them")
        return folder / name
    if value is not None:
        raise ConfigError(
            f"{param.opts[0]} names a file of this machine, and the command runs on the host: leave it out"
        )
    return None


if __name__ == "__main__":
    with private_files(), errors_as_lines():
        try:
            run(msgspec.json.decode(sys.argv[1], type=Call))
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
