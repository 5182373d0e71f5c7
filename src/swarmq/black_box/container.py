"""Commands in a container of docker or podman, which sees the attempt's folder and nothing else of this machine's files.

The container shares the machine's network, so that it reaches the relay; it is not a protection against an agent that attacks
services of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from swarmq.black_box.cli_settings import HOMES
from swarmq.errors import TaskError

PROGRAMS = ("docker", "podman")
FAILED = 125
"""Exit code with which docker and podman report that they could not run a container."""


def find_program() -> str:
    """Return the program that starts containers. Raises TaskError if there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    raise TaskError(f"--container needs {' or '.join(PROGRAMS)}, and neither is installed or on PATH")


def provide_image(image: str) -> None:
    """Pull an image that is not on this machine. Raises TaskError if it cannot be pulled."""
    program = find_program()
    for action in (["image", "inspect"], ["pull", "--quiet"]):
        done = subprocess.run([program, *action, image], capture_output=True, text=True, check=False)
        if not done.returncode:
            return
    raise TaskError(
        f"--container {image}: not on this machine, and {Path(program).name} pull failed: {done.stderr.strip()}"
    )


def find_homes() -> dict[str, str]:
    """Return this user's values of the variables in HOMES, by which docker finds its logins, and podman its images."""
    return {name: os.environ[name] for name in HOMES if name in os.environ}


@contextlib.asynccontextmanager
async def open_container(
    image: str, argv: Sequence[str], folder: Path, work: Path, variables: Mapping[str, str], name: str
) -> AsyncIterator[list[str]]:
    """Yield the command that runs `argv` in a container; remove the container at the end.

    The command reads the values of `variables` from its own environment, where they are no argument that other users see;
    those of `find_homes` differ there and are arguments.
    """
    program, name = find_program(), f"swarmq-{name}"
    is_rootless = Path(program).name == "podman" and os.getuid() != 0
    passed = [f"{key}={value}" if key in HOMES else key for key, value in variables.items()]
    command = [
        *(program, "run", "--rm", "-i", "--init", "--name", name, "--network", "host"),
        *(("--userns", "keep-id") if is_rootless else ()),  # else the user in the container is another one outside
        *("--user", f"{os.getuid()}:{os.getgid()}", "-v", f"{folder}:{folder}", "-w", str(work)),
        *(part for variable in passed for part in ("-e", variable)),
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
