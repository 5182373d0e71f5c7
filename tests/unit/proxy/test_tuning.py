"""Sampling settings that change while a proxy serves."""

from __future__ import annotations

import msgspec

from swarmq.config import SwarmJob
from swarmq.messages import Change, Event
from swarmq.proxy.tuning import Tuning

JOB = SwarmJob.build(
    {
        "run": "r",
        "mix": {"math": 0.5, "code": 0.5},
        "kinds": {"code": {"max_tokens": 32}},
        "policies": {"main": {"model": "m", "sampling": {"max_tokens": 64}}},
    }
)


def state(number: int, *changes: Change, source: str = "collector") -> Event:
    fields = {"control": number, "changes": [msgspec.to_builtins(change) for change in changes]}
    return Event(run="r", source=source, name="state", at=0.0, fields=fields)


def test_a_kind_may_have_shorter_answers_than_its_policy():
    tuning = Tuning(JOB)
    assert tuning.sampling("main", "math").max_tokens == 64
    assert tuning.sampling("main", "code").max_tokens == 32
    assert tuning.sampling("main", "").max_tokens == 64


def test_what_the_collector_repeats_is_in_effect_and_what_others_say_is_not():
    warmer = Change(number=1, path="policies.main.sampling.temperature", before=1.0, value=0.7, base=1.0)
    tuning = Tuning(JOB)
    tuning.hear(state(1, warmer, source="client.mallory"))
    assert tuning.sampling("main", "math").temperature == 1.0
    tuning.hear(state(1, warmer))
    assert tuning.sampling("main", "math").temperature == 0.7
    tuning.hear(state(2))
    assert tuning.sampling("main", "math").temperature == 1.0
