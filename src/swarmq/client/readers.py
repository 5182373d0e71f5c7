"""Data sets as tasks, from wherever people keep them; every error names the file, the line and the field.

questions.jsonl   questions.csv   questions.parquet   reasoning-gym:NAME?size=500&seed=1   hf:owner/name:train
module:function   (a function that returns an iterable)
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from swarmq.client.targets import load
from swarmq.client.tasks import SwarmTask, as_task
from swarmq.errors import MissingExtraError, TaskError

Row = tuple[str, Any]
"""Where it stands, for messages, and what it holds."""

ID_FIELDS = ("id", "task_id")


def read_tasks(source: str, *, require: Sequence[str] = (), limit: int | None = None) -> Iterator[SwarmTask]:
    """The tasks of a data set, in its own order, read as they are needed.

    A row is named by its `id` or `task_id`; where no row has one, by its number. `require` lists fields that every
    row must have. Raises TaskError for a row that breaks this and for an id that comes twice, naming the line.
    """
    seen: dict[str, str] = {}
    has_ids: bool | None = None
    for number, (where, row) in enumerate(islice(_rows(source), limit)):
        _check_fields(where, row, require)
        named = isinstance(row, SwarmTask) or _has_id(row)
        has_ids = named if has_ids is None else has_ids
        if has_ids and not named:
            raise TaskError(f"{where}: no `id` (or `task_id`), though the rows before have one")
        task = as_task(row) if named else SwarmTask(str(number), payload=row)
        if task.id in seen:
            raise TaskError(f"{where}: the id {task.id!r} is that of {seen[task.id]} too")
        seen[task.id] = where
        yield task


def _rows(source: str) -> Iterator[Row]:
    scheme, colon, rest = source.partition(":")
    if scheme in _SCHEMES and colon:
        return _SCHEMES[scheme](rest)
    suffix = Path(source).suffix.lower()
    if suffix in _SUFFIXES:
        return _file(Path(source).expanduser(), _SUFFIXES[suffix])
    if colon:
        return _python(source)
    raise TaskError(
        f"{source!r} is no data set: give a {', '.join(_SUFFIXES)} file, reasoning-gym:NAME?size=N&seed=S, hf:NAME:SPLIT or "
        "module:function"
    )


def _file(path: Path, read: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from read(path)
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 text: {error}") from error


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise TaskError(f"{path} line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise TaskError(f"{path} line {number}: a {type(row).__name__}, not an object with fields")
            yield f"{path} line {number}", row


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file, strict=True)
        try:
            for row in table:
                where = f"{path} line {table.line_num}"
                if None in row:
                    raise TaskError(
                        f"{where}: more values than the {len(table.fieldnames or ())} columns of the header"
                    )
                if missing := [name for name, value in row.items() if value is None]:
                    raise TaskError(f"{where}: no value for {', '.join(missing)}")
                yield where, row
        except csv.Error as error:
            raise TaskError(f"{path} line {table.line_num}: not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    _need("pyarrow", path)
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except arrow.ArrowException as error:
        raise TaskError(f"{path}: not Parquet: {error}") from error


def _hugging_face(name: str) -> Iterator[Row]:
    _need("datasets", name)
    datasets: Any = importlib.import_module("datasets")
    path, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(path, split=split or "train")
    except Exception as error:  # the library raises whatever its readers raise
        raise TaskError(f"hf:{name}: cannot be loaded: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"hf:{name} row {number}", dict(row)


def _gym(text: str) -> Iterator[Row]:
    """`reasoning-gym` by name; what stands behind `?` is its configuration. The seed is 0 unless given."""
    _need("reasoning_gym", text)
    import reasoning_gym  # noqa: PLC0415

    name, _, query = text.partition("?")
    settings: dict[str, Any] = {"seed": 0}
    try:
        settings |= {key: _literal(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
        entries = reasoning_gym.create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(f"reasoning-gym:{text}: {error}") from error
    for number, entry in enumerate(entries):
        yield (
            f"reasoning-gym:{text} number {number}",
            {"id": f"{name}-{settings['seed']}-{number}", "dataset": name, **entry},
        )


def _python(target: str) -> Iterator[Row]:
    found: Any = load(target)
    values: Iterable[Any] = found() if inspect.isroutine(found) else found
    if not isinstance(values, Iterable):
        raise TaskError(f"{target}: returned a {type(values).__name__}, which cannot be iterated")
    for number, value in enumerate(values, 1):
        yield f"{target} item {number}", value


def _check_fields(where: str, row: Any, require: Sequence[str]) -> None:
    data = row.payload if isinstance(row, SwarmTask) else row
    missing = [
        name for name in require if (data.get(name) if isinstance(data, dict) else getattr(data, name, None)) is None
    ]
    if missing:
        raise TaskError(f"{where}: no {', '.join(repr(name) for name in missing)}")


def _has_id(row: Any) -> bool:
    return any((row.get(name) if isinstance(row, dict) else getattr(row, name, None)) is not None for name in ID_FIELDS)


def _literal(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _need(package: str, what: Any) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"reading {what} needs {package}: pip install {package.replace('_', '-')}")


_SUFFIXES: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _csv,
    ".parquet": _parquet,
}
_SCHEMES: dict[str, Callable[[str], Iterator[Row]]] = {"reasoning-gym": _gym, "hf": _hugging_face}
