"""The diagnostics of a replayed step come from its metrics and the traces of its tokens."""

import math

import numpy as np
import pytest

from support.episodes import make_group
from swarmq.learner.replay import diagnose
from swarmq.learner.store.token_trace import EpisodeTrace, TurnTrace
from swarmq.messages import unpack_floats

FIELDS = {
    "loss": 1.0,
    "kl_k3": 0.1,
    "effective_samples": 0.9,
    "entropy": 2.0,
    "grad_norm": 3.0,
    "tokens_trained": 8,
    "episodes_left_out": 0,
}


def trace(episode, shift):
    """The trace of an episode whose every token is `exp(shift)` times as likely as when it was sampled."""
    turns = [
        TurnTrace(
            call_id=turn.call_id,
            advantage=1.0,
            logprobs=(np.asarray(unpack_floats(turn.logprobs)) + shift).astype("<f4").tobytes(),
        )
        for turn in episode.turns
    ]
    return EpisodeTrace(episode_id=episode.episode_id, turns=tuple(turns))


def test_the_reward_is_weighted_by_the_ratios_of_tokens():
    good, bad = make_group(rewards=(1.0, 0.0))
    tokens = [sum(turn.num_sampled for turn in one.turns) for one in (good, bad)]
    found = diagnose(FIELDS, [good, bad], [trace(good, math.log(2.0)), trace(bad, 0.0)])
    assert found.reward == pytest.approx(tokens[0] / sum(tokens))
    assert found.weighted_reward == pytest.approx(2 * tokens[0] / (2 * tokens[0] + tokens[1]))
    assert (found.loss, found.skipped) == (1.0, "")
    alike = diagnose(FIELDS | {"skipped": "nothing_left"}, [good, bad], [trace(good, 0.0), trace(bad, 0.0)])
    assert alike.weighted_reward == pytest.approx(alike.reward)
    assert alike.skipped == "nothing_left"


def test_a_step_without_any_trained_token_has_no_reward():
    found = diagnose(FIELDS, make_group(), [])
    assert (found.reward, found.weighted_reward) == (0.0, 0.0)
