"""Shared parts of all commands: the command group, error output, common arguments, and the choice of run and policy."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, MissingExtraError, SwarmqError
from swarmq.observe.live_runs import check_up, load_live_run, load_stored_run, open_broker
from swarmq.runtime.processes import FINAL_MESSAGE_PREFIX, exit_status_for
from swarmq.runtime.terminal import visible
from swarmq.version import __version__

__all__ = [
    "EXTRAS",
    "HELP_OPTIONS",
    "HOST",
    "JOB",
    "RUN",
    "SETS",
    "check_up",
    "choose_policy",
    "errors_as_lines",
    "load_live_run",
    "load_stored_run",
    "main",
    "open_broker",
    "print_warnings",
    "private_files",
    "require_extras",
    "run_until_signalled",
    "terminal_width",
]

EXTRAS = {
    "proxy": ("litestar", "uvicorn", "aiohttp", "prometheus_client", "uvloop"),
    "learner": ("torch", "transformers", "accelerate", "zstandard", "safetensors", "peft"),
    "collector": ("zstandard",),
    "vllm": ("vllm",),
    "inspect": ("numpy", "tokenizers", "zstandard"),
    "dashboard": ("litestar", "uvicorn", "numpy", "tokenizers", "zstandard"),
    "demo": ("openai", "reasoning_gym", "matplotlib"),
}
HOST = ("proxy", "learner", "vllm")
"""Extras that `swarmq[host]` combines, which `swarmq up` needs."""


def _prepend_environment(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return (*shlex.split(os.environ.get(SETS_ENV, "")), *given)
    except ValueError as error:
        raise ConfigError(
            f"${SETS_ENV}: {error}; write KEY=VALUE pairs with spaces between them, quoted as in a shell"
        ) from error


SETS_ENV = "SWARMQ_SET"
SETS = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_prepend_environment,
    help="Override a setting, e.g. --set groups.group_size=4; those of $SWARMQ_SET, separated by spaces, come first.",
)
JOB = click.argument("job", type=click.Path(path_type=Path))
RUN = click.argument("run", type=click.Path(path_type=Path))
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Create files inside the block readable by their owner alone, because run folders hold prompts and completions."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print a SwarmqError as one line and exit with its status, and with 130 in silence after Ctrl-C. Any other error is a bug and keeps
    its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)  # so that the prompt does not follow the terminal's ^C
        sys.exit(128 + signal.SIGINT)
    except (SwarmqError, BaseExceptionGroup) as error:
        ours, others = _sort(error)
        if others and all(isinstance(one, BrokenPipeError) for one in others):
            raise others[0] from None  # click ends quietly when the reader of its output has gone, but knows no groups
        if others:
            raise
        for line in dict.fromkeys(str(one) for one in ours):
            click.secho(visible(f"{FINAL_MESSAGE_PREFIX}{line}"), fg="red", err=True)
        sys.exit(exit_status_for(ours))


def _sort(error: BaseException) -> tuple[list[BaseException], list[BaseException]]:
    """Return the leaves of an error group: SwarmqErrors, and all others."""
    if not isinstance(error, BaseExceptionGroup):
        return ([error], []) if isinstance(error, SwarmqError) else ([], [error])
    sorted_children = [_sort(child) for child in error.exceptions]
    return [e for ours, _ in sorted_children for e in ours], [e for _, others in sorted_children for e in others]


class CommandGroup(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_lines():
            return super().invoke(ctx)


@click.group(cls=CommandGroup, context_settings=HELP_OPTIONS)
@click.version_option(__version__)
def main() -> None:
    """Train LLM agents with reinforcement learning over a durable message pipeline.

    \b
    swarmq demo                             the whole system on this machine, on a real task
    swarmq init math                        a job, an agent and tasks to start from
    swarmq train job.toml                   a whole small run in one command
    swarmq up job.toml                      start broker, engines, proxy and learner of a job
    swarmq worker agent:attempt --kind math attempt the tasks of a queue
    swarmq watch runs/NAME                  see what a run is doing
    """


def require_extras(*extras: str, installed: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise MissingExtraError if packages of these extras are missing, naming all of them and the command that installs them.

    `installed`: returns None for a package that is not installed.
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
def print_warnings() -> Iterator[None]:
    """Print log warnings as sentences on standard error inside the block, and no other log lines."""
    from swarmq.runtime.logs import redirect_to

    def say(text: str) -> None:
        if text.startswith("warning: "):
            click.echo(visible(text), err=True)

    with redirect_to(say):
        yield


def run_until_signalled(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, or cancel it on SIGINT or SIGTERM, so that its `async with` blocks close in order."""

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


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, when_empty: str) -> None:
    """Print the rows below their headings, or `when_empty` if there are none."""
    from rich.table import Table

    from swarmq.runtime.terminal import console

    table = Table(*headings, box=None)
    for row in rows:
        table.add_row(*row)
    console().print(table if table.rows else when_empty)


def terminal_width() -> int | None:
    """Return the number of columns of the terminal, or None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def choose_policy(job: SwarmJob, policy: str | None, *, frozen_too: bool = False) -> str:
    """Return the policy named by --policy, or the only one there is. Raises ConfigError if the choice is ambiguous or wrong."""
    names = [name for name, one in job.policies.items() if one.trained or frozen_too]
    if policy is None and len(names) == 1:
        return names[0]
    if policy is None:
        raise ConfigError(f"--policy is required; choose one of {', '.join(names)}")
    if policy not in names:
        flaw = "is not trained" if policy in job.policies else "no such policy"
        raise ConfigError(f"--policy {policy}: {flaw}; choose one of {', '.join(names)}")
    return policy
