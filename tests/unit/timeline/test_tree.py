import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.errors import TimelineError
from swarmq.timeline import PrefixTree, make_resolved_turn, plan_rows, resolve
from swarmq.timeline.layout import build_mask, count_pairs, map_blocks


def contexts(layout):
    """What each token sees, in the order of positions."""
    seen = [np.flatnonzero(row) for row in build_mask(layout)]
    return [layout.token_ids[at[np.argsort(layout.positions[at])]].tolist() for at in seen]


def check(layouts, episodes):
    """Every sampled token is trained once, from its own context, with its own log-probability and version."""
    seen = set()
    for layout in layouts:
        sees = contexts(layout)
        for s, predictor in enumerate(layout.predictors):
            e, t, offset = int(layout.episodes[s]), int(layout.turns[s]), int(layout.offsets[s])
            turn = episodes[e][t]
            assert (e, t, offset) not in seen
            seen.add((e, t, offset))
            assert layout.targets[s] == turn.sampled_ids[offset]
            assert layout.logprobs[s] == turn.logprobs[offset]
            assert layout.versions[s] == turn.versions[offset]
            assert sees[predictor] == turn.token_ids[: turn.prompt_length + offset].tolist()
    assert len(seen) == sum(len(turn.sampled_ids) for turns in episodes for turn in turns)


@pytest.mark.parametrize("way", ["tree", "rows"])
@given(data=st.data())
def test_every_sampled_token_is_trained_once_in_its_own_context(groups, data, way):
    batch = data.draw(groups())
    longest = max(len(turn) for turns in batch for turn in turns)
    budget = longest + data.draw(st.integers(0, 60))
    layouts = PrefixTree(batch).layouts(budget) if way == "tree" else plan_rows(batch, budget)
    assert all(layout.num_tokens <= budget for layout in layouts)
    check(layouts, batch)


@given(data=st.data())
def test_one_unbounded_tree_computes_every_distinct_prefix_once(groups, data):
    batch = data.draw(groups())
    prefixes = {tuple(turn.token_ids[:n]) for turns in batch for turn in turns for n in range(1, len(turn) + 1)}
    tree = PrefixTree(batch)
    (layout,) = tree.layouts(budget=10_000)
    assert layout.num_tokens == tree.num_tokens == len(prefixes)


@given(data=st.data())
def test_positions_and_pairs_are_those_of_the_own_sequence(groups, data):
    (layout,) = PrefixTree(data.draw(groups())).layouts(budget=10_000)
    mask = build_mask(layout)
    assert (mask.sum(1) == layout.positions + 1).all()
    assert count_pairs(layout) == mask.sum()
    for window in (1, 3, 9):
        assert count_pairs(layout, window) == build_mask(layout, window).sum()


@given(data=st.data())
def test_a_turn_is_never_divided_over_passes(groups, data):
    batch = data.draw(groups())
    longest = max(len(turn) for turns in batch for turn in turns)
    homes = [
        {(e, t) for e, t in zip(layout.episodes.tolist(), layout.turns.tolist(), strict=True)}
        for layout in PrefixTree(batch).layouts(longest + 5)
    ]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(homes, 2))


def test_a_sequence_over_the_budget_is_an_error():
    with pytest.raises(TimelineError, match="has 4 tokens") as refusal:
        PrefixTree([[make_resolved_turn([1, 2], [3, 4], [-1, -1])]]).layouts(3)
    assert refusal.value.reason == "over_budget"


def test_a_group_computes_its_shared_prompt_once():
    prompt = list(range(100))
    group = [[make_resolved_turn(prompt, [200 + e, 1, 2], [-1] * 3)] for e in range(8)]
    (layout,) = PrefixTree(group).layouts(1000)
    assert layout.num_tokens == 100 + 8 * 3


def test_equal_samples_share_their_tokens_but_are_both_trained():
    turns = [make_resolved_turn([1, 2], [3, 4], [-1.0, -1.0]), make_resolved_turn([1, 2], [3, 4], [-2.0, -2.0])]
    (layout,) = PrefixTree([turns]).layouts(100)
    assert layout.num_tokens == 4
    assert layout.logprobs.tolist() == [-1, -1, -2, -2]
    assert layout.predictors.tolist() == [1, 2, 1, 2]


def test_an_empty_batch_needs_no_pass():
    assert PrefixTree([]).layouts(100) == plan_rows([], 100) == []


@given(data=st.data())
def test_block_maps_agree_with_the_definition(groups, data):
    (layout,) = PrefixTree(data.draw(groups())).layouts(budget=10_000)
    for window in (None, 1, 3, 9):
        allowed = build_mask(layout, window)
        for block in (1, 2, 4, 8):
            length = -(-layout.num_tokens // block) * block
            extra = np.arange(layout.num_tokens, length)
            exits = np.concatenate([layout.exits, extra + 1])
            positions = np.concatenate([layout.positions, 0 * extra])
            partly, wholly = map_blocks(exits, positions, block, window)
            mask = np.eye(length, dtype=bool)
            mask[: layout.num_tokens, : layout.num_tokens] = allowed
            blocks = mask.reshape(length // block, block, length // block, block)
            assert not (partly & wholly).any()
            assert (blocks.any((1, 3)) <= (partly | wholly)).all()
            assert (wholly <= blocks.all((1, 3))).all()
            if window is None:
                assert (blocks.any((1, 3)) == (partly | wholly)).all()


def test_resolved_turns_of_messages_make_the_same_tree_as_standalone_ones(make_turn):
    turns = resolve([make_turn(0, [1, 2], [3]), make_turn(1, [4], [5], parent=0, shared=2)])
    plain = [make_resolved_turn(t.prompt_ids, t.sampled_ids, t.logprobs) for t in turns]
    a, b = (PrefixTree([each]).layouts(100)[0] for each in (turns, plain))
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert a.exits.tolist() == b.exits.tolist()
