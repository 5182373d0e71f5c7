"""A learner starts what it needs beside it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from swarmq.config import SwarmJob
from swarmq.learner import main
from swarmq.learner.teachers.availability import KEY_ENV
from swarmq.registries.engines import EngineRegistry


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


def test_a_teacher_that_is_a_policy_is_asked_at_its_engine_with_the_secret_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, "of another server")
    seen = list[tuple[str | None, str]]()
    monkeypatch.setattr(
        main, "train", lambda job, *_, **__: seen.append((job.policies["main"].train.teacher_url, os.environ[KEY_ENV]))
    )
    student = {"model": "m", "train": {"loss": {"name": "distill"}, "teacher": "policies.tutor"}}
    tutor = {"model": "t", "trained": False, "engine": {"urls": ["http://127.0.0.1:9"]}}
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": student, "tutor": tutor}})
    main.run(job, "main", with_collector=False)
    assert seen == [("http://127.0.0.1:9", EngineRegistry(job).secret())]
