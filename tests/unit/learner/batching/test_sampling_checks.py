"""What makes an engine sample from something else than the learner computes is known by name, whatever it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.episodes import make_episode
from swarmq.learner.batching.sampling_checks import CHECKED_SEPARATELY, NEUTRAL_PARAMETERS, find_altered_sampling
from swarmq.learner.doctor.checks import _check_sampling
from swarmq.messages import Sampling, Turn

CHANGES: dict[str, Any] = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 4,
    "logit_bias": {"7": -100.0},
}


def sampled_with(sampling: Sampling) -> Turn:
    return msgspec.structs.replace(make_episode().turns[0], sampling=sampling)


def test_every_setting_is_harmless_or_has_a_case() -> None:
    assert {
        field.name for field in msgspec.structs.fields(Sampling)
    } == NEUTRAL_PARAMETERS | CHECKED_SEPARATELY | CHANGES.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_the_distribution_is_named_and_an_error_of_the_doctor(name: str) -> None:
    sampling = Sampling(**{name: CHANGES[name]})
    assert find_altered_sampling(sampling) == [f"{name}={CHANGES[name]}"]
    turn = sampled_with(sampling)
    finding = _check_sampling([turn])
    assert finding.level == "error"
    assert f"({name}=" in finding.text


def test_what_the_engine_learned_meanwhile_is_named_and_a_grammar_is_a_warning() -> None:
    assert find_altered_sampling(Sampling(others=("bad_words",))) == ["bad_words"]
    held = sampled_with(Sampling(grammar="json:1"))
    assert find_altered_sampling(held.sampling) == []
    assert _check_sampling([held]).level == "warning"


def test_temperature_length_and_seed_are_no_alteration_but_greed_is() -> None:
    assert find_altered_sampling(Sampling(temperature=0.7, max_tokens=9, seed=1, top_k=-1)) == []
    assert find_altered_sampling(Sampling(temperature=0.0)) == ["temperature=0"]
