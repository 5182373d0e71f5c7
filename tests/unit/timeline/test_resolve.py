import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.errors import TimelineError
from swarmq.messages import pack_floats, unpack_ids
from swarmq.timeline import resolve


def whole(turns, turn):
    """A turn's prompt, by the definition."""
    if turn.parent is None:
        return list(unpack_ids(turn.prompt_ids))
    parent = next(t for t in turns if t.call_id == turn.parent)
    full = whole(turns, parent) + list(unpack_ids(parent.sampled_ids))
    return full[: turn.shared] + list(unpack_ids(turn.prompt_ids))


@given(data=st.data())
def test_every_turn_gets_its_whole_prompt_back(episodes, data):
    turns = data.draw(episodes())
    for turn, resolved in zip(turns, resolve(turns), strict=True):
        assert resolved.prompt_ids.tolist() == whole(turns, turn)
        assert resolved.sampled_ids.tolist() == list(unpack_ids(turn.sampled_ids))
        assert pack_floats(resolved.logprobs.tolist()) == turn.logprobs
        expected = np.zeros(len(resolved.sampled_ids))
        for span in turn.versions:
            expected[span.start : span.end] = span.version
        assert resolved.versions.tolist() == expected.tolist()


@given(data=st.data())
def test_the_order_of_turns_does_not_matter(episodes, data):
    turns = data.draw(episodes())
    order = data.draw(st.permutations(range(len(turns))))
    straight, shuffled = resolve(turns), resolve([turns[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place].token_ids.tolist() == straight[i].token_ids.tolist()


def test_a_growing_chat_is_one_buffer(make_turn):
    turns = [make_turn(0, [1, 2], [3])]
    turns += [make_turn(i, [4], [5], parent=i - 1, shared=1 + 2 * i) for i in range(1, 50)]
    resolved = resolve(turns)
    assert all(np.shares_memory(resolved[0].token_ids, later.token_ids) for later in resolved[1:])


def test_a_fork_does_not_disturb_its_siblings(make_turn):
    turns = [make_turn(0, [1], [2]), *(make_turn(i, [10 + i], [20 + i], parent=0, shared=2) for i in (1, 2, 3))]
    assert [turn.token_ids.tolist() for turn in resolve(turns)[1:]] == [[1, 2, 10 + i, 20 + i] for i in (1, 2, 3)]


def test_an_engine_that_reports_no_versions_serves_the_initial_weights(make_turn):
    assert resolve([make_turn(0, [1], [2, 3])])[0].versions.tolist() == [0, 0]


BAD = {
    "duplicate_call": lambda t: [t(0, [1], [2]), t(0, [1], [3])],
    "parent_unknown": lambda t: [t(0, [1], [2], parent=9, shared=1)],
    "parent_cycle": lambda t: [t(0, [1], [2], parent=1, shared=1), t(1, [1], [2], parent=0, shared=1)],
    "shared_beyond_parent": lambda t: [t(0, [1], [2]), t(1, [1], [2], parent=0, shared=3)],
    "empty_prompt": lambda t: [t(0, [], [2])],
    "nothing_sampled": lambda t: [t(0, [1], [])],
    "over_budget": lambda t: [t(0, [1] * 9, [2] * 8)],
    "id_outside_vocabulary": lambda t: [t(0, [1], [2, 100])],
    "logprob_missing": lambda t: [t(0, [1], [2, 3], logprobs=[-1.0])],
    "logprob_not_finite": lambda t: [t(0, [1], [2, 3], logprobs=[-1.0, float("nan")])],
    "version_missing": lambda t: [t(0, [1], [2, 3], versions=[(4, 0, 1)])],
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_turns_are_refused_with_a_reason_to_count_by(make_turn, reason):
    with pytest.raises(TimelineError) as refusal:
        resolve(BAD[reason](make_turn), vocab_size=100, max_length=16)
    assert refusal.value.reason == reason
    assert "turn c" in str(refusal.value)


@pytest.mark.parametrize("wrong", [-1, 100])
def test_a_prompt_token_outside_the_vocabulary_is_refused_too(make_turn, wrong):
    with pytest.raises(TimelineError, match=f"token id {wrong} "):
        resolve([make_turn(0, [1, wrong], [2])], vocab_size=100)
