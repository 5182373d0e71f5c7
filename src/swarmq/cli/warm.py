"""`swarmq warm`: supervised warm start of a model, before there is a run."""

from __future__ import annotations

from pathlib import Path

import click

from swarmq.cli.common import JOB, SETS, choose_policy, main, require_extras
from swarmq.config import SwarmJob
from swarmq.runtime.wording import count_of


@main.command("warm")
@JOB
@click.argument("demonstrations", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--policy", help="Policy whose model is trained; required if the job trains several.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1), help="Passes over the demonstrations.")
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Demonstrations per step.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    help="Default 2e-5, with adapters 2e-4; the job's rate is meant for rewards and too low here.",
)
@SETS
def warm_command(
    job: Path,
    demonstrations: Path,
    out: Path,
    policy: str | None,
    epochs: int,
    batch: int,
    learning_rate: float | None,
    sets: tuple[str, ...],
) -> None:
    """Warm-start the job's model by supervised training on chats.

    DEMONSTRATIONS has a JSON object with "messages" (and "tools"), or "prompt" and "completion", on every line; the assistant's messages,
    or the completion, are trained. OUT becomes a model folder for policies.X.model. Precision, adapters and other settings come from policies.X.train.

    \b
    swarmq warm job.toml chats.jsonl models/warm --epochs 2
    """
    require_extras("learner")
    import msgspec

    from swarmq.learner.distributed.processes import is_main
    from swarmq.learner.warm_start import ADAPTERS_RATE, RATE, WarmStart, WarmStartProgress, warm

    settings = SwarmJob.load(job, sets=sets)
    name = choose_policy(settings, policy)
    train = settings.train_of(name)
    rate = learning_rate or (ADAPTERS_RATE if train.lora else RATE)

    def show(now: WarmStartProgress) -> None:
        if now.step == 1:
            click.echo(f"learning rate {rate:g}" + ("" if learning_rate else " (change it with --learning-rate)"))
        if now.step == 1 and now.left_out:
            click.echo(f"left out {count_of(now.left_out, 'demonstration')} longer than {now.max_length} tokens")
        click.echo(f"step {now.step} of {now.steps}, loss {now.loss:.3f}")

    plan = WarmStart(
        model=settings.policies[name].model,
        demonstrations=demonstrations,
        out=out,
        max_model_len=settings.policies[name].engine.max_model_len,
        train=msgspec.structs.replace(train, learning_rate=rate),
        epochs=epochs,
        batch=batch,
    )
    warm(plan, show)
    if is_main():
        click.echo(f"model saved to {out}: set policies.{name}.model to this folder")
