"""Reaching the processes of a run from its folder: its settings, its broker, and the broker's management API.

The command line and the dashboard use it alike, so both refuse copies of a run folder, and runs that are not up, in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from swarmq.broker import Broker
from swarmq.broker.node.files import read_identities
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.runtime.amqp_urls import split_nodes
from swarmq.runtime.processes import is_locked

if TYPE_CHECKING:
    from swarmq.broker.admin.users import ManagementApi


def load_stored_run(run: Path) -> SwarmJob:
    """Return the settings of a started run, from its folder or from a copy. The files are those of `RunFolder(run)`."""
    path = RunFolder(run).resolved
    try:
        there = path.exists()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if not there and is_locked(RunFolder(run).lock):
        raise ConfigError(f"{run}: the run is starting; `swarmq up` prints how to join it when it is up")
    if not there:
        raise ConfigError(
            f"{run}: not the folder of a run that was up (no resolved.toml). `swarmq up` makes it, by default as "
            "runs/NAME in the folder where it is started; `swarmq invite` does for processes that are started one by one"
        )
    return SwarmJob.load(path)


def load_live_run(run: Path) -> SwarmJob:
    """Return the settings of a run that is up. Raises ConfigError for a copy of a run folder, which no process of the run
    uses."""
    job = load_stored_run(run)
    own = job.run_folder
    with contextlib.suppress(OSError):  # the folder was moved or is mounted under another name: only `run` is known
        if own.resolved.is_file() and not own.path.samefile(run):
            raise ConfigError(
                f"{run}: a copy of a run folder; the processes of this run use {own.path}: name that folder"
            )
    return job


def check_up(job: SwarmJob) -> None:
    """Raise ConfigError if the run's private RabbitMQ has ended."""
    folder = job.run_folder
    ports = {urlsplit(node).port for node in split_nodes(job.broker.url)} if job.broker.url else set()
    if any(node.amqp_port in ports for node in read_identities(folder.broker)) and not is_locked(folder.lock):
        raise ConfigError(
            f"run {job.run!r} is not up, and neither is its RabbitMQ; to continue the run: `swarmq up {folder.job}`"
        )


@contextlib.asynccontextmanager
async def open_broker(job: SwarmJob, name: str) -> AsyncIterator[Broker]:
    """Open a session with the broker of a run. Raises ConfigError if the run's private RabbitMQ has ended."""
    from swarmq.broker.amqp import AmqpBroker  # noqa: PLC0415 - slow to import

    check_up(job)
    async with AmqpBroker.open(job.broker.url or "", name=name) as broker:
        yield broker


def find_management_api(job: SwarmJob, folder: RunFolder, url: str | None = None) -> ManagementApi:
    """Return the management API of the run's broker: at the given URL, of the private node, or at the usual port of the
    broker's host."""
    return find_management_api_of(job.broker.url or "", folder.broker, url)


def find_management_api_of(broker_url: str, broker: Path, url: str | None = None) -> ManagementApi:
    """Return the management API of a broker: at the given URL, of the private node in the folder `broker`, or at the usual port of
    the broker's host."""
    from swarmq.broker.admin.users import ManagementApi  # noqa: PLC0415 - slow to import

    if url is None and (nodes := read_identities(broker)):
        url = ",".join(node.management_login for node in nodes)
    return ManagementApi.of(broker_url, url)
