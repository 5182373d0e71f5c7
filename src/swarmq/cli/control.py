"""Commands that change a run while it is up: settings, pause, drain, resume, checkpoint, stop."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from swarmq.cli.common import RUN, choose_policy, load_live_run, main, open_broker, run_until_signalled
from swarmq.messages import Action
from swarmq.runtime.terminal import visible


@main.command("set")
@RUN
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_command(run: Path, settings: tuple[str, ...]) -> None:
    """Change settings while the run is up.

    Either all given settings change or none. The output says what changed and from which step on. A change survives restarts until
    the setting is edited in the job file. Settings that need a restart are refused.

    \b
    swarmq set runs/demo policies.main.train.learning_rate=1e-6
    swarmq set runs/demo 'mix={math = 0.6, code = 0.4}' groups.when_dry=lend
    swarmq set runs/demo policies.main.sampling.temperature=0.9 kinds.code.group_size=4
    """
    from swarmq.config import parse_assignments

    run_until_signalled(_ask(run, "set", parse_assignments(settings)))


@main.command()
@RUN
def pause(run: Path) -> None:
    """Pause training, and issue no tickets.

    Each learner pauses after its current step. Running episodes continue, and wait to be trained.

    \b
    swarmq pause runs/demo     # continue with: swarmq resume runs/demo
    """
    run_until_signalled(_ask(run, "pause"))


@main.command()
@RUN
def drain(run: Path) -> None:
    """Issue no tickets, and train the episodes that have begun.

    `swarmq watch` shows when the run is drained.

    \b
    swarmq drain runs/demo     # for example before stopping the workers
    """
    run_until_signalled(_ask(run, "drain"))


@main.command()
@RUN
def resume(run: Path) -> None:
    """Continue after `swarmq pause`, `drain` or `stop`.

    `swarmq up` starts learners again that have ended because of a stop.

    \b
    swarmq resume runs/demo
    """
    run_until_signalled(_ask(run, "resume"))


@main.command()
@RUN
def checkpoint(run: Path) -> None:
    """Write a checkpoint of every trained policy.

    Each learner writes it after its current step.

    \b
    swarmq checkpoint runs/demo
    """
    run_until_signalled(_ask(run, "checkpoint"))


@main.command()
@RUN
@click.option("--after", type=click.IntRange(min=1), metavar="STEP", help="Last step; the current one by default.")
@click.option("--policy", help="Policy to stop; all trained policies by default.")
def stop(run: Path, after: int | None, policy: str | None) -> None:
    """End learners after a step, with a checkpoint.

    Without --after, a learner ends after its current step, or at once if it waits for data. Engines and proxies stay up. The run
    stays stopped, also across restarts, until `swarmq resume`.

    \b
    swarmq stop runs/demo
    swarmq stop runs/demo --after 200
    swarmq stop runs/team --after 200 --policy planner
    """
    job = load_live_run(run)
    chosen = [choose_policy(job, policy)] if policy else list(job.trained)
    run_until_signalled(_ask(run, "stop", dict.fromkeys(chosen, after)))


async def _ask(run: Path, action: Action, settings: dict[str, Any] | None = None) -> None:
    import getpass

    from swarmq.observe.control_requests import describe_answer, send_command

    job, say = load_live_run(run), functools.partial(click.echo, err=True)
    async with open_broker(job, f"swarmq {action}") as broker:
        await broker.declare(job.run, policies=[], kinds=[], replicas=job.broker.replicas)
        for line in describe_answer(
            await send_command(broker, job.run, action, settings, sender=getpass.getuser(), say=say)
        ):
            click.echo(visible(line))
