"""Other people's programs, run to get a RabbitMQ, and where what they bring is kept."""

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
    """The end of what it said."""


def run_command(
    command: Sequence[str], *, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> CommandResult:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(variables or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return CommandResult(done.returncode == 0, " / ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))


def run_checked(command: Sequence[str], *, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
    """Raises BrokerError with the end of what it said."""
    answer = run_command(command, cwd=cwd, variables=variables)
    if not answer.ok:
        raise BrokerError(f"`{' '.join(command[:3])} ...` failed ({answer.tail})")


def user_folder() -> Path:
    """Where a server of the user's own is unpacked."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "swarmq" / "rabbitmq"
