"""`swarmq watch` and `swarmq status`: what a run is doing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from swarmq.cli.base import RUN, broker_of, check_up, main, resolved, run_until_signalled
from swarmq.config import SwarmJob

LOOK_EVERY_S = 1.0


@main.command()
@RUN
@click.option("--once", is_flag=True, help="Print one picture and stop.")
def watch(run: Path, once: bool) -> None:
    """Follow a run in the terminal: steps, rewards, warnings.

    \b
    swarmq watch runs/demo
    """
    run_until_signalled(_watch(run, once=once))


@main.command()
@RUN
def status(run: Path) -> None:
    """Say in one picture what a run is doing right now.

    The same as `swarmq watch --once`.

    \b
    swarmq status runs/demo
    """
    run_until_signalled(_watch(run, once=True))


async def _watch(run: Path, *, once: bool) -> None:
    from swarmq.observe.monitor import glance, watch

    job = resolved(run)
    async with broker_of(job, "swarmq watch") as broker:
        if once:
            await glance(job, broker)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_until_ended(job))
            tasks.create_task(watch(job, broker))


async def _until_ended(job: SwarmJob) -> None:
    """Raises ConfigError when the run has ended, and its RabbitMQ with it."""
    while True:
        check_up(job)
        await asyncio.sleep(LOOK_EVERY_S)
