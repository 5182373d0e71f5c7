"""Which calls count as answered, and that whatever is sent can be resolved."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.images import make_image, make_turn
from swarmq.collector.decide.assemble import assemble_rollout, decide_received, find_flaw, fits_message
from swarmq.collector.decide.state import TurnMeta
from swarmq.messages import EpisodeBegin, EpisodeEnd, Slot, Turn, unpack_ids


def kept(turns, named=None):
    return decide_received({turn.call_id: TurnMeta.of(turn, 0) for turn in turns}, named).kept


def test_calls_that_the_client_names_are_all_and_only_those_kept(say):
    turns = [say.turn("a", request_digest="d"), say.turn("b", request_digest="d", retry=1), say.turn("c")]
    assert kept(turns, ("a", "c")) == {"a", "c"}


def test_a_retry_replaces_the_sending_whose_answer_was_lost(say):
    turns = [say.turn(name, request_digest="d", retry=n) for n, name in enumerate("abc")]
    assert kept(turns) == {"c"}


def test_a_retry_of_another_request_replaces_nothing(say):
    turns = [say.turn("a", request_digest="d"), say.turn("b", request_digest="x", retry=1)]
    assert kept(turns) == {"a", "b"}


def test_requests_without_a_digest_are_never_taken_for_each_other(say):
    assert kept([say.turn("a"), say.turn("b", retry=1)]) == {"a", "b"}


def test_one_retry_takes_out_one_of_several_equal_requests(say):
    first, lost = say.turn("a", request_digest="d"), say.turn("b", request_digest="d")
    retried = say.turn("c", request_digest="d", retry=1)
    assert kept([first, lost, retried]) == {"a", "c"}


def test_the_sending_that_was_continued_is_not_the_lost_one(say):
    lost, first = say.turn("a", request_digest="d"), say.turn("b", request_digest="d")
    retried = say.turn("c", request_digest="d", retry=1)
    after = [say.turn("d", parent="b", shared=3), say.turn("e", parent="c", shared=3)]
    assert kept([lost, first, retried, *after]) == {"b", "c", "d", "e"}


def test_a_chain_of_retries_takes_out_its_own_sendings_alone(say):
    sent = [("a", 0), ("b", 0), ("c", 1), ("d", 2)]
    assert kept([say.turn(name, request_digest="d", retry=retry) for name, retry in sent]) == {"a", "d"}


def test_all_choices_of_a_lost_request_go_together(say):
    turns = [say.turn(f"a{n}", request_id="A", request_digest="d") for n in range(3)]
    turns += [say.turn(f"b{n}", request_id="B", request_digest="d", retry=1) for n in range(3)]
    assert kept(turns) == {"b0", "b1", "b2"}


def test_choices_of_one_request_are_not_each_others_twins(say):
    turns = [say.turn(f"a{n}", request_id="A", request_digest="d") for n in range(3)]
    assert kept([*turns, say.turn("b", parent="a1", shared=3)]) == {"a0", "a1", "a2", "b"}


def test_a_call_that_nothing_continues_while_its_twin_is_continued_was_lost(say):
    turns = [say.turn("a", request_digest="d"), say.turn("b", request_digest="d"), say.turn("c", parent="b", shared=3)]
    assert kept(turns) == {"b", "c"}


def test_sharing_only_the_prompt_continues_nothing(say):
    turns = [say.turn("a", request_digest="d"), say.turn("b", request_digest="d"), say.turn("c", parent="b", shared=2)]
    assert kept(turns) == {"a", "b", "c"}


def test_equal_requests_that_nothing_continues_are_all_kept(say):
    assert kept([say.turn("a", request_digest="d"), say.turn("b", request_digest="d")]) == {"a", "b"}


def test_the_same_request_of_another_agent_or_policy_is_another_request(say):
    turns = [say.turn("a", request_digest="d", agent="x"), say.turn("b", request_digest="d", agent="y", retry=1)]
    turns += [say.turn("c", request_digest="d", policy="p", agent="x", retry=1)]
    assert kept(turns) == {"a", "b", "c"}


def prompts(turns):
    """Full prompt of every turn, by following parents: an independent resolver."""
    by_id = {turn.call_id: turn for turn in turns}

    def prompt(turn):
        base = ()
        if turn.parent is not None:
            parent = by_id[turn.parent]
            base = prompt(parent) + tuple(unpack_ids(parent.sampled_ids))
        assert turn.shared <= len(base)
        return base[: turn.shared] + tuple(unpack_ids(turn.prompt_ids))

    return {turn.call_id: prompt(turn) for turn in turns}


def test_a_child_of_an_orphan_keeps_its_whole_prompt(say):
    turns = [
        say.turn("a", prompt=(1, 2), sampled=(3,)),
        say.turn("lost", parent="a", shared=3, prompt=(4,), sampled=(5, 6)),
        say.turn("c", parent="lost", shared=5, prompt=(7,)),
    ]
    end = say.end(calls=("a", "c"))
    sent = assemble_rollout("main", say.begin(), end, turns, group_members=1).turns
    assert [(turn.call_id, turn.parent, turn.shared) for turn in sent] == [("a", None, 0), ("c", "a", 3)]
    assert prompts(sent)["c"] == (1, 2, 3, 4, 5, 7)


def test_a_child_of_an_orphan_keeps_the_images_of_its_whole_prompt():
    cat, dog = make_image(1), make_image(2)
    first = make_turn("a", [1, 2], [3], placeholder=9)
    lost = make_turn("lost", [1, 2, 3, cat, 4, dog], [5], placeholder=9, parent=first)
    child = make_turn("c", [1, 2, 3, cat, 4, 6, dog], [7], placeholder=9, parent=lost, shared=8)
    alone = make_turn("c", [1, 2, 3, cat, 4, 6, dog], [7], placeholder=9, parent=first)
    begin = EpisodeBegin(
        run="run", episode_id="e1", slot=Slot(task_id="t"), kind="k", group_size=1, policies=("main",), client_id="c"
    )
    end = EpisodeEnd(run="run", episode_id="e1", status="finished", rewards={"main": 1.0}, calls=("a", "c"))
    assert assemble_rollout("main", begin, end, [first, lost, child], group_members=1).turns == (first, alone)


def routes(turns):
    """Experts of every token of every turn but the last, by following parents."""
    by_id = {turn.call_id: turn for turn in turns}

    def route(turn):
        above = route(by_id[turn.parent]) if turn.parent is not None else b""
        return above[: max(turn.shared, 1) - 1] + turn.routed_experts

    return {turn.call_id: route(turn) for turn in turns}


@st.composite
def forests(draw):
    """Turns with any parents among the earlier ones, any overlap, two policies, any set of named calls, and experts of their own."""
    turns = []
    lengths = {}
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *lengths]))
        shared = draw(st.integers(0, lengths[parent])) if parent else 0
        prompt = draw(st.lists(st.integers(0, 99), max_size=4))
        sampled = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        name = f"c{number}"
        lengths[name] = shared + len(prompt) + len(sampled)
        rows = lengths[name] - max(shared, 1)
        turns.append(
            Turn(
                run="r",
                episode_id="e",
                policy=draw(st.sampled_from(["main", "aux"])),
                call_id=name,
                request_id=name,
                request_digest=draw(st.sampled_from(["", "d", "f"])),
                retry=draw(st.integers(0, 2)),
                parent=parent,
                shared=shared,
                prompt_ids=array("i", prompt).tobytes(),
                sampled_ids=array("i", sampled).tobytes(),
                logprobs=array("f", [-1.0] * len(sampled)).tobytes(),
                routed_experts=bytes(draw(st.lists(st.integers(0, 255), min_size=rows, max_size=rows))),
            )
        )
    named = draw(st.none() | st.lists(st.sampled_from(list(lengths)), unique=True).map(tuple))
    return turns, named


@given(forests())
def test_whatever_is_left_out_the_rest_resolves_to_the_same_prompts_and_experts(forest):
    turns, named = forest
    begin = EpisodeBegin(
        run="r", episode_id="e", slot=Slot(task_id="t"), kind="k", group_size=1, policies=("main",), client_id="c"
    )
    end = EpisodeEnd(run="r", episode_id="e", status="finished", rewards={"main": 1.0}, calls=named)
    whole = prompts(turns)
    sent = assemble_rollout("main", begin, end, turns, group_members=1).turns
    assert [turn.call_id for turn in sent] == [
        turn.call_id for turn in turns if turn.call_id in kept(turns, named) and turn.policy == "main"
    ]
    assert prompts(sent) == {turn.call_id: whole[turn.call_id] for turn in sent}
    routed = routes(turns)
    assert routes(sent) == {turn.call_id: routed[turn.call_id] for turn in sent}


@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_missing_link_is_a_flaw(say, missing):
    turns = [say.turn("a"), say.turn("b", parent="a", shared=3), say.turn("c", parent="b", shared=3)]
    calls = {turn.call_id: TurnMeta.of(turn, 0) for turn in turns if turn.call_id != missing}
    assert find_flaw(calls, {"c"}) == "incomplete"


def test_a_long_conversation_is_checked_in_no_time(say):
    calls = {}
    for number in range(3000):
        parent = f"c{number - 1}" if number else None
        turn = say.turn(f"c{number}", parent=parent, shared=3 * number)
        calls[turn.call_id] = TurnMeta.of(turn, 10)
    assert find_flaw(calls, calls.keys()) is None
    assert fits_message(calls, calls.keys(), 0)


def test_a_turn_that_may_get_its_ancestors_experts_is_counted_with_them(say):
    lost = say.turn("a", prompt=(1,) * 30_000, routed_experts=b"\0" * 128 * 30_000)
    turn = say.turn("b", parent="a", shared=30_000, routed_experts=b"\0" * 128 * 3)
    calls = {"a": TurnMeta.of(lost, 4_000_000), "b": TurnMeta.of(turn, 1000)}
    assert fits_message(calls, {"b"}, 0)
    calls["b"] = TurnMeta.of(turn, 5_000_000)
    assert not fits_message(calls, {"b"}, 0)
