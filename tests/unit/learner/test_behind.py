"""People hear of an engine that does not take weights, and when it takes them again: once each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmq.config import Policy, SwarmJob, Train
from swarmq.engine.push import PushReport
from swarmq.errors import EngineError
from swarmq.learner.link import StopSignal
from swarmq.learner.loop import Learner
from swarmq.learner.records import Warn

TRAIN = Train(gradient_checkpointing=False, token_log=False, trackers=())
ONE, OTHER = "http://one:8000", "http://other:8000"


class Engines:
    """Some take no weights. Also in the place of the I/O process."""

    def __init__(self) -> None:
        self.failing: dict[str, str] = {}
        self.told: list[str] = []
        self.engines = 2

    def push(self, _: object, version: int) -> PushReport:
        if len(self.failing) == self.engines:
            raise EngineError("none took it")
        return PushReport(version=version)

    def ensure(self, _: object, version: int) -> PushReport:
        if self.failing:
            raise EngineError("none of those behind took it")
        return PushReport(version=version)

    def tell(self, message: object) -> None:
        if isinstance(message, Warn):
            self.told.append(message.text)


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def learner(engines: Any, tiny_qwen: Path, tmp_path: Path) -> Learner:
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": Policy(model=str(tiny_qwen), train=TRAIN)})
    return Learner(job, "main", pusher=engines, stop=StopSignal())


def test_an_engine_that_falls_behind_is_told_of_once_and_once_again_when_it_is_well(
    learner: Learner, engines: Any
) -> None:
    learner._push(engines, replayed=False)
    assert engines.told == []
    engines.failing = {OTHER: "another model"}
    for _ in range(3):
        learner._push(engines, replayed=False)
        learner._idle(engines, again=True)
        engines.failing = {OTHER: "still another model"}
    assert engines.told == [
        f"{OTHER} does not take the weights of main, what is sampled there goes stale: another model"
    ]
    engines.failing = {}
    for _ in range(3):
        learner._idle(engines, again=True)
    assert engines.told[1:] == [f"{OTHER} serves the newest weights of main again, or has left"]


def test_one_that_falls_behind_while_the_learner_waits_is_told_of_as_well(learner: Learner, engines: Any) -> None:
    learner._push(engines, replayed=False)
    engines.failing = {ONE: "gone"}
    learner._idle(engines, again=True)
    engines.failing = {ONE: "gone", OTHER: "paused"}
    learner._idle(engines, again=True)
    assert [text.partition(" ")[0] for text in engines.told] == [ONE, OTHER]


def test_where_none_takes_weights_each_engine_is_told_of(learner: Learner, engines: Any) -> None:
    engines.failing = {ONE: "gone", OTHER: "paused"}
    learner._push(engines, replayed=False)
    said, *each = engines.told
    assert said == "weights 0 of main not pushed: none took it"
    assert [text.rpartition(" ")[2] for text in each] == ["gone", "paused"]
