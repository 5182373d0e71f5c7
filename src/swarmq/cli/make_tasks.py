"""`swarmq tasks make` and `swarmq tasks from-traces` write task files for `swarmq feed`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec

from swarmq.cli.common import main
from swarmq.errors import ConfigError
from swarmq.runtime.wording import count_of

FILE = click.Path(path_type=Path)


@main.group("tasks")
def tasks_group() -> None:
    """Make tasks from documents or from traces of an agent.

    \b
    swarmq tasks make handbook/ --teacher Qwen/Qwen3-32B
    swarmq tasks from-traces calls.jsonl
    """


@tasks_group.command("make")
@click.argument("folder", type=FILE)
@click.option("--out", type=FILE, default="tasks.jsonl", show_default=True, help="File to write.")
@click.option("--teacher", required=True, metavar="MODEL", help="Model that writes and solves the tasks.")
@click.option(
    "--base-url", help="Teacher's OpenAI-compatible endpoint; $OPENAI_BASE_URL by default. Key: $OPENAI_API_KEY."
)
@click.option("--student", metavar="MODEL", help="Keep only tasks that this model solves sometimes, but not always.")
@click.option("--student-url", help="Student's endpoint; the teacher's by default.")
@click.option(
    "--per-passage", default=3, show_default=True, type=click.IntRange(1, 20), help="Tasks asked for per passage."
)
@click.option(
    "--passage-chars", default=4000, show_default=True, type=click.IntRange(min=200), help="Length of a passage."
)
@click.option("--limit", type=click.IntRange(min=1), help="Read only the first N passages.")
@click.option("--instructions", default="", help="What the teacher should ask about, in a sentence.")
@click.option(
    "--against", multiple=True, type=FILE, help="JSONL of tasks to stay away from, e.g. a benchmark; may be repeated."
)
@click.option(
    "--held-out", default=0.0, type=click.FloatRange(0, 0.5), help="Share of documents for OUT.held-out.jsonl."
)
@click.option("--max-calls", type=click.IntRange(min=1), help="Stop after this many questions to the teacher.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1, 256), help="Concurrent questions.")
def make(
    folder: Path,
    out: Path,
    teacher: str,
    base_url: str | None,
    student: str | None,
    student_url: str | None,
    per_passage: int,
    passage_chars: int,
    limit: int | None,
    instructions: str,
    against: tuple[Path, ...],
    held_out: float,
    max_calls: int | None,
    concurrency: int,
) -> None:
    """Let a teacher model write tasks from documents, with checks.

    FOLDER holds the documents. A task is kept if its quote is in the document, no other task says the same, and the teacher finds the answer again. Answers
    of models are kept in OUT.cache, so a command that was stopped goes on where it was.

    \b
    swarmq tasks make handbook/ --teacher Qwen/Qwen3-32B --base-url http://127.0.0.1:8000/v1 --held-out 0.1
    swarmq feed runs/handbook tasks.jsonl
    swarmq worker swarmq.tasks.agent:attempt
    """
    from rich.progress import Progress

    from swarmq.rewards import Budget, ChatEndpoint
    from swarmq.tasks.documents import read_documents
    from swarmq.tasks.make import MakePlan, MakeReport, make_tasks

    documents = read_documents(folder, passage_chars=passage_chars)
    for name, why in documents.skipped.items():
        click.echo(f"skipped {name}: {why}", err=True)
    passages = documents.passages[:limit]
    cache = out.with_name(f"{out.name}.cache")
    report = MakeReport()
    plan = MakePlan(per_passage=per_passage, instructions=instructions, concurrency=concurrency)
    made = make_tasks(
        passages,
        ChatEndpoint(teacher, base_url=base_url, cache=cache, budget=Budget(calls=max_calls)),
        plan,
        report,
        student=ChatEndpoint(student, base_url=student_url or base_url, cache=cache) if student else None,
        against=[text for path in against for text in _read_questions(path)],
        progress=lambda done, kept: bar.update(row, completed=done, description=count_of(kept, "task")),
    )
    with Progress(disable=not sys.stdout.isatty()) as bar:
        row = bar.add_task("0 tasks", total=len(passages))
        all_tasks = list(made)
    apart = [task for task in all_tasks if _is_held_out(task.source, held_out)]
    _write_lines(out, (task for task in all_tasks if not _is_held_out(task.source, held_out)))
    if held_out:
        _write_lines(out.with_name(f"{out.stem}.held-out.jsonl"), apart)
    for error in report.errors[:3]:
        click.echo(f"no tasks from {error}", err=True)
    dropped = ", ".join(f"{reason} {number}" for reason, number in sorted(report.dropped.items()))
    click.echo(
        f"{count_of(report.kept, 'task')} ({len(apart)} held out) from {count_of(report.passages, 'passage')} of "
        f"{count_of(documents.files, 'document')}, {count_of(report.drafts, 'draft')}; dropped: {dropped or 'none'}; passages without an answer: {len(report.errors)}"
    )


@tasks_group.command("from-traces")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--out", type=FILE, default="tasks.jsonl", show_default=True, help="File to write.")
def from_traces(files: tuple[Path, ...], out: Path) -> None:
    """Write what users asked an agent as tasks.

    Its answers are references for a judge. FILES are logged OpenAI calls or OpenTelemetry traces (OTLP JSON), as JSON or JSON lines. Each conversation becomes one task.

    \b
    swarmq tasks from-traces calls.jsonl spans.json --out tasks.jsonl
    """
    from swarmq.tasks.traces import TraceReport, read_traces

    report = TraceReport()
    _write_lines(out, list(read_traces(list(files), report)))
    dropped = ", ".join(f"{reason} {number}" for reason, number in sorted(report.dropped.items()))
    click.echo(f"{count_of(report.kept, 'task')} from {count_of(report.calls, 'call')}; dropped: {dropped or 'none'}")


def _is_held_out(source: str, share: float) -> bool:
    """Return whether a document is held out, with all of its tasks; the answer is the same each time."""
    document = source.rpartition("@")[0]
    return int(hashlib.sha256(document.encode()).hexdigest()[:8], 16) < share * 2**32


def _read_questions(path: Path) -> Iterator[str]:
    """Yield the `question` of each row of a task file. Raises ConfigError for a file without questions."""
    from swarmq.client.data.readers import read_tasks

    for task in read_tasks(str(path)):
        question = task.payload.get("question") if isinstance(task.payload, dict) else None
        if not isinstance(question, str):
            raise ConfigError(f"--against {path}: task {task.id!r} has no `question`")
        yield question


def _write_lines(path: Path, rows: Iterable[msgspec.Struct]) -> None:
    """Write the rows to a file, one JSON object per line, in place of what it had."""
    from swarmq.runtime.files import write_atomically

    write_atomically(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
