"""`swarmq inspect`, `swarmq replay` and `swarmq doctor`: commands that read a stored run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from swarmq.cli.common import (
    RUN,
    choose_policy,
    load_stored_run,
    main,
    print_warnings,
    private_files,
    require_extras,
    terminal_width,
)
from swarmq.config import RunFolder
from swarmq.errors import ConfigError


@main.command()
@RUN
@click.argument("episode", required=False)
@click.option(
    "--step", type=click.IntRange(min=1), help="List the episodes of this step and the episodes dropped before it."
)
@click.option("--policy", help="Policy to inspect; required if the run trains several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one batch or episode per line, or the one EPISODE.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Write the episode to this file, a self-contained page that only you can read.",
)
@print_warnings()
def inspect(
    run: Path, episode: str | None, step: int | None, policy: str | None, *, as_json: bool, html: Path | None
) -> None:
    """Show batches, episodes and every token.

    Lists the batches of a run or the episodes of a step, or shows every token of one EPISODE.

    EPISODE is an episode id, or its beginning or end (ids of the same minute begin alike). Each token is shown with its id, whether
    it is trained, its log-probability under the weights that sampled it and under those that trained it, its advantage and its weight
    version, coloured by its contribution to the step.

    \b
    swarmq inspect runs/demo
    swarmq inspect runs/demo --step 4
    swarmq inspect runs/demo 5d0c19e7
    swarmq inspect runs/demo 5d0c19e7 --html episode.html
    """
    require_extras("inspect")
    if html and episode is None:
        raise ConfigError("--html needs an EPISODE; `swarmq inspect RUN --step N` lists the episodes of a step")
    if step is not None and episode is not None:
        raise ConfigError("--step cannot be combined with EPISODE: it lists the episodes of a step")
    import msgspec

    from swarmq.observe.inspect.html import render_page
    from swarmq.observe.inspect.read import find_episode, load_decoder, read_batches, read_step
    from swarmq.observe.inspect.terminal import draw_batches, draw_episode, draw_step, print_parts
    from swarmq.runtime.terminal import console

    job, folder = load_stored_run(run), RunFolder(run)
    chosen = choose_policy(job, policy)
    log = folder.batch_log(chosen)
    if episode is None:
        rows: Sequence[msgspec.Struct]
        if step is None:
            rows = batches = list(read_batches(log))
            drawn = draw_batches(batches)
        else:
            rows = episodes = read_step(log, step)
            drawn = draw_step(episodes)
        if as_json:
            for row in rows:
                click.echo(msgspec.json.encode(row))
        else:
            print_parts(console(), drawn)
        return
    view = find_episode(folder, chosen, episode, load_decoder(job.policies[chosen].model))
    if html:
        try:
            with private_files():
                html.write_text(render_page(view), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {html}: cannot be written ({error.strerror})") from error
    if as_json:
        click.echo(msgspec.json.encode(view))
    elif not html:
        print_parts(console(), draw_episode(view))


POLICY = click.option("--policy", help="Policy; required if the run trains several.")


@main.command()
@RUN
@click.argument("to", type=click.Path(path_type=Path))
@POLICY
@click.option(
    "--from",
    "start",
    type=click.Path(path_type=Path),
    help="Checkpoint folder to start from; the initial model by default.",
)
@click.option("--until", type=click.IntRange(min=0), help="Last weight version to train.")
@print_warnings()
def replay(run: Path, to: Path, policy: str | None, start: Path | None, until: int | None) -> None:
    """Train again from the batch log alone.

    Writes the checkpoint into the new folder TO. Needs no broker and no engine, and changes nothing in the run folder.

    \b
    swarmq replay runs/demo /tmp/again                        from the initial model to the end of the log
    swarmq replay runs/demo /tmp/again --from runs/demo/main/checkpoints/step-00000010
    swarmq replay runs/team /tmp/again --policy planner --until 40
    """
    require_extras("learner")
    from swarmq.learner.replay import replay as train_again

    job, folder = load_stored_run(run), RunFolder(run)
    version = train_again(
        job,
        choose_policy(job, policy),
        folder,
        to_folder=to,
        from_checkpoint=start,
        until=until,
        report=lambda step: click.echo(f"step {step['version']}  loss {step['loss']:.6f}"),
    )
    click.echo(f"version {version} written to {to}")


@main.command()
@RUN
@POLICY
@click.option(
    "--batches", default=3, show_default=True, type=click.IntRange(min=1), help="Number of stored batches to replay."
)
@click.option(
    "--device",
    type=click.Choice(["cpu"]),
    help="Device of the replay; cpu (FP32) leaves the GPUs to a running learner and engines.",
)
def doctor(run: Path, policy: str | None, batches: int, device: str | None) -> None:
    """Check that a run trains on what was sampled, and learns.

    Prints a verdict first. Reports signs of collapse and significant trends, checks stored batches against the assumptions of the
    losses, replays them through the learner from a checkpoint, and explains where engine and learner disagree. Changes nothing.
    Exits with status 1 if something is wrong or could not be examined.

    \b
    swarmq doctor runs/demo
    swarmq doctor runs/team --policy planner --batches 4
    swarmq doctor runs/demo --device cpu
    """
    require_extras("learner")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # set before the import of torch, so that torch uses no GPU
    from swarmq.learner.doctor.examine import examine
    from swarmq.learner.health.findings import Finding, verdict
    from swarmq.learner.health.signs import find_signs
    from swarmq.observe.curves import read_events
    from swarmq.observe.lines import wrap_beside
    from swarmq.runtime.logs import redirect_to

    job, folder = load_stored_run(run), RunFolder(run)
    name = choose_policy(job, policy)
    steps: dict[int, dict[str, Any]] = {}
    try:
        events = (e for e in read_events(folder.events) if (e.name, e.source) == ("step", f"learner.{name}"))
        steps = {int(event.fields["version"]): event.fields for event in events}
    except FileNotFoundError:
        pass  # `find_signs` reports the lack of steps
    except OSError as error:
        raise ConfigError(f"{folder.events}: cannot be read ({error.strerror})") from error
    colors = {"ok": "green", "note": "blue", "warning": "yellow", "error": "red"}
    found = list(find_signs([fields for _, fields in sorted(steps.items())], job.groups.max_staleness))
    warned: list[str] = []
    with redirect_to(warned.append):
        found += examine(job, name, folder, batches=batches)
    notes = (text.removeprefix("warning: ") for text in warned if text.startswith("warning: "))
    found += [Finding(level="note", check="while reading", text=text) for text in notes]
    for finding in (verdict(found), *found):
        head = f"{finding.level:8}"
        line = wrap_beside(head, finding.line, width=terminal_width())
        click.echo(click.style(head, fg=colors[finding.level]) + line.removeprefix(head))
    sys.exit(int(any(finding.level == "error" for finding in found)))
