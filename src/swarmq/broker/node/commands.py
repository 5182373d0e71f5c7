"""External commands that install or run a RabbitMQ, and the folder for an installed copy."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from swarmq.errors import BrokerError


class CommandResult(msgspec.Struct, frozen=True):
    ok: bool
    tail: str
    """Last lines of the command's output."""


def run_command(
    command: Sequence[str], *, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> CommandResult:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(variables or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return CommandResult(done.returncode == 0, " / ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))


def run_checked(command: Sequence[str], *, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
    """Run a command. Raises BrokerError with the end of its output if it fails."""
    answer = run_command(command, cwd=cwd, variables=variables)
    if not answer.ok:
        raise BrokerError(f"`{' '.join(command[:3])} ...` failed ({answer.tail})")


def user_folder() -> Path:
    """Return the folder for a RabbitMQ that is installed without root."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "swarmq" / "rabbitmq"
