"""`swarmq watch`, `swarmq status` and `swarmq runs`: what a run is doing, and which runs there are."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

import click
import msgspec

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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(run: Path, *, as_json: bool) -> None:
    """Say in one picture what a run is doing right now.

    The same as `swarmq watch --once`.

    \b
    swarmq status runs/demo
    swarmq status runs/demo --json | jq .policies.main.reward
    """
    run_until_signalled(_watch(run, once=True, as_json=as_json))


async def _watch(run: Path, *, once: bool, as_json: bool = False) -> None:
    from swarmq.logs import told
    from swarmq.observe.board import as_data
    from swarmq.observe.monitor import glance, look, watch

    job, notes = resolved(run), deque[str]()
    with told(notes.append):
        async with broker_of(job, "swarmq watch") as broker:
            if as_json:
                data = as_data(await look(job, broker, notes=notes), now=time.time())
                click.echo(msgspec.json.encode(data))
            elif once:
                await glance(job, broker, notes=notes)
            else:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_until_ended(job))
                    tasks.create_task(watch(job, broker, notes=notes))


async def _until_ended(job: SwarmJob) -> None:
    """Raises ConfigError when the run has ended, and its RabbitMQ with it."""
    while True:
        check_up(job)
        await asyncio.sleep(LOOK_EVERY_S)
