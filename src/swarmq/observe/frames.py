"""Tables for notebooks: rows that are read when they are needed, as records or as data frames."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from swarmq.errors import MissingExtraError

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Row = TypeVar("Row", bound=msgspec.Struct)
SHOWN = 5
"""Rows in the representation of a table."""


class Table(Generic[Row]):
    """Rows of one kind. Every iteration reads them anew, so that a table of a live run grows."""

    def __init__(self, rows: Callable[[], Iterable[Row]], *, count: Callable[[], int] | None = None) -> None:
        """`count`: counts the rows without reading them."""
        self._rows, self._count = rows, count
        self._counted: list[Row] | None = None

    def __iter__(self) -> Iterator[Row]:
        rows, self._counted = self._counted, None
        yield from self._rows() if rows is None else rows

    def __len__(self) -> int:
        if self._count:
            return self._count()
        if self._counted is None:
            self._counted = [*self._rows()]  # `list(table)` asks for the length first: it gets these rows, not others
        return len(self._counted)

    def __repr__(self) -> str:
        rows = [row for row, _ in zip(self, range(SHOWN), strict=False)]
        more = len(self) - len(rows)
        return "\n".join([*map(repr, rows), *([f"... and {more} more"] if more > 0 else [])]) or "(no rows)"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as flat dictionaries; the names of nested values are joined by `/`."""
        return [flatten(row) for row in self]

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas data frame. Raises MissingExtraError if pandas is not installed."""
        return _load("pandas").DataFrame(self.to_dicts())

    def to_polars(self) -> pl.DataFrame:
        """Return a polars data frame. Raises MissingExtraError if polars is not installed."""
        return _load("polars").from_dicts(self.to_dicts(), infer_schema_length=None)


def flatten(row: msgspec.Struct) -> dict[str, Any]:
    """Return a record as a flat dictionary; the fields of `values` stand beside the others."""
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
