"""What is asked of a run is known before an hour on a GPU is spent, whichever benchmark has the loop run."""

from __future__ import annotations

import sys

import pytest
from benchmarks.loop import run as loop
from benchmarks.trl import run as trl


@pytest.mark.parametrize("benchmark", [loop, trl])
def test_a_command_line_says_all_that_a_run_of_the_loop_needs(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", "--steps", "4", "--warm-up", "1"])
    asked = loop.Asked.of(benchmark.parse())
    assert asked == loop.Asked(device="cpu", steps=4, warm_up=1, deadline=420.0)
