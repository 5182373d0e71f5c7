"""Runs that are measured side by side have cores of their own."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from benchmarks.pinned import CorePool

AVAILABLE = sorted(os.sched_getaffinity(0))


def cores(words: list[str]) -> set[int]:
    assert words[:2] == ["taskset", "-c"]
    return set(map(int, words[2].split(",")))


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="needs two cores")
def test_two_runs_at_once_share_no_core() -> None:
    pool = CorePool(2, 1, stagger_s=0.0)
    with ExitStack() as runs:
        first, second = (cores(runs.enter_context(pool.pinned())) for _ in range(2))
    assert first.isdisjoint(second)
    with pool.pinned() as again:
        assert cores(again) in (first, second)


def test_too_many_cores_are_cut_to_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    pool = CorePool(1, len(AVAILABLE) + 1, stagger_s=0.0)
    with pool.pinned() as words:
        assert cores(words) == set(AVAILABLE)
    assert f"{len(AVAILABLE)} for each" in capsys.readouterr().out
