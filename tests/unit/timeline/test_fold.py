import functools
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.timeline import fold, make_resolved_turn, resolve, unfold
from swarmq.timeline.trie import Trie

ways = pytest.mark.parametrize("way", [fold, unfold])


@ways
@given(data=st.data())
def test_every_sampled_token_is_trained_once_in_its_own_context(episodes, data, way):
    turns = resolve(data.draw(episodes()))
    seen = {}
    for row in way(turns):
        for at in np.flatnonzero(row.trained):
            turn = turns[row.turns[at]]
            offset = at - turn.prompt_length
            key = (row.turns[at], offset)
            assert key not in seen
            seen[key] = True
            assert row.token_ids[: at + 1].tolist() == turn.token_ids[: at + 1].tolist()
            assert row.logprobs[at] == turn.logprobs[offset]
            assert row.versions[at] == turn.versions[offset]
    assert len(seen) == sum(len(turn.sampled_ids) for turn in turns)


@ways
@given(data=st.data())
def test_what_is_not_trained_carries_nothing(episodes, data, way):
    for row in way(resolve(data.draw(episodes()))):
        idle = ~row.trained
        assert not row.logprobs[idle].any()
        assert (row.versions[idle] == -1).all()
        assert (row.turns[idle] == -1).all()
        assert row.trained[-1]


@given(data=st.data())
def test_rows_are_the_fewest_and_of_the_fewest_tokens(episodes, data):
    turns = resolve(data.draw(episodes(max_turns=6, vocab=2)))
    rows = fold(turns)
    assert (len(rows), sum(len(row) for row in rows)) == fewest_rows_and_tokens(turns)


@given(data=st.data())
def test_known_parents_only_save_comparisons(episodes, data):
    turns = resolve(data.draw(episodes()))
    plain = [make_resolved_turn(t.prompt_ids, t.sampled_ids, t.logprobs) for t in turns]
    assert [row.turns.tolist() for row in fold(turns)] == [row.turns.tolist() for row in fold(plain)]


def test_a_chat_that_grows_is_one_row():
    turns, history = [], [1, 2, 3]
    for i in range(20):
        turns.append(make_resolved_turn(history, [10 + i, 11 + i], [-1.0, -2.0]))
        history = [*history, 10 + i, 11 + i, 7]
    (row,) = fold(turns)
    assert row.trained.sum() == 40
    assert row.token_ids.tolist() == history[:-1]


def test_equal_samples_of_one_prompt_are_each_trained():
    turns = [make_resolved_turn([1, 2], [3, 4], [-1.0 - i] * 2) for i in range(3)]
    assert [row.logprobs.tolist() for row in fold(turns)] == [[0, 0, -1.0 - i, -1.0 - i] for i in range(3)]


def test_a_prompt_equal_to_what_a_turn_sampled_continues_it_whoever_wrote_it():
    turns = [make_resolved_turn([1], [2, 3], [-1.0, -1.0]), make_resolved_turn([1, 2, 3], [4], [-1.0])]
    assert len(fold(turns)) == 1


def test_a_prompt_that_drops_part_of_a_sample_does_not_continue_it():
    turns = [make_resolved_turn([1], [2, 3], [-1.0, -1.0]), make_resolved_turn([1, 2], [4], [-1.0])]
    assert len(fold(turns)) == 2


def test_a_million_tokens_fold_in_well_under_a_second(make_turn):
    """One chat of 1000 turns and a million tokens: half a billion if prompts were compared whole."""
    rng = np.random.default_rng(0)
    turns = [
        make_turn(
            i,
            rng.integers(0, 1000, 500).tolist(),
            rng.integers(0, 1000, 500).tolist(),
            parent=i - 1 if i else None,
            shared=1000 * i,
        )
        for i in range(1000)
    ]
    began = time.process_time()
    rows = fold(resolve(turns))
    assert time.process_time() - began < 1.0
    assert [len(row) for row in rows] == [1_000_000]


@pytest.mark.parametrize("stripped", [False, True], ids=["chat", "thoughts stripped"])
def test_early_forks_of_a_long_chain_are_found_without_walking_up_to_them(make_turn, stripped):
    """5000 turns, then 5000 that share the beginning alone but name the last turn as the one they continue."""
    rng = np.random.default_rng(0)
    size = 5000
    tokens = rng.integers(0, 1000, (4 * size, 5)).tolist()
    shared = [5 * i if stripped else 10 * i for i in range(size)] + [10] * size
    parents = [None, *range(size - 1), *[size - 1] * size]
    turns = resolve(
        [make_turn(i, tokens[2 * i], tokens[2 * i + 1], parent=parents[i], shared=shared[i]) for i in range(2 * size)]
    )
    began = time.process_time()
    trie = Trie()
    ends = trie.insert_turns(turns)
    assert time.process_time() - began < 1.0
    assert [trie.end(end) for end in ends] == [len(turn) for turn in turns]


def fewest_rows_and_tokens(turns):
    """By trying every way of letting turns continue one another: most continuations, then the longest continued."""
    follows = [
        [
            i
            for i in range(len(turns))
            if len(turns[i]) <= turn.prompt_length
            and turn.token_ids[: len(turns[i])].tolist() == turns[i].token_ids.tolist()
        ]
        for turn in turns
    ]

    @functools.cache
    def best(j, taken):
        if j == len(turns):
            return (0, 0)
        options = [best(j + 1, taken)]
        for i in follows[j]:
            if i not in taken:
                count, tokens = best(j + 1, taken | {i})
                options.append((count + 1, tokens + len(turns[i])))
        return max(options)

    joined, saved = best(0, frozenset())
    return len(turns) - joined, sum(len(turn) for turn in turns) - saved


def test_the_exhaustive_search_itself_is_right():
    turns = [
        make_resolved_turn([1], [2], [-1.0]),
        make_resolved_turn([1, 2, 3], [4], [-1.0]),
        make_resolved_turn([1, 2, 5], [6], [-1.0]),
    ]
    assert fewest_rows_and_tokens(turns) == (2, 8)
    for order in itertools.permutations(turns):
        assert len(fold(list(order))) == 2
