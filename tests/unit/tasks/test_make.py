"""Tasks from documents: what a teacher writes is kept only if code can check it and the teacher finds it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.chat_server import serve_chat
from swarmq.cli import main
from swarmq.client.data.readers import read_tasks
from swarmq.tasks import score
from swarmq.tasks.documents import read_documents, split

LAMP = "The lighthouse of Skerry was built in 1844 by Anna Holm.\n\nIts lamp burns whale oil and is seen for 31 km."
MILL = "The mill at Orde grinds barley for nine villages. Its wheel has 24 blades."


def draft(question: str, answer: object, kind: str, quote: str, **more: object) -> dict:
    return {"question": question, "answer": answer, "type": kind, "quote": quote, **more}


GOOD = [
    draft(
        "Who built the lighthouse of Skerry?",
        "Anna Holm",
        "phrase",
        "The lighthouse of Skerry was built in 1844 by Anna Holm.",
    ),
    draft(
        "In which year was the lighthouse of Skerry built?",
        1844,
        "number",
        "The lighthouse of Skerry was built in 1844",
    ),
]
BAD = [
    draft(
        "Who built the lighthouse at Skerry, the tower?", "Ole Berg", "phrase", "It was built by Ole Berg."
    ),  # invented quote
    draft("Did Anna Holm build it?", "Anna Holm", "phrase", "built in 1844 by Anna Holm"),  # says its answer
    draft("In which year was the lighthouse of Skerry built?", "1844", "number", "was built in 1844"),  # again
    draft("How far is the lamp seen?", "a long way", "number", "is seen for 31 km"),  # no number
    draft("What does the lamp of Skerry burn?", "whale oil", "exact", "Its lamp burns whale oil"),  # not found again
    {"question": "What?"},
]


def teacher(question: str) -> str:
    if "Write 3 different questions" in question:
        return "```json\n" + json.dumps(GOOD + BAD if "lighthouse" in question else []) + "\n```"
    if "year" in question:
        return "It says 1844.\nAnswer: 1844"
    return "**Answer:** Anna Holm." if "Who built" in question else "Answer: coal"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "lamp.md").write_text(LAMP)
    (documents / "scan.pdf").write_bytes(b"%PDF-1.7")
    return documents


def make(folder: Path, url: str, *options: str) -> tuple[str, list[dict], int]:
    out = folder.parent / "tasks.jsonl"
    command = ["tasks", "make", str(folder), "--out", str(out), "--teacher", "t", "--base-url", url, *options]
    ran = CliRunner().invoke(main, command)
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return ran.output, lines, ran.exit_code


def test_only_tasks_that_code_can_check_and_the_teacher_solves_again_are_written(folder: Path) -> None:
    with serve_chat(teacher) as server:
        said, tasks, status = make(folder, server.url)
    assert status == 0, said
    assert [task["answer"] for task in tasks] == ["Anna Holm", "1844"]
    for reason in (
        "quote is not in the passage 1",
        "question contains the answer 1",
        "near duplicate 1",
        "check cannot be built 1",
        "teacher does not find the answer again 1",
        "skipped scan.pdf: not a text document",
    ):
        assert reason in said
    fed = list(read_tasks(str(folder.parent / "tasks.jsonl"), require=["question", "check"]))
    assert float(score(fed[0].payload, "I think so.\nAnswer: anna holm")) == 1.0
    assert float(score(fed[1].payload, "Answer: 1,844 or 1900")) == 0.0


def test_a_second_run_asks_nothing_again(folder: Path) -> None:
    with serve_chat(teacher) as server:
        _, first, _ = make(folder, server.url)
        asked = len(server.asked)
        _, second, _ = make(folder, server.url)
        assert len(server.asked) == asked
    assert second == first


def test_a_student_that_always_or_never_solves_a_task_takes_it_out(folder: Path) -> None:
    def student(question: str) -> str:
        return "Answer: 1844" if "year" in question else "Answer: nobody"

    with serve_chat(teacher) as server, serve_chat(student) as other:
        said, tasks, _ = make(folder, server.url, "--student", "s", "--student-url", other.url)
    assert tasks == []
    assert "student always solves it 1" in said
    assert "student never solves it 1" in said


def test_tasks_stay_away_from_a_benchmark(folder: Path) -> None:
    bench = folder.parent / "bench.jsonl"
    bench.write_text(json.dumps({"question": "Who built the lighthouse of Skerry??"}) + "\n")
    with serve_chat(teacher) as server:
        _, tasks, _ = make(folder, server.url, "--against", str(bench))
    assert [task["answer"] for task in tasks] == ["1844"]


def test_all_tasks_of_a_document_are_on_one_side_of_the_split(folder: Path) -> None:
    for number in range(20):
        (folder / f"{number}.txt").write_text(LAMP.replace("Skerry", f"Isle{number} of the {'far ' * number}sea"))

    def writer(question: str) -> str:
        if "Write 3" not in question:
            return teacher(question)
        passage = question.partition("<passage>\n")[2].partition("\n</passage>")[0]
        name = passage.partition("lighthouse of ")[2].partition(" was")[0]
        return json.dumps(
            [{**GOOD[1], "question": f"In which year did {name} get its tower?", "quote": passage.split(".")[0]}]
        )

    with serve_chat(writer) as server:
        said, kept, _ = make(folder, server.url, "--held-out", "0.4")
    apart = [json.loads(line) for line in (folder.parent / "tasks.held-out.jsonl").read_text().splitlines()]
    assert kept, said
    assert apart, said
    assert not {t["source"] for t in kept} & {t["source"] for t in apart}


def test_an_endpoint_that_is_down_is_one_clear_line_and_writes_nothing(folder: Path) -> None:
    with serve_chat(lambda _: 401) as server:
        said, tasks, status = make(folder, server.url)
    assert status == 1
    assert "answered 401: down" in said
    assert tasks == []


@pytest.mark.parametrize(
    ("name", "says"), [("none", "does not exist"), ("file.md", "a file; give a folder"), ("empty", "no document")]
)
def test_a_folder_without_documents_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.md").write_text("x")
    said, _, status = make(tmp_path / name, "http://127.0.0.1:9/v1")
    assert status == 1
    assert says in said


def test_passages_hold_all_paragraphs_within_their_length() -> None:
    text = "\n\n".join(f"paragraph {number} " + "word " * 30 for number in range(40)) + "\n\n" + "long " * 500
    pieces = list(split(text, 500))
    assert all(len(piece) <= 700 for _, piece in pieces)
    assert all(text[start : start + len(piece)] == piece for start, piece in pieces)
    assert [word for _, piece in pieces for word in piece.split()] == text.split()


def test_html_is_read_without_scripts_and_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        "<head><title>t</title></head><p>One &amp; two</p><script>evil()</script><p>three</p>"
    )
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    documents = read_documents(tmp_path)
    assert [passage.text.split() for passage in documents.passages] == [["One", "&", "two", "three"]]
    assert "latin.txt" in documents.skipped
