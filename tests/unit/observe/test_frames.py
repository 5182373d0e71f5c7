"""Tables are lazy, count without reading where they can, and flatten nested values."""

import sys

import msgspec
import pytest

from swarmq.errors import MissingExtraError
from swarmq.observe.frames import Table, flatten


class Inner(msgspec.Struct):
    a: int


class Sample(msgspec.Struct):
    name: str
    values: dict
    inner: Inner


def test_rows_are_read_when_they_are_needed_and_anew_each_time():
    calls = []

    def rows():
        calls.append(1)
        return [Sample("x", {}, Inner(1))] * len(calls)

    table = Table(Sample, rows)
    assert calls == []
    assert len(table) == 1
    assert len(table) == 1
    assert [len(list(table)), len(list(table)), len(list(table))] == [1, 2, 3]
    assert len(Table(Sample, lambda: iter(()), count=lambda: 7)) == 7
    assert repr(Table(Sample, lambda: ())) == "(no rows)"
    assert repr(Table(Sample, lambda: [Sample("x", {}, Inner(1))] * 8)).endswith("... and 3 more")


def test_nested_values_are_joined_and_values_stand_beside_the_others():
    assert flatten(Sample("x", {"reward": 1.0, "pass": {"1": {"low": 0.5}}}, Inner(3))) == {
        "name": "x",
        "reward": 1.0,
        "pass/1/low": 0.5,
        "inner/a": 3,
    }


@pytest.mark.parametrize(("package", "method"), [("pandas", "to_pandas"), ("polars", "to_polars")])
def test_a_missing_package_is_named(monkeypatch, package, method):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"pip install {package}"):
        getattr(Table(Sample, lambda: ()), method)()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_table_without_rows_has_its_columns_with_their_types(library):
    pytest.importorskip(library)
    table = Table(Sample, lambda: (), usual=("reward",))
    frame = getattr(table, f"to_{library}")()
    assert list(frame.columns) == ["name", "inner/a", "reward"]
    numbers = frame[["inner/a", "reward"]]
    assert [str(kind).lower() for kind in numbers.dtypes] == ["int64", "float64"]
    assert len(frame) == 0


def test_rows_become_polars_columns_also_where_the_first_row_lacks_them():
    rows = [Sample("x", {}, Inner(1)), Sample("y", {"reward": 0.5}, Inner(2))]
    frame = Table(Sample, lambda: rows).to_polars()
    assert frame["reward"].to_list() == [None, 0.5]
