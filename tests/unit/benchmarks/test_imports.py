"""Every benchmark finds what it imports: most run so seldom that a renamed import would otherwise be met on a lent GPU."""

import importlib
from pathlib import Path

import benchmarks
import pytest

ROOT = Path(benchmarks.__file__).parent
NAMES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    if path.stem not in {"__init__", "__main__"} and path.parent.name != "scripts"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_can_be_imported(name):
    importlib.import_module(f"benchmarks.{name}")
