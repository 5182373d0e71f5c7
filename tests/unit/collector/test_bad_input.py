"""Where each kind of bad input ends, from the wire to the batch: a refusal in words or a counted reason, never silence."""

from array import array

import msgspec
import pytest

from swarmq.config import Train
from swarmq.errors import MessageError
from swarmq.learner.intake import Intake, Limits
from swarmq.messages import VersionSpan, decode, encode

LIMITS = Limits(groups_per_batch=1, mix={"math": 1.0}, max_staleness=4, vocab_size=100, max_length=8)


def floats(*values):
    return array("f", values).tobytes()


def altered(turn, **fields):
    return msgspec.structs.replace(turn, **fields)


REFUSED_ON_ARRIVAL = {
    "a log-probability is missing": (lambda say: say.turn("b", sampled=(3, 4)), {"logprobs": floats(-0.5)}),
    "a log-probability is not a number": (lambda say: say.turn("b"), {"logprobs": floats(float("nan"))}),
    "a log-probability is minus infinity": (lambda say: say.turn("b"), {"logprobs": floats(float("-inf"))}),
    "a log-probability is above 0": (lambda say: say.turn("b"), {"logprobs": floats(0.7)}),
    "a token id is negative": (lambda say: say.turn("b", prompt=(-1,)), {}),
    "token ids are cut": (lambda say: say.turn("b"), {"prompt_ids": b"\1\0"}),
    "tokens are shared with nobody": (lambda say: say.turn("b", shared=2), {}),
    "versions do not cover the sample": (
        lambda say: say.turn("b", sampled=(3, 4), versions=(VersionSpan(version=1, start=0, end=1),)),
        {},
    ),
}
"""What a reader parks in the dead-letter queue with the reason beside it."""

DROPPED_BY_COLLECTOR = {
    "incomplete": lambda say: say.turn("b", parent="never-sent", shared=1),
    "unresolvable": lambda say: say.turn("b", parent="a", shared=9),
}

DROPPED_BY_LEARNER = {
    "nothing_sampled": lambda say: say.turn("b", sampled=()),
    "empty_prompt": lambda say: say.turn("b", prompt=()),
    "id_outside_vocabulary": lambda say: say.turn("b", prompt=(1, 100)),
    "over_budget": lambda say: say.turn("b", parent="a", shared=3, prompt=(1,) * 5),
}


@pytest.mark.parametrize("flaw", REFUSED_ON_ARRIVAL)
def test_a_turn_that_contradicts_itself_is_refused_where_it_arrives(say, flaw):
    make, fields = REFUSED_ON_ARRIVAL[flaw]
    body = encode(altered(make(say), **fields))
    with pytest.raises(MessageError, match="turn b of e: "):
        decode(body)


@pytest.mark.parametrize("reason", DROPPED_BY_COLLECTOR)
def test_a_turn_that_cannot_be_put_together_drops_its_episode_with_a_counted_reason(bench, say, reason):
    bench.take(say.begin(), say.turn("a"), decode(encode(DROPPED_BY_COLLECTOR[reason](say))), say.end())
    for _ in range(3):
        bench.wait(3600)
    assert bench.episodes == []
    assert bench.dropped == {reason: 1}


@pytest.mark.parametrize("reason", DROPPED_BY_LEARNER)
def test_a_turn_that_cannot_be_trained_drops_its_episode_with_a_counted_reason(make_bench, say, reason):
    bench = make_bench(group_size=3)
    for repeat, episode in enumerate(("x", "y", "e")):
        bench.take(say.begin(episode, repeat=repeat, group_size=3), say.turn("a", episode))
        if episode == "e":
            bench.take(decode(encode(DROPPED_BY_LEARNER[reason](say))))
        bench.take(say.end(episode, reward=float(repeat)))
    assert len(bench.episodes) == 3, "the collector knows neither vocabulary nor model"
    intake = Intake(LIMITS)
    for episode in bench.episodes:
        intake.accept(decode(encode(episode)))
    record = intake.take(version=0, at=0.0, settings=Train())
    assert record.index.trained == ("x", "y"), "its siblings are trained"
    assert record.index.dropped == {"e": reason}
