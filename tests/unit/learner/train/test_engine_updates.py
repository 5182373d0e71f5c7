"""People hear of an engine that does not take weights, and when it takes them again: once each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swarmq.errors import EngineError
from swarmq.learner.store.records import Warn
from swarmq.learner.store.writer_lock import Fence
from swarmq.learner.train.engine_updates import EngineUpdates
from swarmq.weights.push.pusher import PushReport

ONE, OTHER = "http://one:8000", "http://other:8000"


class Stage:
    """Engines of which some take no weights, the weights, and the people who are told."""

    def __init__(self, folder: Path) -> None:
        self.failing: dict[str, str] = {}
        self.told: list[str] = []
        self.replaced: tuple[str, ...] = ()
        self.num_engines, self.version = 2, 0
        self.engines = EngineUpdates(self._pusher(), policy="main", take_turns=False, fence=Fence(folder / "lock"))

    def _pusher(self) -> Any:
        return self

    def weights_to_push(self) -> Iterable[Any]:
        return ()

    def push(self, _: object, version: int) -> PushReport:
        if len(self.failing) == self.num_engines:
            raise EngineError("none took it")
        return PushReport(version=version)

    def ensure(self, _: object, version: int) -> PushReport:
        if self.failing:
            raise EngineError("none of those behind took it")
        return PushReport(version=version, replaced=self.replaced)

    def send(self, message: object) -> None:
        if isinstance(message, Warn):
            self.told.append(message.text)

    def step(self) -> None:
        self.engines.push(self, self, replayed=False)

    def wait(self) -> None:
        self.engines.ensure(self, self, again=True)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_an_engine_that_falls_behind_is_told_of_once_and_once_again_when_it_is_well(stage: Stage) -> None:
    stage.step()
    assert stage.told == []
    stage.failing = {OTHER: "another model"}
    for _ in range(3):
        stage.step()
        stage.wait()
        stage.failing = {OTHER: "still another model"}
    assert stage.told == [f"{OTHER} does not take the weights of main, so its samples become stale: another model"]
    stage.failing = {}
    for _ in range(3):
        stage.wait()
    assert stage.told[1:] == [f"{OTHER} serves the newest weights of main again, or has left"]


def test_an_engine_that_falls_behind_while_the_learner_waits_is_told_of_as_well(stage: Stage) -> None:
    stage.step()
    stage.failing = {ONE: "gone"}
    stage.wait()
    stage.failing = {ONE: "gone", OTHER: "paused"}
    stage.wait()
    assert [text.partition(" ")[0] for text in stage.told] == [ONE, OTHER]


def test_weights_that_somebody_else_changed_are_told_of(stage: Stage) -> None:
    stage.replaced = (OTHER,)
    stage.wait()
    assert stage.told == [f"the weights of {OTHER} were changed by another process: the weights of main are restored"]


def test_where_none_takes_weights_each_engine_is_told_of(stage: Stage) -> None:
    stage.failing = {ONE: "gone", OTHER: "paused"}
    stage.step()
    said, *each = stage.told
    assert said == "weights 0 of main not pushed: none took it"
    assert [text.rpartition(" ")[2] for text in each] == ["gone", "paused"]
