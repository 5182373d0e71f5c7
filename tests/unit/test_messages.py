"""What crosses a process survives it exactly, and what is not ours is refused with a reason."""

import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq import messages as m
from swarmq.errors import MessageError

ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)


def turn(**changes):
    base = {
        "run": "r",
        "episode_id": "e",
        "policy": "main",
        "call_id": "c0",
        "request_id": "q0",
        "prompt_ids": m.pack_ids([1, 2, 3]),
        "sampled_ids": m.pack_ids([4, 5]),
        "logprobs": m.pack_floats([-0.5, -0.25]),
    }
    return m.Turn(**(base | changes))


def end(**changes):
    return m.EpisodeEnd(**({"run": "r", "episode_id": "e", "status": "finished", "rewards": {"main": 1.0}} | changes))


def episode(**changes):
    base = {
        "run": "r",
        "policy": "main",
        "episode_id": "e",
        "slot": m.Slot(task_id="t", repeat=1),
        "kind": "math",
        "group_id": "t/0",
        "group_members": 4,
        "group_size": 4,
        "reward": 0.5,
        "turns": (turn(),),
    }
    return m.Rollout(**(base | changes))


EVERY_RECORD = [
    m.EpisodeBegin(
        run="r",
        episode_id="e",
        slot=m.Slot(task_id="t"),
        kind="math",
        group_size=4,
        policies=("main",),
        client_id="alice",
    ),
    turn(versions=(m.VersionSpan(version=0, start=0, end=1), m.VersionSpan(version=1, start=1, end=2))),
    m.RefusedTurn(run="r", episode_id="e", call_id="c1", reason="a log-probability is above 0"),
    m.DeliveryReport(run="r", served_id="s", sent={"e": ("c0",)}, withdrawn={"e": ("c1",)}),
    m.Fence(run="r", fence_id="f"),
    end(metrics={"turns": 3.0}, calls=("c0",)),
    episode(),
    m.StepReport(run="r", policy="main", version=3, trained=("e",), dropped={"f": "equal_rewards"}),
    m.Ticket(run="r", ticket_id="k", kind="math"),
    m.Task(run="r", slot=m.Slot(task_id="t"), kind="math", group_size=4, payload=msgspec.Raw(b"\x01")),
    m.Command(run="r", command_id="c", action="set", settings={"groups.group_size": 4, "mix": {"a": 1.0}}),
    m.Registration(
        run="r", registration_id="x", action="join", process="engine", url="http://gpu2:8000", policy="main"
    ),
    m.LogEntry(run="r", what="transaction", log="l", term=2, number=3, part=1, num_parts=2, body=b"rows"),
    m.TrialOffer(run="study-s", copy_id="o", body=b"{}"),
    m.TrialReport(run="study-s", report_id="r", body=b"{}"),
    m.Evaluation(run="r", version=3, began_at=5.0, results={"version": 3, "kinds": {"math": {"reward": 0.5}}}),
    m.Control(
        run="r",
        number=2,
        changes=(
            m.Change(number=1, path="mix", before={"a": 1.0}, value={"b": 1.0}, base=None, from_step={"main": 7}),
        ),
        lent=("code",),
        pace="paused",
    ),
    m.Event(run="r", source="learner.main", name="step", at=1.0, fields={"loss": 0.1}),
]


@pytest.mark.parametrize("record", EVERY_RECORD, ids=lambda r: type(r).__name__)
def test_every_record_comes_back_as_it_was_sent(record):
    assert m.decode(m.encode(record)) == record


def test_an_end_that_says_nothing_of_further_attempts_is_not_the_last():
    fields = msgspec.msgpack.decode(m.encode(end(status="failed", rewards={})))
    del fields["final"]
    assert m.decode(msgspec.msgpack.encode(fields)) == end(status="failed", rewards={}, final=False)


def test_the_list_above_holds_every_record_there_is():
    assert {type(r) for r in EVERY_RECORD} == set(m.Message.__args__)


@given(ids)
def test_token_ids_survive_packing(values):
    assert list(m.unpack_ids(m.pack_ids(values))) == values
    assert len(m.pack_ids(values)) == 4 * len(values)


def test_a_token_id_over_32_bits_is_refused():
    with pytest.raises(MessageError, match="32 bits"):
        m.pack_ids([2**31])


def test_unknown_fields_of_a_newer_writer_are_ignored():
    newer = msgspec.msgpack.decode(m.encode(turn())) | {"colour": "blue"}
    assert m.decode(msgspec.msgpack.encode(newer)) == turn()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not a swarmq record"),
        (b"\xff\xfe garbage", "not a swarmq record"),
        (b"\x91" * 100_000, "not a swarmq record"),
        (msgspec.msgpack.encode({"type": "colour"}), "not a swarmq record"),
        (m.encode(turn())[:-3], "not a swarmq record"),
        (msgspec.msgpack.encode(msgspec.msgpack.decode(m.encode(turn())) | {"schema": 99}), "schema 99 is newer"),
        (
            m.encode(turn(versions=(m.VersionSpan(version=2**31, start=0, end=2),))),
            r"not a swarmq record: Expected `int` <= 2147483647 .*versions\[0\]",
        ),
    ],
    ids=["empty", "garbage", "nested", "unknown tag", "truncated", "newer schema", "version of no learner"],
)
def test_what_is_not_a_record_is_refused(body, reason):
    with pytest.raises(MessageError, match=reason):
        m.decode(body)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (turn(logprobs=m.pack_floats([-1.0])), "2 sampled tokens but 1.0 log-probabilities"),
        (turn(logprobs=m.pack_floats([-1.0, math.nan])), "is nan, outside"),
        (turn(logprobs=m.pack_floats([-1.0, 0.5])), "is 0.5, outside"),
        (turn(sampling=m.Sampling(temperature=math.nan)), "temperature nan is not finite"),
        (turn(prompt_ids=m.pack_ids([-1])), "negative token id"),
        (turn(prompt_ids=b"\x00\x00\x00"), "whole int32"),
        (turn(shared=2), "2 shared tokens with parent None"),
        (turn(versions=(m.VersionSpan(version=0, start=0, end=1),)), "do not cover 2 sampled tokens"),
        (end(rewards={"main": math.nan}), "rewards.main is nan"),
        (end(metrics={"x": math.inf}), "metrics.x is inf"),
        (end(rewards={}), "no policy has a reward"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(bad, reason):
    with pytest.raises(MessageError, match=reason):
        m.decode(m.encode(bad))


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e39, 1e30, -2e6])
@pytest.mark.parametrize(
    ("record", "path"),
    [
        (lambda value: end(rewards={"main": value}), "end of e: rewards.main"),
        (lambda value: end(agent_rewards={"main": {"a": value}}), "end of e: agent_rewards.main.a"),
        (lambda value: end(call_rewards={"c0": value}), "end of e: call_rewards.c0"),
        (lambda value: episode(reward=value), "episode e: reward"),
        (lambda value: episode(agent_rewards={"a": value}), "episode e: agent_rewards.a"),
        (lambda value: episode(call_rewards={"c0": value}), "episode e: call_rewards.c0"),
    ],
)
def test_a_reward_that_nothing_can_be_learned_from_is_refused_wherever_it_stands(record, path, value):
    with pytest.raises(MessageError, match=f"{path} is {value:g}".replace("+", r"\+")):
        m.decode(m.encode(record(value)))


@given(st.lists(st.binary(min_size=4, max_size=4) | st.floats(-110, 1, width=32).map(lambda x: struct.pack("<f", x))))
def test_log_probabilities_are_judged_by_their_values_whatever_their_bits(values):
    packed = b"".join(values)
    known = turn(sampled_ids=m.pack_ids([1] * len(values)), logprobs=packed)
    if m.are_valid_logprobs(*m.unpack_floats(packed)):
        m.check(known)
    else:
        with pytest.raises(MessageError, match="a log-probability is"):
            m.check(known)


@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
def test_negative_token_ids_are_refused(ids):
    known = turn(prompt_ids=m.pack_ids(ids))
    if min(ids, default=0) >= 0:
        m.check(known)
    else:
        with pytest.raises(MessageError, match="negative token id"):
            m.check(known)


@pytest.mark.parametrize("logprob", [-104.5, -9999.0, -1e30])
def test_a_log_probability_that_no_sampler_draws_is_refused(logprob):
    bad = turn(logprobs=m.pack_floats([-1.0, logprob]))
    for record in (bad, episode(turns=(bad,))):
        with pytest.raises(MessageError, match=r"turn c0 of e: a log-probability is .*, outside \[-104, 0\]"):
            m.decode(m.encode(record))


def test_a_record_over_the_size_limit_is_refused_before_it_is_sent():
    with pytest.raises(MessageError, match="over the limit"):
        m.encode(end(metadata={"log": "x" * m.MAX_MESSAGE_BYTES}))


def test_keys_tell_facts_apart_and_sendings_of_one_fact_alike():
    keys = [m.idempotency_key(record) for record in EVERY_RECORD]
    assert len(set(keys)) == len(keys)
    assert m.idempotency_key(end()) == m.idempotency_key(end(reason="sent again"))


def test_ids_sort_by_the_time_they_were_made():
    made = [m.new_id() for _ in range(3)]
    assert len(set(made)) == 3
    assert [i[:8] for i in made] == sorted(i[:8] for i in made)
    assert made[0][14] == "7"
