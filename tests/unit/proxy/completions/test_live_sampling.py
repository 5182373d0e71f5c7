"""Sampling settings that change while a proxy serves."""

from __future__ import annotations

import msgspec

from swarmq.config import SwarmJob
from swarmq.keys import Claims
from swarmq.messages import Change, Event
from swarmq.proxy.completions.live_sampling import LiveSampling

JOB = SwarmJob.build(
    {
        "run": "r",
        "mix": {"math": 0.5, "code": 0.5},
        "kinds": {"code": {"max_tokens": 32, "episode_tokens": 100, "episode_calls": 4}},
        "policies": {"main": {"model": "m", "sampling": {"max_tokens": 64}}},
    }
)


def state(number: int, *changes: Change, source: str = "collector") -> Event:
    fields = {"control": number, "changes": [msgspec.to_builtins(change) for change in changes]}
    return Event(run="r", source=source, name="state", at=0.0, fields=fields)


def test_a_kind_may_have_shorter_answers_than_its_policy():
    tuning = LiveSampling(JOB)
    assert tuning.sampling("main", "math").max_tokens == 64
    assert tuning.sampling("main", "code").max_tokens == 32
    assert tuning.sampling("main", "").max_tokens == 64


def test_an_episode_may_sample_the_least_of_what_its_key_and_its_kind_allow():
    def allowed(kind: str, max_tokens: int) -> int:
        claims = Claims(
            run="r", client="c", episode_id="e", policies=("main",), expires_at=0.0, kind=kind, max_tokens=max_tokens
        )
        return LiveSampling(JOB).episode_tokens(claims)

    assert [allowed("code", limit) for limit in (0, 50, 200)] == [100, 50, 100]
    assert [allowed("math", limit) for limit in (0, 50)] == [0, 50]


def test_an_episode_may_make_the_fewest_calls_of_what_its_key_and_its_kind_allow():
    def allowed(kind: str, max_calls: int) -> int:
        claims = Claims(
            run="r", client="c", episode_id="e", policies=("main",), expires_at=0.0, kind=kind, max_calls=max_calls
        )
        return LiveSampling(JOB).episode_calls(claims)

    assert [allowed("code", limit) for limit in (0, 3, 9)] == [4, 3, 4]
    assert [allowed("math", limit) for limit in (0, 3)] == [0, 3]


def test_what_the_collector_repeats_is_in_effect_and_what_others_say_is_not():
    warmer = Change(number=1, path="policies.main.sampling.temperature", before=1.0, value=0.7, base=1.0)
    tuning = LiveSampling(JOB)
    tuning.handle_event(state(1, warmer, source="client.mallory"))
    assert tuning.sampling("main", "math").temperature == 1.0
    tuning.handle_event(state(1, warmer))
    assert tuning.sampling("main", "math").temperature == 0.7
    tuning.handle_event(state(2))
    assert tuning.sampling("main", "math").temperature == 1.0
