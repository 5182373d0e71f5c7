"""`swarmq run -- COMMAND`: attempt tasks with a program that is run as it is, such as a coding agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swarmq.cli.common import main, run_until_signalled
from swarmq.errors import TaskError
from swarmq.runtime.wording import count_of

ANY_EXIT = "any"
FOLDER = click.Path(path_type=Path, file_okay=False)


@main.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--invite", help="Invite text, file or run folder; $SWARMQ_INVITE by default.")
@click.option("--prompt", help="Text of one task.")
@click.option("--tasks", "data", metavar="DATA", help="Tasks to attempt: whatever `swarmq feed` takes.")
@click.option("--queue", is_flag=True, help="Attempt the tasks of a queue, like `swarmq worker`, until Ctrl-C.")
@click.option(
    "--test", metavar="COMMAND", help="Shell command that tests the working copy; reward 1 if it exits with 0."
)
@click.option("--score", metavar="MODULE:FUNCTION", help="Function of (working copy, task) that returns the reward.")
@click.option("--folder", type=FOLDER, help="Folder or git repository to copy for every attempt.")
@click.option("--restore", multiple=True, metavar="PATH", help="Put PATH back before the score; may be repeated.")
@click.option("--prompt-field", default="prompt", show_default=True, help="Field of a task that holds its text.")
@click.option(
    "--scored-exit",
    "scored_exits",
    multiple=True,
    default=("0",),
    show_default=True,
    metavar="CODE",
    help="Exit code of COMMAND after which its work is scored, or `any`; may be repeated. All others fail the episode.",
)
@click.option(
    "--timeout",
    default=1800.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for COMMAND.",
)
@click.option(
    "--test-timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds for the test.",
)
@click.option(
    "--first-call",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds without a model call after which a warning names the settings that COMMAND got.",
)
@click.option(
    "--context",
    default=32_768,
    show_default=True,
    type=click.IntRange(min=1024),
    help="Context length, in tokens, that COMMAND is configured with.",
)
@click.option("--kind", help="Task kind; required if the run has several.")
@click.option("--eval", "for_eval", is_flag=True, help="Evaluate; nothing is trained.")
@click.option(
    "--repeats", type=click.IntRange(min=1), help="Attempts per task; the group size by default, 1 with --eval."
)
@click.option("--limit", type=click.IntRange(min=1), help="Attempt only the first N tasks of DATA.")
@click.option(
    "--concurrency", default=4, show_default=True, type=click.IntRange(min=1), help="Commands at the same time."
)
@click.option(
    "--max-attempts",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Attempts before a slot is given up.",
)
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE", help="Further variable; may be repeated.")
@click.option("--keep-home", is_flag=True, help="Leave HOME as it is: COMMAND sees your own settings and logins.")
@click.option(
    "--any-key", is_flag=True, help="Accept calls without the episode's key, for programs that cannot be told one."
)
@click.option(
    "--port", default=0, type=click.IntRange(0, 65535), help="Fixed port for the calls; needs --concurrency 1."
)
@click.option("--container", metavar="IMAGE", help="Run COMMAND and test in a container of docker or podman.")
@click.option(
    "--logs",
    default=Path("swarmq-logs"),
    show_default=True,
    type=FOLDER,
    help="Folder for the output of every attempt.",
)
@click.option(
    "--log-limit",
    default=1_000_000,
    show_default=True,
    type=click.IntRange(min=1000),
    help="Bytes kept of each output.",
)
@click.option("--copies", type=FOLDER, help="Folder for working copies; the system's temporary folder by default.")
@click.option("--keep", is_flag=True, help="Keep the working copies.")
def run(
    command: tuple[str, ...],
    invite: str | None,
    prompt: str | None,
    data: str | None,
    queue: bool,
    for_eval: bool,
    kind: str | None,
    repeats: int | None,
    limit: int | None,
    concurrency: int,
    max_attempts: int,
    **options: Any,
) -> None:
    """Attempt tasks with a command, such as a coding agent.

    COMMAND is any program that calls an OpenAI or Anthropic API. Every attempt gets a fresh copy of --folder (or of the
    task's own `folder`), and environment variables and configuration files that lead Claude Code, Codex CLI,
    opencode, aider and most other programs to the run's model. The task's text replaces {prompt} in COMMAND, or is a file at
    {prompt_file}, or comes by standard input. A command that crashes, is killed, runs out of time or never calls the model fails
    its episode, which is then attempted again and never trained.

    \b
    swarmq run --prompt "Make the tests pass" --folder repo --test "pytest -q" -- claude -p {prompt} --dangerously-skip-permissions
    swarmq run --tasks tasks.jsonl --score checks:score -- codex exec --dangerously-bypass-approvals-and-sandbox {prompt}
    swarmq run --queue --kind code --folder repos --test "pytest -q" --restore tests -- opencode run {prompt}
    swarmq run --tasks tasks.jsonl --test "pytest -q" --concurrency 8 -- aider --yes-always --message {prompt} main.py
    """
    from swarmq import AsyncSwarmClient
    from swarmq.black_box.agent import CommandAgent, check_command, hash_code
    from swarmq.client.runners.attempts import RunnerOptions
    from swarmq.client.runners.worker_processes import run_workers

    if sum((prompt is not None, data is not None, queue)) != 1:
        raise TaskError("give one of --prompt TEXT, --tasks DATA and --queue")
    if prompt is not None and not prompt.strip():
        raise TaskError("--prompt is empty: give the text of the task")
    if queue and (
        given := [name for name, used in {"--eval": for_eval, "--repeats": repeats, "--limit": limit}.items() if used]
    ):
        raise TaskError(f"{', '.join(given)}: cannot be combined with --queue; `swarmq feed` decides this")
    if options["port"] and concurrency > 1:
        raise TaskError(f"--port serves one episode at a time: give --concurrency 1 (got {concurrency})")
    score = _load_score(options["score"])
    chosen = _make_options(command, **options)
    check_command(chosen)
    tasks: Any = [{chosen.prompt_field: prompt}] if data is None else _read_tasks(data, limit, chosen)
    agent = CommandAgent(chosen, score)
    client = AsyncSwarmClient(invite, code_version=hash_code(chosen, score))
    limits: Any = {
        "concurrency": concurrency,
        "max_attempts": max_attempts,
        "attempt_timeout_s": chosen.attempt_timeout_s,
    }
    if queue:
        for name, summary in run_workers(client, {kind: agent}, RunnerOptions(**limits)).items():
            click.echo(f"{name}: {summary}")
        return

    async def attempt_all() -> None:
        async with client:
            if for_eval:
                evaluated = await client.evaluate(tasks, agent, repeats=repeats or 1, kind=kind, **limits)
                click.echo(evaluated)
                given_up, slots, failures = evaluated.failed, evaluated.n + evaluated.failed, evaluated.failures
            else:
                summary = await client.run_episodes_until_all_complete(
                    tasks, agent, repeats=repeats, kind=kind, **limits
                )
                click.echo(summary)
                given_up, slots, failures = summary.given_up, summary.slots, summary.failures
        click.echo(f"output of the attempts: {chosen.logs}")
        if given_up:
            reasons = "".join(f"\n{number} x {line}" for line, number in failures.items())
            raise TaskError(
                f"{given_up} of {count_of(slots, 'slot was', 'slots were')} given up (--max-attempts {max_attempts}); failed attempts:{reasons}"
            )

    run_until_signalled(attempt_all())


def _read_tasks(data: str, limit: int | None, options: Any) -> list[Any]:
    """Return the tasks of a data set. Raises TaskError for one without a prompt."""
    from swarmq.black_box.agent import read_task
    from swarmq.client.data.readers import read_tasks

    tasks = list(read_tasks(data, limit=limit))
    for task in tasks:
        try:
            read_task(task.payload, options)
        except TaskError as error:
            raise TaskError(f"{data}, task {task.id!r}: {error}") from error
    return tasks


def _load_score(name: str | None) -> Any:
    from swarmq.black_box.scoring import check_score_function
    from swarmq.client.data.targets import load_object

    if name is None:
        return None
    function = load_object(name)
    check_score_function(function, name)
    return function


def _make_options(
    command: tuple[str, ...],
    *,
    scored_exits: tuple[str, ...],
    environment: tuple[str, ...],
    first_call: float,
    timeout: float,
    test_timeout: float,
    keep: bool,
    score: str | None,
    **others: Any,
) -> Any:
    from swarmq.black_box.agent import CommandOptions

    return CommandOptions(
        argv=command,
        score=score or "",
        scored_exits=_parse_exits(scored_exits),
        environment=tuple(_parse_variable(text) for text in environment),
        first_call_s=first_call,
        timeout_s=timeout,
        test_timeout_s=test_timeout,
        keep_copies=keep,
        **others,
    )


def _parse_exits(texts: tuple[str, ...]) -> frozenset[int] | None:
    if ANY_EXIT in texts:
        return None
    if wrong := [text for text in texts if not text.isdecimal() or int(text) > 255]:
        raise TaskError(f"--scored-exit {wrong[0]}: give an exit code from 0 to 255, or {ANY_EXIT}")
    return frozenset(map(int, texts))


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise TaskError(f"--env {text}: write NAME=VALUE")
    return name, value
