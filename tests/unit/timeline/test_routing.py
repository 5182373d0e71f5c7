"""Every sampled token is computed with the experts of its own turn, however turns share their tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.episodes import make_routed_turn
from swarmq.errors import TimelineError
from swarmq.timeline import Cost, FoldedEpisodes, pad_rows, plan_layouts, resolve
from swarmq.timeline.layout import build_mask

COST = Cost(token=1.0, pair=0.0)


@st.composite
def groups(draw):
    """Episodes with few different tokens and experts, so that turns often share tokens and often differ in experts."""
    episodes = []
    for _ in range(draw(st.integers(1, 3))):
        turns, lengths = [], {}
        for number in range(draw(st.integers(1, 4))):
            parent = draw(st.sampled_from([None, *lengths]))
            shared = draw(st.integers(0, lengths[parent])) if parent else 0
            prompt = draw(st.lists(st.integers(0, 1), min_size=0 if shared else 1, max_size=3))
            sampled = draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
            length = shared + len(prompt) + len(sampled)
            rows = 2 * (length - max(shared, 1))
            routed = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=rows, max_size=rows))
            turns.append(make_routed_turn(number, prompt, sampled, routed, parent=parent, shared=shared))
            lengths[f"c{number}"] = length
        episodes.append(turns)
    return episodes


def contexts(layouts):
    """(episode, turn, index among its sampled tokens) -> the tokens before it and their experts, read off the attention mask."""
    found = {}
    for layout in layouts:
        sees = build_mask(layout)
        for s in range(layout.num_trained):
            path = np.flatnonzero(sees[layout.predictors[s]])
            place = (int(layout.episodes[s]), int(layout.turns[s]), int(layout.offsets[s]))
            assert place not in found
            found[place] = layout.token_ids[path].tolist(), layout.routing[path].tolist(), int(layout.targets[s])
    return found


@pytest.mark.parametrize("way", ["rows", "tree"])
@given(group=groups())
def test_a_sampled_token_sees_its_own_turn_s_tokens_and_experts(way, group):
    resolved = [resolve(turns, routing=True) for turns in group]
    expected = {
        (e, t, k): (turn.token_ids[:at].tolist(), turn.routing[:at].tolist(), int(turn.token_ids[at]))
        for e, turns in enumerate(resolved)
        for t, turn in enumerate(turns)
        for k, at in enumerate(range(turn.prompt_length, len(turn)))
    }
    assert contexts(plan_layouts(FoldedEpisodes(resolved), 1000, cost=COST, only=way).layouts) == expected


def test_branches_share_a_prefix_as_far_as_their_experts_are_equal():
    prompt, one, other = [1, 2, 3, 4], [5, 5, 5, 5], [5, 5, 6, 5]
    alike = [[make_routed_turn(0, prompt, [7], one)], [make_routed_turn(0, prompt, [8], one)]]
    apart = [[make_routed_turn(0, prompt, [7], one)], [make_routed_turn(0, prompt, [8], other)]]
    tokens = [
        plan_layouts(FoldedEpisodes([resolve(t, routing=True) for t in group]), 100, cost=COST, only="tree").tokens
        for group in (alike, apart)
    ]
    assert tokens == [4 + 2, 4 + 1 + 2 + 1], (
        "the third token has other experts, so it and the tokens after it are computed twice"
    )


def test_a_continued_turn_is_one_row_with_the_experts_of_its_last_token():
    first = make_routed_turn(0, [1, 2], [3], [10, 20])
    second = make_routed_turn(1, [4], [5], [30, 40], parent="c0", shared=3)
    resolved = [resolve([first, second], routing=True)]
    [layout] = plan_layouts(FoldedEpisodes(resolved), 100, cost=COST, only="rows").layouts
    assert layout.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert layout.routing[:-1, 0].tolist() == [10, 20, 30, 40]
    assert pad_rows(layout, 3).routing.shape == (7, 1)


@pytest.mark.parametrize("lacking", [b"", b"12"])
def test_a_turn_without_all_of_its_experts_cannot_be_resolved(lacking):
    good = make_routed_turn(0, [1, 2], [3], [10, 20])
    bad = msgspec.structs.replace(make_routed_turn(1, [1, 2, 3], [3], []), routed_experts=lacking)
    with pytest.raises(TimelineError, match="c1.*routed experts for 3 tokens") as error:
        resolve([good, bad], routing=True)
    assert error.value.reason == "routing_missing"
    assert [turn.routing for turn in resolve([good, bad])] == [None, None], "without replay they are not needed"
