"""Where each kind of bad input ends, from the wire to the batch: a refusal in words or a counted reason, never silence."""

from array import array

import msgspec
import pytest

from swarmq.broker import topology
from swarmq.broker.deliveries import KEY_HEADER, Arrival, Deliveries
from swarmq.collector.decide import effects as do
from swarmq.config import Train
from swarmq.errors import MessageError
from swarmq.learner.feed.batcher import Batcher, BatchLimits
from swarmq.messages import RefusedTurn, VersionSpan, decode, encode
from swarmq.testing import MemoryBroker

LIMITS = BatchLimits(groups_per_batch=1, mix={"math": 1.0}, max_staleness=4, vocab_size=100, max_length=8)


def floats(*values):
    return array("f", values).tobytes()


def altered(turn, **fields):
    return msgspec.structs.replace(turn, **fields)


REFUSED_ON_ARRIVAL = {
    "a log-probability is missing": (lambda say: say.turn("b", sampled=(3, 4)), {"logprobs": floats(-0.5)}),
    "a log-probability is not a number": (lambda say: say.turn("b"), {"logprobs": floats(float("nan"))}),
    "a log-probability is minus infinity": (lambda say: say.turn("b"), {"logprobs": floats(float("-inf"))}),
    "a log-probability is above 0": (lambda say: say.turn("b"), {"logprobs": floats(0.7)}),
    "a log-probability is impossible": (lambda say: say.turn("b"), {"logprobs": floats(-9999.0)}),
    "a token id is negative": (lambda say: say.turn("b", prompt=(-1,)), {}),
    "token ids are cut": (lambda say: say.turn("b"), {"prompt_ids": b"\1\0"}),
    "tokens are shared with nobody": (lambda say: say.turn("b", shared=2), {}),
    "versions do not cover the sample": (
        lambda say: say.turn("b", sampled=(3, 4), versions=(VersionSpan(version=1, start=0, end=1),)),
        {},
    ),
}
"""What a reader parks in the dead-letter queue with the reason beside it."""

REFUSED = RefusedTurn(run="r", episode_id="e", call_id="b", reason="spoilt")

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


@pytest.fixture
async def broker():
    broker = MemoryBroker()
    await broker.declare("r", policies=["main"], kinds=["math"])
    return broker


async def arrived(broker):
    """What is in the inbox, as its reader gets it."""
    inbox = topology.inbox("r")
    async with broker.consume(inbox, prefetch=100) as deliveries:
        return [delivery.message for delivery in await deliveries.batch(100)]


@pytest.mark.parametrize("flaw", REFUSED_ON_ARRIVAL)
async def test_an_episode_is_not_trained_without_a_turn_that_was_refused(bench, say, broker, flaw):
    make, fields = REFUSED_ON_ARRIVAL[flaw]
    for message in (say.begin(), say.turn("a"), altered(make(say), **fields)):
        await broker.publish(topology.inbox("r"), message)
    bench.take(*await arrived(broker))
    assert [effect.reason for effect in bench.effects if isinstance(effect, do.SendDeadLetter)], "it is set aside"
    bench.restart()
    bench.take(say.turn("c", parent="b", shared=3), say.end())
    assert bench.episodes == []
    assert bench.dropped == {"refused_turn": 1}


@pytest.mark.parametrize(("named", "dropped"), [(("a",), {}), (("a", "b"), {"incomplete": 1})])
def test_calls_that_are_named_say_whether_a_refused_one_is_missed(bench, say, named, dropped):
    bench.take(say.begin(), say.turn("a"), REFUSED, say.end(calls=named))
    bench.wait(3600)
    assert bench.dropped == dropped
    assert len(bench.episodes) == 1 - len(dropped)


def test_a_refused_turn_may_come_first_and_again_and_late(bench, say):
    bench.take(REFUSED, REFUSED, say.begin(), say.end(), REFUSED)
    assert bench.state() == ("dropped", "refused_turn")
    bench.take(say.begin("f", "u"), say.turn("b", "f"), altered(REFUSED, episode_id="f"), say.end("f"))
    bench.take(altered(REFUSED, episode_id="f"))
    assert [item.episode_id for item in bench.sent] == ["f"], "b had come whole"
    assert bench.dropped == {"refused_turn": 1}


def test_an_end_that_waits_for_a_turn_hears_that_it_was_refused(bench, say):
    bench.take(say.begin(), say.turn("c", parent="b", shared=3), say.end())
    assert bench.state() == ("open", "")
    bench.take(REFUSED)
    assert bench.dropped == {"refused_turn": 1}


async def test_what_a_client_calls_a_turn_taints_nobodys_episode(say, broker):
    body = encode(altered(say.turn("b"), prompt_ids=b"\1"))
    buried = []

    async def bury(_, reason):
        buried.append(reason)

    for sender, kind in [("r.someone", "turn"), ("", "")]:
        deliveries = Deliveries(bury)
        deliveries.put(
            Arrival(None, 1, body, {KEY_HEADER: "e:b"}, False, topology.inbox("r"), kind=kind, sender=sender)
        )
        assert await deliveries._admit(deliveries._items.popleft()) is None
    assert len(buried) == 2


def test_calls_of_a_policy_that_was_not_announced_are_not_left_out(make_bench, say):
    bench = make_bench(trained=("main", "other"), known=("main", "other"))
    bench.take(say.begin(), say.turn("a"), say.turn("b", policy="other"), say.end())
    assert bench.dropped == {"unknown_policy": 1}


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
    intake = Batcher(LIMITS)
    for episode in bench.episodes:
        intake.accept(decode(encode(episode)))
    record = intake.take(version=0, at=0.0, settings=Train())
    assert record.index.trained == ("x", "y"), "its siblings are trained"
    assert record.index.dropped == {"e": reason}
