"""From documents to tasks: a teacher writes them, code and the teacher's own solutions decide which are kept.

    passage ──teacher──> drafts ──> well formed, grounded in the passage, answer not in the question
        ──> no near duplicate of another task or of a text to stay away from
        ──> the teacher, given the passage, finds the answer again in more than half of its attempts
        ──> optional: the student, without the passage, finds it sometimes but not always

Every question to a model is kept in a cache beside the output, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from swarmq.errors import EndpointError
from swarmq.rewards import ChatEndpoint, extract_json, normalise
from swarmq.tasks.checks import Check, extract_answer
from swarmq.tasks.documents import Passage
from swarmq.tasks.duplicates import Seen

WRITE = """\
You write exercises for training a language model. Below is a passage of a document.

<passage>
{passage}
</passage>

Write {number} different questions whose answers the passage settles. {instructions}
Each question must be understandable for somebody who has not seen the passage (name things, never say "the passage" or "the text"),
must have one short correct answer, and must not contain its answer. Quote the sentence that settles it, word for word.

Answer with a JSON list and nothing else. Each entry:
{{"question": "...", "answer": "...", "type": "exact" | "phrase" | "number" | "choice", "alternatives": ["other correct spellings"],
 "quote": "..."}}
`exact`: one word or code. `phrase`: a name or a short phrase. `number`: a number with its unit in the question. `choice`: the
question lists choices A) to D), and the answer is one letter."""

SOLVE = """{question}

Think first if you need to. Then write the answer alone on a last line of the form `Answer: ...`."""

OPEN_BOOK = """Use this passage:

<passage>
{passage}
</passage>

"""
TOLERANCE = 0.01
"""Relative tolerance within which a number in an answer counts as the expected one."""
MAX_ANSWER_CHARS = 200


class TaskDraft(msgspec.Struct, frozen=True):
    """A task as the teacher wrote it, before any check."""

    question: str
    answer: str | int | float
    type: str
    quote: str
    alternatives: list[str] = []


class MadeTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that passed all checks; one line of the output file."""

    id: str
    question: str
    """Question for the model, with the required form of the answer."""
    answer: str
    check: Check
    source: str
    """File and position of the passage."""
    quote: str
    teacher_solved: float
    """Share of the teacher's attempts with the passage that were right."""
    student_solved: float | None = None


class MakePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Options for making tasks."""

    per_passage: int = 3
    instructions: str = ""
    teacher_attempts: int = 2
    """Number of the teacher's attempts at solving each task with the passage; 0: the teacher solves none."""
    student_attempts: int = 4
    concurrency: int = 8


class MakeReport(msgspec.Struct, kw_only=True):
    """Counts of passages and drafts, with the reasons for which drafts were dropped and passages failed."""

    passages: int = 0
    drafts: int = 0
    kept: int = 0
    dropped: dict[str, int] = {}
    """Reason -> number of drafts dropped for it."""
    errors: list[str] = []
    """One line for each passage for which the teacher gave nothing usable: the passage and what was wrong."""

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def make_tasks(
    passages: Sequence[Passage],
    teacher: ChatEndpoint,
    plan: MakePlan,
    report: MakeReport,
    *,
    student: ChatEndpoint | None = None,
    against: Iterable[str] = (),
    progress: Callable[[int, int], None] = lambda _done, _kept: None,
) -> Iterator[MadeTask]:
    """Yield the tasks that pass, in the order of their passages. `against`: texts of which no task may be a near duplicate.

    A passage for which the teacher gives nothing usable is counted in `report`. Raises EndpointError if that happens for each of
    the first eight passages, because then the endpoint is at fault.
    """
    seen = Seen()
    for number, text in enumerate(against):
        seen.add(f"text {number} to stay away from", text)

    def work(passage: Passage) -> tuple[list[TaskDraft] | EndpointError, Passage]:
        try:
            return write(passage, teacher, plan), passage
        except EndpointError as error:
            return error, passage

    def solve(one: tuple[TaskDraft, Check, Passage]) -> MadeTask | str:
        return _try(*one, teacher=teacher, student=student, plan=plan)

    with ThreadPoolExecutor(plan.concurrency) as pool:
        for written, passage in _in_windows(pool, work, passages, 2 * plan.concurrency):
            report.passages += 1
            if isinstance(written, EndpointError):
                report.errors.append(f"{passage.name}: {written}")
                if len(report.errors) == report.passages == min(8, len(passages)):
                    raise written
                continue
            candidates = []
            for draft in written:
                report.drafts += 1
                checked = examine(draft, passage)
                if isinstance(checked, str):
                    report.drop(checked)
                elif seen.add(passage.name, draft.question):
                    report.drop("near duplicate")
                else:
                    candidates.append((draft, checked, passage))
            for result in pool.map(solve, candidates):
                if isinstance(result, str):
                    report.drop(result)
                else:
                    report.kept += 1
                    yield result
            progress(report.passages, report.kept)


def write(passage: Passage, teacher: ChatEndpoint, plan: MakePlan) -> list[TaskDraft]:
    """Return the teacher's drafts for a passage. Raises EndpointError if it gives no list."""
    prompt = WRITE.format(passage=passage.text, number=plan.per_passage, instructions=plan.instructions)
    return teacher.ask(prompt, _parse_drafts)


def examine(draft: TaskDraft, passage: Passage) -> Check | str:
    """Return the draft's check, or why the draft is dropped, as far as code can judge it without solving it."""
    answer = str(draft.answer).strip()
    if not draft.question.strip() or not answer:
        return "empty question or answer"
    if len(answer) > MAX_ANSWER_CHARS:
        return "long answer"
    if _normalise(draft.quote) not in _normalise(passage.text) or not draft.quote.strip():
        return "quote is not in the passage"
    if draft.type != "choice" and f" {_normalise(answer)} " in f" {_normalise(draft.question)} ":
        return "question contains the answer"
    try:
        tolerance = TOLERANCE if draft.type == "number" else 0.0
        tree = {"type": draft.type, "expected": [answer, *draft.alternatives], "tolerance": tolerance}
        return msgspec.convert(tree, Check)
    except (msgspec.ValidationError, ValueError):
        return "check cannot be built"


def _try(
    draft: TaskDraft,
    check: Check,
    passage: Passage,
    *,
    teacher: ChatEndpoint,
    student: ChatEndpoint | None,
    plan: MakePlan,
) -> MadeTask | str:
    question = SOLVE.format(question=draft.question.strip())
    open_book = OPEN_BOOK.format(passage=passage.text) + question
    try:
        solved = _share_solved(teacher, open_book, check, plan.teacher_attempts) if plan.teacher_attempts else 1.0
        if solved <= 0.5:
            return "teacher does not find the answer again"
        known = _share_solved(student, question, check, plan.student_attempts) if student else None
    except EndpointError:
        return "a model did not answer"
    if known in (0.0, 1.0):
        return "student always solves it" if known else "student never solves it"
    digest = hashlib.sha256(normalise(draft.question).encode()).hexdigest()[:16]
    return MadeTask(
        id=digest,
        question=question,
        answer=str(draft.answer),
        check=check,
        source=passage.name,
        quote=draft.quote,
        teacher_solved=solved,
        student_solved=known,
    )


def _share_solved(model: ChatEndpoint, question: str, check: Check, attempts: int) -> float:
    right = Counter(
        check.score(model.ask(question, extract_answer, sample=number)).value == 1.0 for number in range(attempts)
    )
    return right[True] / attempts


def _parse_drafts(text: str) -> list[TaskDraft]:
    try:
        value: Any = extract_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON list of tasks ({error})") from error
    if not isinstance(value, list):
        raise ValueError("no JSON list of tasks")  # noqa: TRY004 - asked again, as after any other wrong answer
    drafts = []
    for entry in value:
        try:
            drafts.append(msgspec.json.decode(json.dumps(entry), type=TaskDraft))
        except msgspec.ValidationError:
            continue  # leaves out a malformed entry
    if not drafts:
        raise ValueError("no entry with question, answer, type and quote")
    return drafts


def _normalise(text: str) -> str:
    return " ".join(normalise(text).split())


def _in_windows(
    pool: ThreadPoolExecutor, work: Callable[[Passage], Any], passages: Sequence[Passage], window: int
) -> Iterator[Any]:
    """Yield the result of `work` for each passage, in order. At most `window` passages are worked on ahead of the caller, so that
    a stop wastes few questions."""
    for first in range(0, len(passages), window):
        yield from pool.map(work, passages[first : first + window])
