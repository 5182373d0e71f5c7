"""Change a run that is up: settings, pause, drain, resume, a checkpoint, a last step."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click

from swarmq.cli.common import RUN, broker_of, main, one_policy, resolved, run_until_signalled
from swarmq.messages import Action
from swarmq.runtime.terminal import visible


@main.command("set")
@RUN
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_command(run: Path, settings: tuple[str, ...]) -> None:
    """Change settings while the run is up.

    All of those given are changed, or none. The answer says what changed and from which step on. A change survives restarts until the job file itself is
    edited at that place. What needs a restart is refused.

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
    """Hold learners and issue no tickets.

    A learner stops at its next step border; episodes that have begun go on and wait.

    \b
    swarmq pause runs/demo     # change something, then: swarmq resume runs/demo
    """
    run_until_signalled(_ask(run, "pause"))


@main.command()
@RUN
def drain(run: Path) -> None:
    """Issue no tickets, and train what is under way.

    `swarmq watch` says when it is done.

    \b
    swarmq drain runs/demo     # before the workers are taken away, say
    """
    run_until_signalled(_ask(run, "drain"))


@main.command()
@RUN
def resume(run: Path) -> None:
    """Go on after `swarmq pause`, `drain` or `stop`.

    Learners that have ended because of a stop are started again by `swarmq up`.

    \b
    swarmq resume runs/demo
    """
    run_until_signalled(_ask(run, "resume"))


@main.command()
@RUN
def checkpoint(run: Path) -> None:
    """Write a checkpoint of every trained policy.

    Each is written at the learner's next step border.

    \b
    swarmq checkpoint runs/demo
    """
    run_until_signalled(_ask(run, "checkpoint"))


@main.command()
@RUN
@click.option("--after", type=click.IntRange(min=1), metavar="STEP", help="The last step; the present one by default.")
@click.option("--policy", help="Only this one; all trained ones by default.")
def stop(run: Path, after: int | None, policy: str | None) -> None:
    """Let learners end after a step, with a checkpoint.

    Without --after: after the present step, and at once where they wait for data. Engines and
    proxy stay up. The run stays stopped, also when it is started again, until `swarmq resume`.

    \b
    swarmq stop runs/demo
    swarmq stop runs/demo --after 200
    swarmq stop runs/team --after 200 --policy planner
    """
    job = resolved(run)
    chosen = [one_policy(job, policy)] if policy else list(job.trained)
    run_until_signalled(_ask(run, "stop", dict.fromkeys(chosen, after)))


async def _ask(run: Path, action: Action, settings: dict[str, Any] | None = None) -> None:
    import getpass

    from swarmq.observe.control_requests import ask, lines

    job, say = resolved(run), functools.partial(click.echo, err=True)
    async with broker_of(job, f"swarmq {action}") as broker:
        await broker.declare(job.run, policies=[], kinds=[])
        for line in lines(await ask(broker, job.run, action, settings, sender=getpass.getuser(), say=say)):
            click.echo(visible(line))
