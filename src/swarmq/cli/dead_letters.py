"""`swarmq dead`: messages that nobody could use."""

from __future__ import annotations

from pathlib import Path

import click

from swarmq.cli.common import RUN, main, resolved, run_until_signalled
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError


@main.group()
def dead() -> None:
    """Look after messages that nobody could use (docs/swarm.md).

    \b
    swarmq dead list runs/demo                who sent what, and why it was refused
    swarmq dead show runs/demo ID
    swarmq dead requeue runs/demo ID          once the cause is mended
    swarmq dead purge runs/demo ID
    """


@dead.command("list")
@RUN
def dead_list(run: Path) -> None:
    """List dead letters with the reason each was refused. Looking changes nothing.

    \b
    swarmq dead list runs/demo
    """
    run_until_signalled(_dead_list(resolved(run)))


async def _dead_list(job: SwarmJob) -> None:
    from rich.table import Table

    from swarmq.broker.admin.dead_letters import letters
    from swarmq.runtime.terminal import console

    table = Table("kind", "from", "queue", "key", "reason", box=None)
    table.add_column("id", no_wrap=True)
    found = await letters(job.broker.url or "")
    for letter in found:
        table.add_row(letter.kind, letter.sender, letter.queue, letter.key, letter.reason, letter.id)
    console().print(table if found else "no dead letters")


@dead.command("show")
@RUN
@click.argument("id")
def dead_show(run: Path, id: str) -> None:  # noqa: A002 - the word people type
    """Print one dead letter.

    Where it was meant for, why it was refused, what is in it.

    \b
    swarmq dead show runs/demo 01a1fa68c1d27c0e
    """
    run_until_signalled(_dead_show(resolved(run), id))


async def _dead_show(job: SwarmJob, wanted: str) -> None:
    from swarmq.broker.admin.dead_letters import find, show
    from swarmq.runtime.terminal import visible

    click.echo(visible(show(await find(job.broker.url or "", wanted))))


@dead.command("requeue")
@RUN
@click.argument("ids", nargs=-1)
def dead_requeue(run: Path, ids: tuple[str, ...]) -> None:
    """Send dead letters back to the queues they were meant for.

    All of them without IDS.

    \b
    swarmq dead requeue runs/demo 01a1fa68c1d27c0e
    swarmq dead requeue runs/demo
    """
    run_until_signalled(_dead_requeue(resolved(run), ids))


async def _dead_requeue(job: SwarmJob, ids: tuple[str, ...]) -> None:
    from swarmq.broker.admin.dead_letters import requeue
    from swarmq.runtime.terminal import visible

    done = await requeue(job.broker.url or "", ids or None)
    click.echo(f"{done.sent} sent back")
    for letter, reason in done.left.items():
        click.echo(visible(f"{letter} stays: {reason}"))


@dead.command("purge")
@RUN
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Forget every dead letter.")
def dead_purge(run: Path, ids: tuple[str, ...], everything: bool) -> None:
    """Forget dead letters for good: the IDS given, or --all.

    \b
    swarmq dead purge runs/demo 01a1fa68c1d27c0e
    swarmq dead purge runs/demo --all
    """
    if bool(ids) == everything:
        raise ConfigError("say which dead letters to forget, by id, or --all")
    run_until_signalled(_dead_purge(resolved(run), None if everything else ids))


async def _dead_purge(job: SwarmJob, ids: tuple[str, ...] | None) -> None:
    from swarmq.broker.admin.dead_letters import purge

    click.echo(f"{await purge(job.broker.url or '', ids)} forgotten")
