"""What an agent did not receive is not trained, whoever died, and whatever order the news of it come in."""

from __future__ import annotations

from collections import Counter
from itertools import count

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.state import HOLD_S
from swarmq.messages import DeliveryReport, EpisodeEnd, Turn, encode
from unit.collector.conftest import Bench, begin, end, rules, turn

ids = count()


def sent(*calls, **fields):
    return DeliveryReport(run="r", served_id=str(next(ids)), sent={"e": calls}, **fields)


def withdrawn(*calls):
    return DeliveryReport(run="r", served_id=str(next(ids)), withdrawn={"e": calls})


def turn_with_receipt(call="a", **fields):
    """A turn whose proxy reports whether the answer was sent."""
    return turn(call, receipt=True, **fields)


def trained(bench):
    return [turn.call_id for episode in bench.episodes for turn in episode.turns]


def test_an_answer_that_was_refused_is_not_trained(bench):
    bench.take(begin(), turn_with_receipt("a"), sent("a"), turn_with_receipt("b"), withdrawn("b"), end())
    assert trained(bench) == ["a"]
    assert bench.core.counts["orphan_turns"] == 1
    assert bench.episodes[0].orphan_turns == 1


@pytest.mark.parametrize("late", ["before its turn", "after the end"])
def test_a_refusal_may_come_at_any_time(bench, late):
    pieces = (
        [withdrawn("b"), turn_with_receipt("b"), end()]
        if late == "before its turn"
        else [turn_with_receipt("b"), end(), withdrawn("b")]
    )
    bench.take(begin(), turn_with_receipt("a"), sent("a"), *pieces)
    assert trained(bench) == ["a"]


def test_a_refused_turn_that_arrives_after_the_end_is_not_trained(bench):
    bench.take(begin(), turn_with_receipt("a"), sent("a"), withdrawn("b"), end(), turn_with_receipt("b"))
    assert trained(bench) == ["a"]


def test_an_episode_whose_only_answer_was_refused_is_unseen(bench):
    bench.take(begin(), turn_with_receipt("a"), end(), withdrawn("a"))
    assert bench.dropped == {"unseen": 1}


def test_an_end_waits_until_its_answers_are_known_to_be_sent(bench):
    bench.take(begin(), turn_with_receipt("a"), end())
    assert not bench.sent
    bench.restart()
    bench.take(sent("a"))
    assert trained(bench) == ["a"]


def test_an_end_is_stored_only_if_its_transaction_does_not_decide_it(bench):
    waiting, report = end(), sent("a")
    bench.take(begin(), turn_with_receipt("a"))
    taken = [bench.core.take(message, encode(message), bench.now) for message in (waiting, report)]
    bench.run([effect for effects in taken for effect in effects])
    assert trained(bench) == ["a"]
    assert not any(isinstance(effect, do.SaveEnd) for effect in bench.effects)


def test_what_a_proxy_said_outlives_the_collector(bench):
    bench.take(begin(), turn_with_receipt("a"), turn_with_receipt("b"), sent("a"), withdrawn("b"))
    bench.restart()
    bench.take(end())
    assert trained(bench) == ["a"]


def test_an_answer_of_which_a_killed_proxy_has_not_spoken_is_not_trained(bench):
    bench.take(begin(), turn_with_receipt("a"), sent("a"), turn_with_receipt("b"), end())
    bench.wait(HOLD_S)
    assert trained(bench) == ["a"]
    assert (bench.core.counts["unseen_turns"], bench.core.counts["orphan_turns"]) == (1, 1)


def test_while_a_collector_is_stopped_no_end_waits_in_vain(bench):
    bench.take(begin(), turn_with_receipt("a"), end())
    bench.sleep(10 * HOLD_S)
    bench.take(sent("a"))
    assert trained(bench) == ["a"]


def test_an_answer_that_the_agent_continued_was_received_whatever_was_said(bench):
    bench.take(begin(), turn_with_receipt("a"), turn_with_receipt("b", parent="a", shared=3), sent("b"), end())
    assert trained(bench) == ["a", "b"]


def test_turns_of_a_proxy_that_never_speaks_of_answers_are_trained_as_ever(bench):
    bench.take(begin(), turn("a"), end())
    assert trained(bench) == ["a"]


def test_an_answer_that_was_sent_waits_for_its_turn(bench):
    bench.take(begin(), turn_with_receipt("a"), sent("a", "b"), end())
    assert not bench.sent
    bench.take(turn_with_receipt("b"))
    assert trained(bench) == ["a", "b"]


def test_what_the_client_saw_decides_of_the_calls_it_watched(bench):
    watched = {"observed": True}
    pieces = [
        turn_with_receipt("a", **watched),
        turn_with_receipt("b", **watched),
        sent("a", "b"),
        turn_with_receipt("c"),
        sent("c"),
    ]
    bench.take(begin(), *pieces, end(received=("a",)))
    assert trained(bench) == ["a", "c"]


def test_an_end_waits_for_the_turns_that_the_client_saw(bench):
    bench.take(begin(), turn_with_receipt("a", observed=True), end(received=("a", "b")))
    assert not bench.sent
    bench.take(turn_with_receipt("b", observed=True))
    assert trained(bench) == ["a", "b"]


def test_an_episode_that_lacks_a_turn_that_the_client_saw_is_never_trained(bench):
    bench.take(begin(), turn_with_receipt("a", observed=True), end(received=("a", "b")))
    bench.wait(HOLD_S)
    assert bench.dropped == {"incomplete": 1}


def test_equal_requests_that_are_no_retries_are_all_trained(bench):
    same = {"request_digest": "d", "counts_retries": True}
    pieces = [turn_with_receipt(call, **same) for call in "abcd"]
    bench.take(begin(), *pieces, turn_with_receipt("f", parent="c", shared=3), sent("a", "b", "c", "d", "f"), end())
    assert trained(bench) == ["a", "b", "c", "d", "f"]


def test_equal_requests_of_a_library_that_counts_nothing_are_taken_for_repeats(bench):
    pieces = [turn_with_receipt(call, request_digest="d") for call in "ab"]
    bench.take(begin(), *pieces, turn_with_receipt("f", parent="b", shared=3), sent("a", "b", "f"), end())
    assert trained(bench) == ["b", "f"]


def test_equal_requests_whose_answers_the_client_saw_are_all_trained(bench):
    pieces = [turn_with_receipt(call, request_digest="d", observed=True) for call in "ab"]
    bench.take(
        begin(), *pieces, turn_with_receipt("f", parent="b", shared=3, observed=True), end(received=("a", "b", "f"))
    )
    assert trained(bench) == ["a", "b", "f"]


def test_a_retry_replaces_the_refused_sending_and_no_equal_one(bench):
    same = {"request_digest": "d", "counts_retries": True}
    bench.take(begin(), turn_with_receipt("a", **same), sent("a"), turn_with_receipt("b", **same), withdrawn("b"))
    bench.take(turn_with_receipt("c", **same, retry=1), sent("c"), end())
    assert trained(bench) == ["a", "c"]


def test_what_becomes_of_a_group_is_what_was_decided_and_not_what_is_heard_later(bench):
    bench.take(begin(), turn_with_receipt("a"), sent("a"), turn_with_receipt("b"), end())
    bench.wait(HOLD_S)
    before = msgspec.msgpack.encode(bench.episodes)
    bench.take(sent("b"))
    bench.restart()
    assert msgspec.msgpack.encode(bench.episodes) == before


# ------------------------------------------------------------------------------------------------- any schedule

FATES = ("received", "late", "lost", "killed", "silenced", "cut")
"""received: recorded, sent, told of. late: recorded, but the confirm came after the proxy had refused. lost: refused and never
recorded. killed: recorded, and the proxy died before the last byte. silenced: received, and the proxy died before it told.
cut: sent, and lost between the hosts."""


class Sending(msgspec.Struct, frozen=True):
    call: str
    fate: str
    turn: Turn

    @property
    def is_received(self) -> bool:
        return self.fate in {"received", "silenced"}


@st.composite
def attempts(draw, *, watched: bool, fates=FATES):
    """Everything that an agent's calls leave behind: sendings, in their order."""
    sendings: list[Sending] = []
    last: Sending | None = None
    counts = draw(st.booleans())
    for question in range(draw(st.integers(1, 4))):
        digest = draw(st.sampled_from([f"q{question}", "same"])) if counts or watched else f"q{question}"
        follows = last if last and draw(st.booleans()) else None
        if follows and follows.fate == "silenced":  # its proxy was killed and has forgotten it
            follows = None
        repeats = draw(st.booleans())
        for retry in range(3):
            fate, call = draw(st.sampled_from(fates)), f"c{len(sendings)}"
            shared = follows.turn.num_prompt + follows.turn.num_sampled if follows else 0
            made = turn(
                call,
                receipt=True,
                observed=watched,
                request_digest=digest if not follows else digest + follows.call,
                counts_retries=counts,
                retry=retry if counts else 0,
                parent=follows.call if follows else None,
                shared=shared,
                prompt=(question,),
            )
            sendings.append(Sending(call, fate, made))
            if sendings[-1].is_received:
                last = sendings[-1]
                break
            if not repeats:
                break
    return sendings


def report_of(sending: Sending) -> DeliveryReport | None:
    if sending.fate in {"received", "cut"}:
        return sent(sending.call)
    return withdrawn(sending.call) if sending.fate in {"late", "lost"} else None


def play(draw, sendings: list[Sending], ended: EpisodeEnd, *, in_order: bool) -> Bench:
    """Let the collector read what they left behind, in any order that can be, some of it twice, with a restart."""
    before: list = [begin()]
    after: list = []
    for sending in sendings:
        if sending.fate != "lost":
            (before if sending.fate != "late" or draw(st.booleans()) else after).append(sending.turn)
        if news := report_of(sending):
            (before if draw(st.booleans()) else after).append(news)
    after = draw(st.permutations(after))
    pieces = [*before, ended, *after]
    pieces += draw(st.lists(st.sampled_from(pieces), max_size=3))
    if not in_order:
        pieces = draw(st.permutations(pieces))
    bench = Bench(rules())
    restart_at = draw(st.integers(0, len(pieces)))
    for number, piece in enumerate(pieces):
        if number == restart_at:
            bench.restart()
        bench.take(piece)
    bench.wait(HOLD_S)
    return bench


@settings(max_examples=300)
@given(st.data())
def test_with_a_client_that_watches_exactly_what_was_received_is_trained(data):
    sendings = data.draw(attempts(watched=True))
    received = [sending.call for sending in sendings if sending.is_received]
    bench = play(data.draw, sendings, end(received=tuple(received)), in_order=False)
    event(f"{len(received)} of {len(sendings)} received")
    assert Counter(trained(bench)) == Counter(received)
    assert bench.dropped == ({} if received else {"unseen": 1} if bench.core.counts["turns"] else {"no_turns": 1})


@settings(max_examples=300)
@given(st.data())
def test_with_any_other_client_nothing_is_trained_that_was_not_received(data):
    sendings = data.draw(attempts(watched=False, fates=[fate for fate in FATES if fate != "cut"]))
    bench = play(data.draw, sendings, end(), in_order=True)
    received = [sending for sending in sendings if sending.is_received]
    assert set(trained(bench)) <= {sending.call for sending in received}
    unknown = {"silenced"} & {sending.fate for sending in sendings}
    repeated = any(sending.turn.retry or "same" in sending.turn.request_digest for sending in sendings)
    if not unknown and not repeated:
        assert set(trained(bench)) == {sending.call for sending in received}
