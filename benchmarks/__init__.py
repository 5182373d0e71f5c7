"""Measurements anyone can repeat: `python -m benchmarks.NAME --help`. They share models and scripted parts with the tests (tests/support)."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)
