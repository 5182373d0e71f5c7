"""What all commands share: the group, one clear line for an error, arguments, which run and which policy is meant."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from swarmq.broker import Broker
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError, MissingExtraError, SwarmqError
from swarmq.runtime.processes import FINAL_MESSAGE_PREFIX, exit_status_for, is_locked
from swarmq.runtime.terminal import visible
from swarmq.version import __version__

EXTRAS = {
    "proxy": ("litestar", "uvicorn", "aiohttp", "prometheus_client", "uvloop"),
    "learner": ("torch", "transformers", "accelerate", "zstandard", "safetensors", "peft"),
    "vllm": ("vllm",),
    "inspect": ("numpy", "tokenizers", "zstandard"),
    "demo": ("openai", "reasoning_gym", "matplotlib"),
}
HOST = ("proxy", "learner", "vllm")
"""The extras that `swarmq[host]` brings together: what `swarmq up` needs."""

SETS = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a setting, e.g. --set groups.group_size=4."
)
JOB = click.argument("job", type=click.Path(path_type=Path))
RUN = click.argument("run", type=click.Path(path_type=Path))
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files that are made meanwhile are their owner's alone: prompts and completions lie in the run folder."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def friendly() -> Iterator[None]:
    """Errors we raise on purpose become one clear line and their status; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (SwarmqError, BaseExceptionGroup) as error:
        ours, others = _sort(error)
        if others:
            raise
        for line in dict.fromkeys(str(one) for one in ours):
            click.secho(visible(f"{FINAL_MESSAGE_PREFIX}{line}"), fg="red", err=True)
        sys.exit(exit_status_for(ours))


def _sort(error: BaseException) -> tuple[list[BaseException], list[BaseException]]:
    """The leaves of an error: those we raise on purpose, and the others."""
    if not isinstance(error, BaseExceptionGroup):
        return ([error], []) if isinstance(error, SwarmqError) else ([], [error])
    sorted_children = [_sort(child) for child in error.exceptions]
    return [e for ours, _ in sorted_children for e in ours], [e for _, others in sorted_children for e in others]


class Friendly(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with friendly():
            return super().invoke(ctx)


@click.group(cls=Friendly, context_settings=HELP_OPTIONS)
@click.version_option(__version__)
def main() -> None:
    """Train LLM agents with reinforcement learning over a durable message pipeline.

    \b
    swarmq demo                             the whole system on this machine, on a real task
    swarmq init math                        a job, an agent and tasks to start from
    swarmq up job.toml                      start broker, engines, proxy and learner of a job
    swarmq worker agent:attempt --kind math attempt the tasks of a queue
    swarmq watch runs/NAME                  see what a run is doing
    """


def need(*extras: str, installed: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise MissingExtraError when packages of these extras are not installed, with all of them and one way to get them.

    `installed` finds a package, or returns None.
    """
    missing = {extra: [name for name in EXTRAS[extra] if installed(name) is None] for extra in extras}
    missing = {extra: names for extra, names in missing.items() if names}
    if not missing:
        return
    whole_host = len(missing.keys() & set(HOST)) > 1
    wanted = [*(["host"] if whole_host else []), *(extra for extra in missing if not (whole_host and extra in HOST))]
    no_gpu = " (for CUDA; without a GPU: make install in a checkout)" if "vllm" in missing else ""
    raise MissingExtraError(
        f"not installed: {', '.join(dict.fromkeys(name for names in missing.values() for name in names))}; "
        f"pip install 'swarmq[{','.join(wanted)}]'{no_gpu}"
    )


@contextlib.contextmanager
def warnings_in_words() -> Iterator[None]:
    """While the context is open warnings of our log are sentences on standard error, and its other lines are left out."""
    from swarmq.runtime.logs import redirect_to

    def say(text: str) -> None:
        if text.startswith("warning: "):
            click.echo(visible(text), err=True)

    with redirect_to(say):
        yield


def run_until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until SIGINT or SIGTERM cancels it, so that its `async with` blocks close in order."""

    async def guarded() -> None:
        task = asyncio.ensure_future(main)
        stopping = False

        def stop() -> None:
            nonlocal stopping
            stopping = True
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            await task
        except asyncio.CancelledError:
            if not stopping:
                raise

    asyncio.run(guarded())


def resolved(run: Path) -> SwarmJob:
    """The settings of a run that is up, by its folder; a copy of it will not do, because no part of the run looks there."""
    job = stored(run)
    own = job.run_folder
    with contextlib.suppress(OSError):  # moved, or mounted under another name: `run` is all there is
        if own.resolved.is_file() and not own.path.samefile(run):
            raise ConfigError(f"{run}: a copy; the parts of this run read and write {own.path}: name that folder")
    return job


@contextlib.asynccontextmanager
async def broker_of(job: SwarmJob, name: str) -> AsyncIterator[Broker]:
    """A session with the broker of a run. Raises ConfigError for a run whose own RabbitMQ ended with it."""
    from swarmq.broker.amqp import AmqpBroker

    check_up(job)
    async with AmqpBroker.open(job.broker.url or "", name=name) as broker:
        yield broker


def check_up(job: SwarmJob) -> None:
    """Raises ConfigError for a run whose own RabbitMQ ended with it."""
    from swarmq.broker.node.files import read_identity

    folder = job.run_folder
    node = read_identity(folder.broker)
    if node and urlsplit(job.broker.url or "").port == node.amqp_port and not is_locked(folder.lock):
        raise ConfigError(f"run {job.run!r} is not up, nor is its RabbitMQ: `swarmq up {folder.job}` goes on with it")


def stored(run: Path) -> SwarmJob:
    """The settings of a run that was up, by its folder or a copy of it; its files are those of `RunFolder(run)`."""
    path = RunFolder(run).resolved
    try:
        there = path.exists()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if not there:
        raise ConfigError(
            f"{run}: not the folder of a run that was up (no resolved.toml); it is runs/NAME by default. Where the parts "
            "are started one by one, `swarmq invite JOB` makes it"
        )
    return SwarmJob.load(path)


def terminal_width() -> int | None:
    """Columns of the terminal that a person reads; None where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def one_policy(job: SwarmJob, policy: str | None, *, frozen_too: bool = False) -> str:
    """The trained policy that is meant, or any. Raises ConfigError when that is not clear."""
    names = [name for name, one in job.policies.items() if one.trained or frozen_too]
    if policy is None and len(names) == 1:
        return names[0]
    if policy is None:
        raise ConfigError(f"--policy: say which of {', '.join(names)}")
    if policy not in names:
        flaw = "is not trained" if policy in job.policies else "no such policy"
        raise ConfigError(f"--policy {policy}: {flaw}; choose one of {', '.join(names)}")
    return policy
