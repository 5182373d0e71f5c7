"""Commands of `swarmq` that a host's daemon runs for a client, and the role that each needs.

    laptop: swarmq inspect math --kind code --host https://gpu-box:7000
      └── POST /v1/commands {"command": ["inspect"], "params": {"run": "math", "kind": "code"}}
            └── host: the same command on the run folder; its output comes back as it is written

A command gets parameters that were parsed already; the host checks them again. A path among them is a name on the host: a run, a folder
of the run, or a file that the command writes and that comes back with the output. Other files of the client do not get there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swarmq.keys import Role
from swarmq.remote.records import Request

ROLES: dict[tuple[str, ...], Role] = {
    ("status",): "read",
    ("watch",): "read",
    ("inspect",): "read",
    ("plot",): "read",
    ("client", "list"): "read",
    ("dead", "list"): "read",
    ("dead", "show"): "read",
    ("engine", "list"): "read",
    ("host", "list"): "read",
    ("set",): "operate",
    ("pause",): "operate",
    ("drain",): "operate",
    ("checkpoint",): "operate",
    ("doctor",): "operate",
    ("replay",): "operate",
    ("client", "add"): "operate",
    ("client", "remove"): "operate",
    ("dead", "requeue"): "operate",
    ("dead", "purge"): "operate",
    ("engine", "add"): "admin",
    ("engine", "remove"): "admin",
    ("engine", "secret"): "admin",
    ("host", "add"): "admin",
    ("host", "remove"): "admin",
    ("token",): "admin",
    ("viewer",): "admin",
}
"""Words of a command -> role that it needs."""
WRITES: dict[tuple[str, ...], str] = {("inspect",): "html", ("plot",): "out"}
"""Words of a command -> parameter with the file that it writes for the client."""


class Terminal(Request, frozen=True, kw_only=True):
    """The client's terminal, for which the output is made."""

    columns: int = 80
    lines: int = 24
    is_interactive: bool = False
    """Whether the output may move the cursor and have colours."""


class CommandRequest(Request, frozen=True, kw_only=True):
    """A command to run on a host."""

    command: tuple[str, ...]
    """Words of the command, such as `client`, `add`."""
    params: dict[str, Any]
    """Name -> value of each parameter, by the names in the function of the command."""
    terminal: Terminal = Terminal()


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a command's output, one JSON line of the answer; the last one has the exit status."""

    text: str = ""
    stream: Literal["out", "err"] = "out"
    file: bytes = b""
    """Next bytes of the file that the command has written."""
    status: int | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the process that runs a command."""

    folder: str
    """Folder that the daemon serves."""
    written: str
    """Empty folder for the file that the command writes for the client."""
    request: CommandRequest
