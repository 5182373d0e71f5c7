"""`swarmq watch`, `swarmq status` and `swarmq runs`: the state of a run, and the list of runs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path

import click
import msgspec

from swarmq.cli.common import RUN, check_up, load_live_run, main, open_broker, print_warnings, run_until_signalled
from swarmq.config import SwarmJob

POLL_S = 1.0


@main.command()
@RUN
@click.option("--once", is_flag=True, help="Print the state once and exit.")
@print_warnings()
def watch(run: Path, once: bool) -> None:
    """Follow a run in the terminal: steps, rewards, warnings.

    \b
    swarmq watch runs/demo
    """
    run_until_signalled(_watch(run, once=once))


@main.command()
@RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@print_warnings()
def status(run: Path, *, as_json: bool) -> None:
    """Show the present state of a run.

    The same as `swarmq watch --once`.

    \b
    swarmq status runs/demo
    swarmq status runs/demo --json | jq .policies.main.reward
    """
    run_until_signalled(_watch(run, once=True, as_json=as_json))


async def _watch(run: Path, *, once: bool, as_json: bool = False) -> None:
    from swarmq.observe.board import board_to_json
    from swarmq.observe.monitor import draw_once, read_board, watch
    from swarmq.runtime.logs import redirect_to

    job, notes = load_live_run(run), deque[str]()
    with redirect_to(notes.append):
        async with open_broker(job, "swarmq watch") as broker:
            if as_json:
                data = board_to_json(await read_board(job, broker, notes=notes), now=time.time())
                click.echo(msgspec.json.encode(data))
            elif once:
                await draw_once(job, broker, notes=notes)
            else:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_until_ended(job))
                    tasks.create_task(watch(job, broker, notes=notes))


async def _until_ended(job: SwarmJob) -> None:
    """Raise ConfigError as soon as the run and its private RabbitMQ have ended."""
    while True:
        check_up(job)
        await asyncio.sleep(POLL_S)


@main.command()
@click.argument("folder", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one run per line.")
@print_warnings()
def runs(folder: Path, *, as_json: bool) -> None:
    """List the runs in a folder.

    Shows for each run whether it is up, its newest step and reward, and their age. FOLDER is runs by default.

    \b
    swarmq runs
    swarmq runs /data/runs --json
    """
    from rich.table import Table

    from swarmq.observe.runs import format_age, list_runs, list_starting
    from swarmq.runtime.terminal import console

    rows = list_runs(folder)
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(row))
        return
    starting = list_starting(folder)
    if not rows and not starting:
        click.echo(f"no runs in {folder}")
        return
    table = Table("run", "state", box=None, pad_edge=False)
    for heading in ("step", "reward"):
        table.add_column(heading, justify="right")
    table.add_column("newest step")
    for name in starting:
        table.add_row(name, "starting", "", "", "none yet")
    now = time.time()
    for row in rows:
        several = len(row.policies) > 1
        steps = [f"{name} {one.step}" if several else str(one.step) for name, one in row.policies.items()]
        rewards = ["-" if one.reward is None else f"{one.reward:.3f}" for one in row.policies.values()]
        when = f"{format_age(now - row.at)} ago" if any(one.step for one in row.policies.values()) else "none yet"
        table.add_row(row.run, row.state, "\n".join(steps), "\n".join(rewards), when)
    console().print(table)
