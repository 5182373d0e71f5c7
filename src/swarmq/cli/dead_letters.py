"""`swarmq dead`: messages that no process could use."""

from __future__ import annotations

from pathlib import Path

import click

from swarmq.cli.common import RUN, load_live_run, main, run_until_signalled
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError


@main.group()
def dead() -> None:
    """Show, requeue and delete unusable messages. See docs/how-to/swarm.md.

    \b
    swarmq dead list runs/demo                senders, queues and reasons
    swarmq dead show runs/demo ID
    swarmq dead requeue runs/demo ID          after the cause is fixed
    swarmq dead purge runs/demo ID
    """


@dead.command("list")
@RUN
def dead_list(run: Path) -> None:
    """List dead letters with the reasons for which they were refused. Changes nothing.

    \b
    swarmq dead list runs/demo
    """
    run_until_signalled(_dead_list(load_live_run(run)))


async def _dead_list(job: SwarmJob) -> None:
    from rich.table import Table

    from swarmq.broker.admin.dead_letters import list_letters
    from swarmq.runtime.terminal import console

    table = Table("kind", "from", "queue", "key", "reason", box=None)
    table.add_column("id", no_wrap=True)
    found = await list_letters(job.broker.url or "")
    for letter in found:
        table.add_row(letter.kind, letter.sender, letter.queue, letter.key, letter.reason, letter.id)
    console().print(table if found else "no dead letters")


@dead.command("show")
@RUN
@click.argument("id")
def dead_show(run: Path, id: str) -> None:  # noqa: A002 - the name on the command line
    """Print one dead letter.

    Shows its queue, the reason for which it was refused, and its content.

    \b
    swarmq dead show runs/demo 01a1fa68c1d27c0e
    """
    run_until_signalled(_dead_show(load_live_run(run), id))


async def _dead_show(job: SwarmJob, wanted: str) -> None:
    from swarmq.broker.admin.dead_letters import find_letter, format_letter
    from swarmq.runtime.terminal import visible

    click.echo(visible(format_letter(await find_letter(job.broker.url or "", wanted))))


@dead.command("requeue")
@RUN
@click.argument("ids", nargs=-1)
def dead_requeue(run: Path, ids: tuple[str, ...]) -> None:
    """Send dead letters back to their queues.

    Without IDS, all of them.

    \b
    swarmq dead requeue runs/demo 01a1fa68c1d27c0e
    swarmq dead requeue runs/demo
    """
    run_until_signalled(_dead_requeue(load_live_run(run), ids))


async def _dead_requeue(job: SwarmJob, ids: tuple[str, ...]) -> None:
    from swarmq.broker.admin.dead_letters import requeue_letters
    from swarmq.runtime.terminal import visible

    done = await requeue_letters(job.broker.url or "", ids or None)
    click.echo(f"requeued {done.sent}")
    for letter, reason in done.left.items():
        click.echo(visible(f"kept {letter}: {reason}"))


@dead.command("purge")
@RUN
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Delete every dead letter.")
def dead_purge(run: Path, ids: tuple[str, ...], everything: bool) -> None:
    """Delete dead letters: those with the given IDS, or --all.

    \b
    swarmq dead purge runs/demo 01a1fa68c1d27c0e
    swarmq dead purge runs/demo --all
    """
    if bool(ids) == everything:
        raise ConfigError("name the dead letters to delete by id, or use --all")
    run_until_signalled(_dead_purge(load_live_run(run), None if everything else ids))


async def _dead_purge(job: SwarmJob, ids: tuple[str, ...] | None) -> None:
    from swarmq.broker.admin.dead_letters import purge_letters

    click.echo(f"deleted {await purge_letters(job.broker.url or '', ids)}")
