"""Commands in a container of docker or podman, which sees the attempt's folder and nothing else of this machine's files.

The container shares the machine's network, so that it reaches the relay; it is not a protection against an agent that attacks
services of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from swarmq.errors import TaskError

PROGRAMS = ("docker", "podman")


def find_program() -> str:
    """Return the program that starts containers. Raises TaskError if there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    raise TaskError(f"--container needs {' or '.join(PROGRAMS)}, and neither is installed or on PATH")


@contextlib.asynccontextmanager
async def open_container(
    image: str, argv: Sequence[str], folder: Path, work: Path, variables: Sequence[str], name: str
) -> AsyncIterator[list[str]]:
    """Yield the command that runs `argv` in a container; remove the container at the end.

    `variables`: names of variables that the container gets, with this process's child's values.
    """
    program, name = find_program(), f"swarmq-{name}"
    passed = [part for variable in dict.fromkeys(variables) for part in ("-e", variable)]
    command = [
        *(program, "run", "--rm", "-i", "--init", "--name", name, "--network", "host"),
        *("--user", f"{os.getuid()}:{os.getgid()}", "-v", f"{folder}:{folder}", "-w", str(work)),
        *passed,
        image,
        *argv,
    ]
    try:
        yield command
    finally:
        await asyncio.shield(_remove(program, name))


async def _remove(program: str, name: str) -> None:
    removing = await asyncio.create_subprocess_exec(
        *(program, "rm", "-f", name), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    await removing.wait()
