"""`swarmq inspect`, `swarmq plot`, `swarmq replay` and `swarmq doctor`: commands that read a stored run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError, EpisodeError
from swarmq.runtime.terminal import visible

if TYPE_CHECKING:
    from swarmq.observe.index import RunIndex


ANY = "any"
"""Value of --dropped without a reason."""


@main.command()
@RUN
@click.argument("episode", required=False)
@click.option(
    "--step",
    type=click.IntRange(1, 2**31 - 1),
    help="List the episodes of this step and the episodes dropped before it.",
)
@click.option(
    "--dropped",
    is_flag=False,
    flag_value=ANY,
    metavar="[REASON]",
    help="List finished episodes that were not trained; with a REASON, all episodes with it.",
)
@click.option("--failed", is_flag=True, help="List episodes that failed, were aborted or fell silent.")
@click.option("--eval", "evaluated", is_flag=True, help="List evaluation episodes.")
@click.option(
    "--open", "is_open", is_flag=True, help="List episodes that run, wait for their group or are with a learner."
)
@click.option("--kind", help="List episodes of this kind.")
@click.option("--reward", metavar="RANGE", help="List episodes with such a reward: '<0.2', '>=1', '0.2..0.5' or '0'.")
@click.option("--client", help="List episodes of this client: its id, the name of its invite, or how ids begin.")
@click.option("--task", help="List the attempts at this task.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), help="Most episodes to list, newest first; 50 by default.")
@click.option("--policy", help="Policy to inspect; required if the run trains several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one batch or episode per line, or the one EPISODE.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Write the episode to this file, a self-contained page that only you can read.",
)
@print_warnings()
def inspect(
    run: Path,
    episode: str | None,
    step: int | None,
    dropped: str | None,
    kind: str | None,
    reward: str | None,
    client: str | None,
    task: str | None,
    limit: int | None,
    policy: str | None,
    *,
    failed: bool,
    evaluated: bool,
    is_open: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Show batches, episodes and every token.

    Lists the batches of a run, the episodes of a step, or episodes chosen by the options, newest first; or shows one EPISODE,
    trained or not: why it was or was not trained, its conversation and every token.

    --dropped, --failed, --eval and --open together list the episodes of any of them; the other options narrow that down.

    EPISODE is an episode id, or its beginning or end (ids of the same minute begin alike). Each token is shown with its id, whether
    it is trained, its log-probability under the weights that sampled it and under those that trained it, its advantage and its weight
    version, coloured by its contribution to the step.

    \b
    swarmq inspect runs/demo
    swarmq inspect runs/demo --step 4
    swarmq inspect runs/demo --dropped                 why episodes are not trained
    swarmq inspect runs/demo --failed --kind math
    swarmq inspect runs/demo --reward '<0.2' --limit 5
    swarmq inspect runs/demo 5d0c19e7
    swarmq inspect runs/demo 5d0c19e7 --html episode.html
    """
    require_extras("inspect")
    states = {
        "dropped": dropped == ANY,
        "dropped,failed,stray": dropped not in {None, ANY},
        "failed": failed,
        "eval": evaluated,
        "open,waiting,published": is_open,
    }
    choice = {
        "state": ",".join(names for names, is_chosen in states.items() if is_chosen),
        "reason": "" if dropped in {None, ANY} else dropped,
        "kind": kind,
        "client": client,
        "task": task,
        **_parse_reward(reward),
    }
    chosen = {name: value for name, value in choice.items() if value not in {None, ""}}
    if dropped not in {None, ANY} and (failed or evaluated or is_open):
        raise ConfigError(
            f"--dropped {dropped} cannot be combined with --failed, --eval or --open: a REASON finds failed episodes, too"
        )
    if html and episode is None:
        raise ConfigError("--html needs an EPISODE; `swarmq inspect RUN --step N` lists the episodes of a step")
    if step is not None and episode is not None:
        raise ConfigError("--step cannot be combined with EPISODE: it lists the episodes of a step")
    if chosen and episode is not None:
        raise ConfigError(
            "EPISODE cannot be combined with options that list episodes (a REASON comes right behind --dropped)"
        )
    job, folder = load_stored_run(run), RunFolder(run)
    if episode is not None:
        _inspect_episode(job, folder, episode, policy, as_json=as_json, html=html)
    elif chosen or limit is not None:
        more = {"step": step, "policy": policy}
        _list_episodes(
            folder,
            chosen | {name: value for name, value in more.items() if value is not None},
            limit or 50,
            as_json=as_json,
        )
    else:
        _list_batches(folder, choose_policy(job, policy), step, as_json=as_json)


def _parse_reward(text: str | None) -> dict[str, float]:
    """Return the fields of `EpisodeFilter` for a range of rewards. Raises ConfigError if the text is not a range."""
    if text is None:
        return {}
    signs = {"<=": "reward_max", ">=": "reward_min", "<": "reward_below", ">": "reward_above"}
    try:
        for sign, name in signs.items():
            if text.startswith(sign):
                return {name: float(text.removeprefix(sign))}
        low, _, high = text.removeprefix("=").partition("..")
        return {"reward_min": float(low), "reward_max": float(high or low)}
    except ValueError:
        raise ConfigError(f"--reward {text!r}: give a range such as '<0.2', '>=1', '0.2..0.5' or '0'") from None


def _list_batches(folder: RunFolder, policy: str, step: int | None, *, as_json: bool) -> None:
    import msgspec

    from swarmq.observe.inspect.read import read_batches, read_step
    from swarmq.observe.inspect.terminal import draw_batches, draw_step, print_parts
    from swarmq.runtime.terminal import console

    log = folder.batch_log(policy)
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


def _list_episodes(folder: RunFolder, chosen: dict[str, Any], limit: int, *, as_json: bool) -> None:
    import msgspec

    from swarmq.observe.episode_terminal import draw_list
    from swarmq.observe.index import EpisodeFilter
    from swarmq.observe.inspect.terminal import print_parts
    from swarmq.runtime.terminal import console

    index = _read_index(folder)
    index.check(EpisodeFilter(**chosen))
    for note in index.progress.notes:
        click.echo(visible(f"note: {note}"), err=True)
    wanted = EpisodeFilter(**chosen)
    page = index.page(wanted, limit=limit)
    if as_json:
        for row in page.rows:
            click.echo(msgspec.json.encode(row))
    else:
        details = index.details(row.id for row in page.rows)
        print_parts(console(), draw_list(page.rows, page.total, index.values("reason", wanted), details))


def _read_index(folder: RunFolder) -> RunIndex:
    """Return the index of a run, brought up to date."""
    from swarmq.observe.index import RunIndex

    with private_files():
        index = RunIndex(folder)
        index.update()
    return index


def _inspect_episode(
    job: SwarmJob, folder: RunFolder, part: str, policy: str | None, *, as_json: bool, html: Path | None
) -> None:
    """Show one episode: as its learner trained it, or else its conversation and tokens with the reason why it was not
    trained."""
    import msgspec

    from swarmq.observe.episode_terminal import draw_detail
    from swarmq.observe.episodes import read_all_tokens, read_detail
    from swarmq.observe.inspect.html import render_page
    from swarmq.observe.inspect.read import Decoders, find_episode
    from swarmq.observe.inspect.terminal import draw_episode, print_parts
    from swarmq.runtime.terminal import console

    index = _read_index(folder)
    known = index.find(part)
    trained = {place.policy: place for place in known.places if not place.reason}
    name = choose_policy(job, policy) if policy is not None or len(trained) > 1 else next(iter(trained), "")
    decoders = Decoders(job, folder)
    if name in trained and (folder.batch_log(name) / trained[name].segment).exists():
        decode = decoders(name)
        if isinstance(decode, str):
            raise EpisodeError(f"{decode}: it is needed to show a trained episode")
        view = find_episode(folder, name, known.row.id, decode)
        if html:
            _write_page(html, render_page(view).encode())
        if as_json:
            click.echo(msgspec.json.encode(view))
        elif not html:
            print_parts(console(), draw_episode(view))
        return
    detail = read_detail(index, known.row.id)
    pages = read_all_tokens(index, known.row.id, decoders=decoders)
    if html:
        from swarmq.dashboard.export import export_html

        path = f"runs/{job.run}/episodes/{detail.row.id}"
        tokens = {f"{path}/tokens?timeline={page.timeline}": page for page in pages}
        _write_page(html, export_html("episode", {path: detail, **tokens}, folder=folder.path))
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.structs.asdict(detail), "tokens": pages}))
    elif not html:
        print_parts(console(), draw_detail(detail, pages))


def _write_page(path: Path, page: bytes) -> None:
    try:
        with private_files():
            path.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written ({error.strerror})") from error


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    default="reward.png",
    show_default=True,
    type=click.Path(path_type=Path),
    help="File to write: .png, .svg or .pdf.",
)
@click.option(
    "--series",
    multiple=True,
    metavar="NAME",
    help="What to draw; may be repeated: reward, evaluation, staleness, drops, times, or any figure of a step, e.g. entropy.",
)
@click.option("--policy", help="Policy to draw; all by default.")
@print_warnings()
def plot(runs: tuple[Path, ...], out: Path, series: tuple[str, ...], policy: str | None) -> None:
    """Draw curves of one or several runs.

    Draws reward, evaluation with its intervals, staleness, dropped episodes and the times of a step, of live, stopped and copied
    runs. Several runs are drawn into one figure.

    \b
    swarmq plot runs/demo
    swarmq plot runs/a runs/b --out compare.svg
    swarmq plot runs/demo --series reward --series entropy
    """
    require_extras("inspect")
    from swarmq.observe.open_run import open_run
    from swarmq.observe.plot import draw_runs

    draw_runs([open_run(run) for run in runs], out, series=series, policy=policy)
    click.echo(f"written to {out}")


POLICY = click.option("--policy", help="Policy; required if the run trains several.")


Ends = tuple[int | None, int | None]


class StepRange(click.ParamType):  # type: ignore[type-arg] # click 8.1 has no argument
    """The first and the last step of `A:B`, `A:`, `:B` or `A`."""

    name = "A:B"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Ends:
        if not isinstance(value, str):  # from another machine, which converted it already
            value = ":".join("" if end is None else str(end) for end in value)
        first, colon, last = value.partition(":")
        ends = first, last if colon else first
        if not any(ends) or not all(end.isdecimal() for end in ends if end):
            self.fail(f"{value!r}: write A:B with the first and the last step, e.g. 10:20, 10: or :20", param, context)
        begin, end = (int(one) if one else None for one in ends)
        if begin == 0 or (begin is not None and end is not None and end < begin):
            self.fail(f"{value!r}: steps begin with 1, and the last one does not come before the first", param, context)
        return begin, end


@main.command()
@RUN
@click.argument("to", required=False, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="New folder to write to; the same as TO.")
@POLICY
@click.option(
    "--from",
    "start",
    type=click.Path(path_type=Path),
    help="Checkpoint folder to start from; by default the newest one before --steps, else the initial model.",
)
@click.option("--until", type=click.IntRange(min=0), help="Last weight version to train.")
@click.option("--steps", type=StepRange(), metavar="A:B", help="First and last step to train.")
@click.option("--loss", metavar="NAME", help="Train under another loss; the same as --set train.loss.name=NAME.")
@click.option("--advantage", metavar="NAME", help="Train with other advantages; --set train.advantage=NAME.")
@click.option("--set", "sets", multiple=True, metavar="train.KEY=VALUE", help="Train with another setting of train.")
@print_warnings()
def replay(
    run: Path,
    to: Path | None,
    out: Path | None,
    policy: str | None,
    start: Path | None,
    until: int | None,
    steps: Ends | None,
    loss: str | None,
    advantage: str | None,
    sets: tuple[str, ...],
) -> None:
    """Train again from the batch log, also under another method.

    Writes the checkpoint into the new folder TO. Needs no broker and no engine, and changes nothing in the run folder. With --loss,
    --advantage or --set, the same episodes are trained twice, as they were and under the changed settings, and TO also gets both
    curves: loss, divergence from the sampler, entropy, gradient norm, distance of the weights (comparison.md, .jsonl, .png). That is
    off-policy: the episodes stay those of the original weights.

    \b
    swarmq replay runs/demo /tmp/again                        from the initial model to the end of the log
    swarmq replay runs/demo /tmp/again --from runs/demo/main/checkpoints/step-00000010
    swarmq replay runs/team /tmp/again --policy planner --until 40
    swarmq replay runs/demo /tmp/cispo --loss cispo --advantage grpo --steps 11:20
    swarmq replay runs/demo /tmp/slow --set train.learning_rate=1e-7
    """
    if (to is None) == (out is None):
        raise click.UsageError("name the new folder, as TO or with --out")
    folder_out = to or out
    assert folder_out is not None
    require_extras("learner")
    from swarmq.learner.replay import compare, find_start
    from swarmq.learner.replay import replay as train_again
    from swarmq.observe.comparison import describe_step, explain, write_comparison

    job, folder = load_stored_run(run), RunFolder(run)
    name, (first, last) = choose_policy(job, policy), steps or (None, None)
    last = until if last is None else last
    if first is not None:
        found = find_start(job, name, folder, first, last)
        start = start or found
    changes = [*([f"train.loss.name={loss}"] if loss else []), *([f"train.advantage={advantage}"] if advantage else [])]
    if changes or sets:
        comparison = compare(
            job,
            name,
            folder,
            sets=[*changes, *sets],
            to_folder=folder_out,
            from_checkpoint=start,
            first=first,
            last=last,
            report=lambda step: click.echo(describe_step(step)),
        )
        for line in explain(comparison):
            click.echo(line)
        for path in write_comparison(folder_out, comparison):
            click.echo(f"written to {path}")
        return
    version = train_again(
        job,
        name,
        folder,
        to_folder=folder_out,
        from_checkpoint=start,
        until=last,
        report=lambda step: click.echo(f"step {step['version']}  loss {step['loss']:.6f}"),
    )
    click.echo(f"version {version} written to {folder_out}")


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
