"""`swarmq warm`: a supervised start, before there is a run."""

from __future__ import annotations

from pathlib import Path

import click

from swarmq.cli.base import JOB, SETS, main, need, one_policy
from swarmq.config import SwarmJob


@main.command("warm")
@JOB
@click.argument("demonstrations", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--policy", help="Whose model; needed when the job trains several.")
@click.option(
    "--epochs", default=1, show_default=True, type=click.IntRange(1), help="Times through the demonstrations."
)
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Demonstrations of one step.")
@SETS
def warm_command(
    job: Path, demonstrations: Path, out: Path, policy: str | None, epochs: int, batch: int, sets: tuple[str, ...]
) -> None:
    """Teach the job's model a format from chats, by supervision.

    A warm start, before rewards say what pays. DEMONSTRATIONS has a JSON object with "messages" (and "tools") on every line; what the assistant says is learned. OUT
    becomes a model folder for policies.X.model. Learning rate, precision and the rest are those of policies.X.train.

    \b
    swarmq warm job.toml chats.jsonl models/warm --epochs 2
    """
    need("learner")
    from swarmq.learner.children import is_main
    from swarmq.learner.warm import Progress, WarmStart, warm

    settings = SwarmJob.load(job, sets=sets)
    name = one_policy(settings, policy)
    train = settings.train_of(name)

    def show(now: Progress) -> None:
        if now.step == 1 and now.left_out:
            click.echo(f"left out, since longer than {now.max_length} tokens: {now.left_out}")
        if now.step == 1 and now.steps < train.warmup_steps:
            click.echo(
                f"warning: all of the {now.steps} steps are within policies.{name}.train.warmup_steps = {train.warmup_steps}, so the learning "
                "rate never reaches what it is set to: lower that, or take more --epochs, more demonstrations or a smaller --batch"
            )
        click.echo(f"step {now.step} of {now.steps}, loss {now.loss:.3f}")

    plan = WarmStart(
        model=settings.policies[name].model,
        demonstrations=demonstrations,
        out=out,
        max_model_len=settings.policies[name].engine.max_model_len,
        train=train,
        epochs=epochs,
        batch=batch,
    )
    warm(plan, show)
    if is_main():
        click.echo(f"{out}: set policies.{name}.model to it")
