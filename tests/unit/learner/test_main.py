"""A learner starts what it needs beside it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from swarmq.config import SwarmJob
from swarmq.learner import main


@pytest.mark.parametrize(("arguments", "beside"), [({}, ["r main"]), ({"with_collector": False}, [])])
def test_a_collector_runs_beside_the_training_unless_it_is_told_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, bool], beside: list[str]
) -> None:
    running, seen = list[str](), list[list[str]]()

    @contextlib.contextmanager
    def collector(job: SwarmJob, policy: str):
        running.append(f"{job.run} {policy}")
        yield
        running.clear()

    monkeypatch.setattr(main, "run_collector", collector)
    monkeypatch.setattr(main, "train", lambda *_, **__: seen.append(list(running)))
    main.run(
        SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": {"model": "m"}}}), "main", **arguments
    )
    assert seen == [beside]
    assert running == []
