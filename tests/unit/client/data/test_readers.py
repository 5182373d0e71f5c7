"""Every data set that cannot be used names its line."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from swarmq.client.data.readers import read_tasks
from swarmq.errors import MissingExtraError, TaskError


@pytest.fixture
def file(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def read(*arguments, **options):
    return list(read_tasks(*arguments, **options))


def test_json_lines_are_tasks_and_empty_lines_are_not(file):
    tasks = read(file("a.jsonl", '{"id": "x", "q": 1}\n\n{"id": "y", "q": 2}\n'))
    assert [(task.id, task.payload["q"]) for task in tasks] == [("x", 1), ("y", 2)]


def test_a_byte_order_mark_as_windows_writes_is_skipped(file):
    assert [task.id for task in read(file("a.jsonl", '\ufeff{"id": "x"}\n{"id": "y"}\n'))] == ["x", "y"]
    assert [task.id for task in read(file("a.csv", "\ufeffid,q\nx,1\n"))] == ["x"]


def test_csv_rows_are_tasks(file):
    tasks = read(file("a.csv", 'id,question,answer\n1,"6 * 7, or so",42\n2,"two\nlines",0\n'))
    assert [(task.id, task.payload["question"]) for task in tasks] == [("1", "6 * 7, or so"), ("2", "two\nlines")]


def test_rows_without_ids_are_named_by_source_and_number(file):
    rows = '{"q": 1}\n{"q": 1}\n'
    assert [task.id for task in read(file("a.jsonl", rows))] == ["a-0", "a-1"]
    assert {task.id for task in read(file("b.jsonl", rows))} == {"b-0", "b-1"}, "two files in one run do not collide"


def test_a_limit_reads_no_further(file):
    assert len(read(file("a.jsonl", '{"q": 1}\n{"q": 2}\nrubbish'), limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"id": 1}\n{"id": 2\n', "line 2: not JSON"),
        ("a.jsonl", '{"id": 1}\n[1]\n', "line 2: a list, not an object"),
        ("a.jsonl", '{"id": 1}\n{"id": 2}\n{"id": 1}\n', r"line 3: the id '1' is already that of .*line 1"),
        ("a.jsonl", '{"id": 1}\n{"q": 2}\n', "line 2: no `id`"),
        ("a.jsonl", '{"q": 1}\n{"id": 2}\n', "line 2: an `id`"),
        ("a.jsonl", b'{"id": "\xff"}\n', "not UTF-8"),
        ("a.jsonl", '{"id": ""}\n', "1 to 200 characters"),
        ("a.csv", "id,q\n1,2,3\n", "line 2: more values than the 2 columns"),
        ("a.csv", "id,q\n1,2\n3\n", "line 3: no value for q"),
        ("a.csv", 'id,q\n1,"2\n', "not CSV"),
        ("a.jsonl", "\n", "a.jsonl: contains no task"),
        ("a.csv", "id,q\n", "a.csv: contains no task"),
    ],
)
def test_what_is_wrong_names_its_line(file, name, text, says):
    with pytest.raises(TaskError, match=says):
        read(file(name, text))


def test_a_required_field_that_is_missing_names_line_and_field(file):
    source = file("a.jsonl", '{"id": 1, "answer": 2}\n{"id": 2}\n')
    with pytest.raises(TaskError, match="line 2: no 'answer'"):
        read(source, require=["answer"])


def test_a_source_that_is_none_says_what_would_be_one(tmp_path):
    for source in ("questions.txt", "", "hf:", "reasoning-gym:", "verifiers:"):
        with pytest.raises(TaskError, match=f"'{source}' is not a data set: give a .jsonl"):
            read(source)
    with pytest.raises(TaskError, match="cannot be read"):
        read(str(tmp_path / "none.jsonl"))


def test_a_python_iterable_is_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_data_set.py").write_text(
        "def rows():\n    yield {'id': 'a'}\n    yield {'id': 'b'}\nlisted = [{'id': 'c'}]\ndef wrong():\n    return 3\n"
        "def scaled(factor):\n    return []\n"
    )
    assert [task.id for task in read("my_data_set:rows")] == ["a", "b"]
    assert [task.id for task in read("my_data_set:listed")] == ["c"]
    with pytest.raises(TaskError, match="cannot be iterated"):
        read("my_data_set:wrong")
    with pytest.raises(TaskError, match="my_data_set:scaled: must be callable without arguments .*'factor'"):
        read("my_data_set:scaled")
    with pytest.raises(TaskError, match="did you mean 'rows'"):
        read("my_data_set:row")


def test_reasoning_gym_is_read_by_name_and_always_the_same():
    pytest.importorskip("reasoning_gym")
    first = read("reasoning-gym:chain_sum?size=3&seed=1&min_terms=2")
    assert first == read("reasoning-gym:chain_sum?size=3&seed=1&min_terms=2")
    assert [task.id for task in first] == ["chain_sum-1-0", "chain_sum-1-1", "chain_sum-1-2"]
    assert first[0].payload["question"]
    with pytest.raises(TaskError, match="reasoning-gym:no_such"):
        read("reasoning-gym:no_such?size=3")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("chain_sum?sise=3", r"chain_sum has no parameter 'sise'; there are min_terms, max_terms, .*size"),
        ("chain_sum?size=abc", "size is 'abc': Expected `int`, got `str`"),
        ("chain_sum?min_terms=5&max_terms=2", "max_terms must be >= min_terms"),
        ("chain_sun?size=3", "there is no data set 'chain_sun'; did you mean chain_sum"),
    ],
)
def test_a_wrong_setting_of_reasoning_gym_is_named_with_those_there_are(source, says):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(TaskError, match=rf"^reasoning-gym:{re.escape(source)}: {says}"):
        read(f"reasoning-gym:{source}")


ROWS = [{"id": "x", "question": "6 * 7", "answer": 42}, {"id": "y", "question": "2 + 2", "answer": 4}]


@pytest.mark.slow  # loads the library
def test_parquet_rows_are_tasks(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert [task.payload for task in read(str(path))] == ROWS
    with pytest.raises(TaskError, match=r"a\.parquet row 1: no 'solution'"):
        read(str(path), require=["solution"])
    path.write_bytes(b"PAR1")
    with pytest.raises(TaskError, match="not Parquet"):
        read(str(path))


@pytest.mark.slow  # loads the library
def test_a_hugging_face_data_set_is_read_from_a_folder(tmp_path, monkeypatch):
    """In a process of its own: the library leaves files and threads behind."""
    script = (
        "import datasets, sys; from swarmq.client.data.readers import read_tasks\n"
        f"rows = {ROWS!r}\n"
        "datasets.Dataset.from_list(rows).save_to_disk('alone')\n"
        "datasets.DatasetDict({'train': datasets.Dataset.from_list(rows[:1])}).save_to_disk('splits')\n"
        "assert [task.payload for task in read_tasks('alone')] == rows\n"
        "assert [task.id for task in read_tasks('hf:splits')] == ['x']\n"
        "try: list(read_tasks('hf:splits:test'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "TaskError splits:test: the data set cannot be loaded" in done.stdout


def test_environments_are_read_elsewhere():
    for source in ("verifiers:sums", "gymnasium:X?size=3", "openenv:http://host"):
        with pytest.raises(TaskError, match="is an environment: read swarmq.environments.load_environment"):
            read(source)
    rows = ({"id": name} for name in "ab")
    assert [task.id for task in read("verifiers:sums", rows=rows)] == ["a", "b"]
    with pytest.raises(
        TaskError, match="verifiers:sums number 1: the id 'a' is already that of verifiers:sums number 0"
    ):
        read("verifiers:sums", rows=[{"id": "a"}, {"id": "a"}])


def test_a_reader_whose_package_is_missing_says_which(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'swarmq\[data\]'"):
        read("a.parquet")
    with pytest.raises(MissingExtraError, match="pip install reasoning-gym"):
        read("reasoning-gym:chain_sum")
