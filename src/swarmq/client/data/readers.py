"""Readers that turn data sets into tasks. Every error names the file, the line and the field.

questions.jsonl   questions.csv   questions.parquet   a folder or `hf:owner/name:train` of Hugging Face `datasets`
reasoning-gym:NAME?size=500&seed=1   module:function (a function that returns an iterable)

Environments (`verifiers:NAME` and others) give their own tasks: `swarmq.environments`.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from swarmq.client.data.targets import load_object
from swarmq.client.data.tasks import MAX_ID, SwarmTask, as_task
from swarmq.errors import MissingExtraError, TaskError

Row = tuple[str, Any]
"""(place of a row, for error messages; the row's value)"""

ID_FIELDS = ("id", "task_id")


def read_tasks(
    source: str, *, require: Sequence[str] = (), limit: int | None = None, rows: Iterable[Any] | None = None
) -> Iterator[SwarmTask]:
    """Yield the tasks of a data set in its own order, each read when it is needed. With `rows`, `source` is only the name of
    the data set.

    A row is identified by its `id` or `task_id`; if no row has one, by the source's name and the row's number. `require`:
    fields that every row must have. Raises TaskError for a row without an id or a required field, for an id that occurs twice
    (with the line), and for a data set without rows.
    """
    seen: dict[str, str] = {}
    has_ids: bool | None = None
    name = _make_id_prefix(source)
    found = _read_rows(source) if rows is None else ((f"{source} number {n}", row) for n, row in enumerate(rows))
    for number, (where, row) in enumerate(islice(found, limit)):
        _check_fields(where, row, require)
        named = isinstance(row, SwarmTask) or _has_id(row)
        has_ids = named if has_ids is None else has_ids
        if named != has_ids:
            odd, before = ("no `id` (or `task_id`)", "one") if has_ids else ("an `id`", "none")
            raise TaskError(f"{where}: {odd}, though the rows before have {before}: give every row an id, or none")
        task = as_task(row) if named else SwarmTask(f"{name}-{number}", payload=row)
        if task.id in seen:
            raise TaskError(f"{where}: the id {task.id!r} is already that of {seen[task.id]}")
        seen[task.id] = where
        yield task
    if not seen:
        raise TaskError(f"{source}: contains no task")


def _read_rows(source: str) -> Iterator[Row]:
    scheme, colon, rest = source.partition(":")
    if scheme in _SCHEMES and rest:
        return _SCHEMES[scheme](rest)
    suffix = Path(source).suffix.lower()
    if source and Path(source).expanduser().is_dir():
        return _read_hugging_face(source)
    if suffix in _SUFFIXES:
        return _read_file(Path(source).expanduser(), _SUFFIXES[suffix])
    if scheme in _ENVIRONMENTS and rest:
        raise TaskError(
            f"{source} is an environment: read swarmq.environments.load_environment({source!r}).tasks('train')"
        )
    if colon and scheme not in {*_SCHEMES, *_ENVIRONMENTS}:
        return _call_function(source)
    raise TaskError(
        f"{source!r} is not a data set: give a {', '.join(_SUFFIXES)} file, a folder of Hugging Face `datasets`, hf:NAME:SPLIT, "
        "reasoning-gym:NAME?size=N&seed=S or module:function"
    )


def _read_file(path: Path, read: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from read(path)
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 text: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
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


def _read_csv(path: Path) -> Iterator[Row]:
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


def _read_parquet(path: Path) -> Iterator[Row]:
    _require_package("pyarrow", path)
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


def _read_hugging_face(text: str) -> Iterator[Row]:
    """Yield the rows of a folder or a name on the hub. `:SPLIT` is `train` by default; the part after `?` is passed to
    `load_dataset`."""
    _require_package("datasets", text)
    import datasets  # noqa: PLC0415

    rest, settings = parse_settings(text)
    path, _, split = rest.partition(":")
    split = split or "train"
    folder = Path(path).expanduser()
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            found = datasets.load_from_disk(str(folder))
            rows = found[split] if isinstance(found, dict) else found
        else:
            rows = datasets.load_dataset(str(folder) if folder.is_dir() else path, split=split, **settings)
    except Exception as error:  # the library raises whatever its readers raise
        raise TaskError(f"{text}: the data set cannot be loaded: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows, 1):
        yield f"{text} row {number}", dict(row)


def _read_reasoning_gym(text: str) -> Iterator[Row]:
    """Yield the rows of a `reasoning-gym` data set. The part after `?` configures it; the seed is 0 by default."""
    name, given = parse_settings(text)
    settings = {"seed": 0, **given}
    for number, entry in enumerate(create_gym_dataset(name, settings, text)):
        yield (
            f"reasoning-gym:{text} number {number}",
            {"id": f"{name}-{settings['seed']}-{number}", "dataset": name, **entry},
        )


def create_gym_dataset(name: str, settings: dict[str, Any], text: str) -> Any:
    """Create a data set of `reasoning-gym`. Raises TaskError that names the invalid setting and, by `text`, the source as the
    user wrote it."""
    _require_package("reasoning_gym", text)
    import reasoning_gym  # noqa: PLC0415

    try:
        return reasoning_gym.create_dataset(name, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(f"reasoning-gym:{text}: {_explain_gym_error(name, settings) or error}") from error


def _explain_gym_error(name: str, settings: dict[str, Any]) -> str:
    """Return what is wrong with the name or a setting, judged by the fields of the data set's configuration; "" if
    the fields do not show it."""
    factory: Any = importlib.import_module("reasoning_gym.factory")
    if name not in factory.DATASETS:
        close = get_close_matches(name, factory.DATASETS, 3)
        return f"there is no data set {name!r}" + (f"; did you mean {' or '.join(close)}?" if close else "")
    types = get_type_hints(factory.DATASETS[name][1])
    if unknown := [key for key in settings if key not in types]:
        return f"{name} has no parameter {unknown[0]!r}; there are {', '.join(types)}"
    for key, value in settings.items():
        try:
            msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            return f"{key} is {value!r}: {error}"
        except TypeError:  # msgspec cannot check this type
            continue
    return ""


def _call_function(target: str) -> Iterator[Row]:
    values: Any = load_object(target)
    if inspect.isroutine(values):
        _check_no_arguments(target, values)
        values = values()
    if not isinstance(values, Iterable):
        raise TaskError(f"{target}: returned a {type(values).__name__}, which cannot be iterated")
    for number, value in enumerate(values, 1):
        yield f"{target} item {number}", value


def _check_no_arguments(target: str, function: Callable[..., Any]) -> None:
    """Raise TaskError for a function that cannot be called without arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function without a signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TaskError(f"{target}: must be callable without arguments ({error}) and return an iterable") from error


def _check_fields(where: str, row: Any, require: Sequence[str]) -> None:
    data = row.payload if isinstance(row, SwarmTask) else row
    missing = [
        name for name in require if (data.get(name) if isinstance(data, dict) else getattr(data, name, None)) is None
    ]
    if missing:
        raise TaskError(f"{where}: no {', '.join(repr(name) for name in missing)}")


def _has_id(row: Any) -> bool:
    return any((row.get(name) if isinstance(row, dict) else getattr(row, name, None)) is not None for name in ID_FIELDS)


def _make_id_prefix(source: str) -> str:
    """Return the prefix for ids of rows without an id: a file's name, or the source as written."""
    return (Path(source).stem if Path(source).suffix.lower() in _SUFFIXES else source)[: MAX_ID - 20]


def parse_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Parse `name?key=value&...` into name and settings. Raises TaskError if the part after `?` is malformed."""
    name, _, query = text.partition("?")
    try:
        pairs = parse_qsl(query, strict_parsing=bool(query), keep_blank_values=True)
    except ValueError as error:
        raise TaskError(f"{text}: behind `?` write key=value&key=value: {error}") from error
    return name, {key: _parse_value(value) for key, value in pairs}


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _require_package(package: str, what: Any) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"reading {what} needs {package}: pip install {_PACKAGES.get(package, package)}")


_PACKAGES = {"pyarrow": "'swarmq[data]'", "datasets": "'swarmq[data]'", "reasoning_gym": "reasoning-gym"}
_SUFFIXES: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
_ENVIRONMENTS = {"gymnasium", "openenv", "verifiers"}
_SCHEMES: dict[str, Callable[[str], Iterator[Row]]] = {
    "reasoning-gym": _read_reasoning_gym,
    "hf": _read_hugging_face,
}
