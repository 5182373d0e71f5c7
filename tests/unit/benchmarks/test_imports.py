"""Every benchmark finds what it imports: most run so seldom that a renamed import would otherwise be met on a lent GPU."""

import importlib
from pathlib import Path

import benchmarks
import pytest

NAMES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name):
    importlib.import_module(f"benchmarks.{name}")
