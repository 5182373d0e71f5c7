"""Tables for notebooks: rows that are read when they are needed, as records or as data frames."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from swarmq.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Row = TypeVar("Row", bound=msgspec.Struct)
MAX_REPR_ROWS = 5
"""Maximum number of rows in a table's `repr`."""


class Table(Generic[Row]):
    """Rows of one kind. Every iteration reads them anew, so that a table of a live run grows."""

    def __init__(
        self,
        of: type[Row],
        rows: Callable[[], Iterable[Row]],
        *,
        count: Callable[[], int] | None = None,
        usual: Sequence[str] = (),
    ) -> None:
        """`of`: type of the rows. `count`: counts the rows without reading them. `usual`: names of numbers that the rows' field
        `values` usually has; a table has these columns even without rows."""
        self._of, self._rows, self._count, self._usual = of, rows, count, usual
        self._counted: list[Row] | None = None

    def __iter__(self) -> Iterator[Row]:
        rows, self._counted = self._counted, None
        yield from self._rows() if rows is None else rows

    def __len__(self) -> int:
        if self._count:
            return self._count()
        if self._counted is None:
            self._counted = [*self._rows()]  # `list(table)` asks for the length first, and then gets the same rows
        return len(self._counted)

    def __repr__(self) -> str:
        rows = [row for row, _ in zip(self, range(MAX_REPR_ROWS), strict=False)]
        more = len(self) - len(rows)
        return "\n".join([*map(repr, rows), *([f"... and {more} more"] if more > 0 else [])]) or "(no rows)"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as flat dictionaries; the names of nested values are joined by `/`."""
        return [flatten(row) for row in self]

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas data frame, which has all columns even without rows. Raises MissingExtraError if pandas is not
        installed."""
        pandas = _load("pandas")
        if rows := self.to_dicts():
            return pandas.DataFrame(rows)
        return pandas.DataFrame({name: pandas.Series(dtype=kind.__name__) for name, kind in self._columns().items()})

    def to_polars(self) -> pl.DataFrame:
        """Return a polars data frame, which has all columns even without rows. Raises MissingExtraError if polars is not
        installed."""
        polars = _load("polars")
        if rows := self.to_dicts():
            return polars.DataFrame([msgspec.to_builtins(row) for row in rows], infer_schema_length=None)
        return polars.DataFrame(
            schema={name: None if kind is object else kind for name, kind in self._columns().items()}
        )

    def _columns(self) -> dict[str, type]:
        """Return column -> type of its values: `str`, `int`, `float`, `bool`, or `object` for anything else."""
        return dict(_describe(self._of)) | dict.fromkeys(self._usual, float)


def _describe(of: type[msgspec.Struct]) -> Iterator[tuple[str, type]]:
    """Yield column and type of values for each field of a record. Mappings are left out, because only the rows show their
    columns."""
    for field in msgspec.structs.fields(of):
        is_union = get_origin(field.type) in {Union, UnionType}
        kind = next(kind for kind in (get_args(field.type) if is_union else (field.type,)) if kind is not type(None))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            for name, inner in _describe(kind):
                yield name if field.name == "values" else f"{field.name}/{name}", inner
        elif get_origin(kind) is Literal:
            yield field.name, str
        elif (get_origin(kind) or kind) is not dict:
            yield field.name, kind if kind in {str, int, float, bool} else object


def flatten(row: msgspec.Struct) -> dict[str, Any]:
    """Return a record as a flat dictionary, with the entries of its field `values` beside its other fields."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(row).items():
        _flatten_into(flat, "" if name == "values" else name, value)
    return flat


def _flatten_into(flat: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten_into(flat, f"{name}/{key}" if name else str(key), inner)
    elif isinstance(value, msgspec.Struct):
        _flatten_into(flat, name, msgspec.structs.asdict(value))
    else:
        flat[name] = value


def _load(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"not installed: {package}; pip install {package}") from error
