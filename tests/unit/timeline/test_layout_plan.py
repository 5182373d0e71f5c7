import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.timeline import Cost, FoldedEpisodes, make_resolved_turn, plan_layouts

PER_TOKEN = Cost(token=1.0, pair=0.0)


def chat(turns, prompt=50):
    history, made = list(range(prompt)), []
    for i in range(turns):
        made.append(make_resolved_turn(history, [100 + i] * 5, [-1.0] * 5))
        history = [*history, *[100 + i] * 5, 7, 8]
    return made


def test_a_linear_chat_keeps_packed_rows():
    assert plan_layouts(FoldedEpisodes([chat(5)]), 1000, cost=PER_TOKEN).way == "rows"


def test_a_group_with_a_shared_prompt_takes_the_tree_and_says_why():
    group = [[make_resolved_turn(range(200), [300 + e] * 5, [-1.0] * 5)] for e in range(8)]
    chosen = plan_layouts(FoldedEpisodes(group), 2000, cost=PER_TOKEN)
    assert chosen.way == "tree"
    assert chosen.tokens == 240
    assert chosen.tokens_unfolded == 1640
    assert "240 tokens where rows need 1640" in chosen.reason


@pytest.mark.parametrize("way", ["rows", "tree"])
def test_what_is_asked_for_is_taken_and_it_is_said_why(way):
    group = [[make_resolved_turn(range(200), [300 + e] * 5, [-1.0] * 5)] for e in range(8)]
    for episodes in (group, [chat(5)]):
        chosen = plan_layouts(FoldedEpisodes(episodes), 2000, cost=PER_TOKEN, only=way, because="asked for")
        assert (chosen.way, chosen.reason) == (way, "asked for")


def test_rows_may_go_into_smaller_passes_than_trees():
    rows, tree = [[make_resolved_turn(range(200), [300] * 5, [-1.0] * 5)]] * 8, [chat(9)] * 8
    assert [
        each.num_tokens
        for each in plan_layouts(FoldedEpisodes(rows), 2000, cost=PER_TOKEN, only="rows", row_pass=500).layouts
    ] == [410] * 4
    assert len(plan_layouts(FoldedEpisodes(rows), 2000, cost=PER_TOKEN, only="rows", row_pass=1).layouts) == 8
    assert len(plan_layouts(FoldedEpisodes(tree), 2000, cost=PER_TOKEN, row_pass=100).layouts) == 1


def test_a_tree_that_a_tight_budget_makes_no_cheaper_is_not_taken():
    group = [[make_resolved_turn(range(200), [300 + e] * 5, [-1.0] * 5)] for e in range(8)]
    assert plan_layouts(FoldedEpisodes(group), 205, cost=PER_TOKEN).way == "rows"


def test_layers_with_a_window_make_what_lies_far_behind_no_dearer():
    """A shared prompt is little of the work where everything is seen, and enough of it where attention ends soon."""
    group = [[make_resolved_turn(range(50), [300 + e] * 1000, [-1.0] * 1000)] for e in range(8)]
    assert plan_layouts(FoldedEpisodes(group), 10_000, cost=Cost(token=1.0, pair=1.0)).way == "rows"
    assert plan_layouts(FoldedEpisodes(group), 10_000, cost=Cost(token=1.0, pair=0.0, windowed={10: 1.0})).way == "tree"


def test_tokens_weigh_less_beside_attention_where_weights_are_not_trained():
    """Then a product is followed by one backward; those of attention by two, always."""
    group = [[make_resolved_turn(range(50), [300 + e] * 1000, [-1.0] * 1000)] for e in range(8)]
    for frozen, way in ((0.0, "tree"), (1.0, "rows")):
        cost = Cost(token=1.0, pair=0.00065, frozen=frozen)
        chosen = plan_layouts(FoldedEpisodes(group), 10_000, cost=cost)
        assert chosen.way == way
        assert cost.training(chosen.layouts) == pytest.approx(
            (3 - frozen) * chosen.tokens + 3 * cost.attention(chosen.layouts)
        )


def test_a_tree_has_to_save_more_where_rows_have_a_faster_attention():
    group = [[make_resolved_turn(range(100), [300 + e] * 900, [-1.0] * 900)] for e in range(8)]
    for slowdown, way in ((1.0, "tree"), (1.5, "rows")):
        cost = Cost(token=1.0, pair=0.002, tree_slowdown=slowdown)
        assert plan_layouts(FoldedEpisodes(group), 10_000, cost=cost).way == way


@given(data=st.data())
def test_whichever_way_the_same_tokens_are_trained(groups, data):
    batch = data.draw(groups())
    budget = max(len(turn) for turns in batch for turn in turns) + 20
    both = [plan_layouts(FoldedEpisodes(batch), budget, cost=PER_TOKEN, only=only) for only in (None, "rows")]
    assert trained(both[0]) == trained(both[1])
    assert both[0].tokens <= both[1].tokens <= both[1].tokens_unfolded


@pytest.mark.parametrize("way", ["rows", "tree"])
@given(data=st.data())
def test_what_was_folded_for_one_budget_does_for_another(groups, data, way):
    batch = data.draw(groups())
    longest = max(len(turn) for turns in batch for turn in turns)
    folded = FoldedEpisodes(batch)
    for budget in (longest + 20, longest):
        again, anew = (plan_layouts(each, budget, cost=PER_TOKEN, only=way) for each in (folded, FoldedEpisodes(batch)))
        assert trained(again) == trained(anew)
        assert [each.token_ids.tolist() for each in again.layouts] == [each.token_ids.tolist() for each in anew.layouts]


def trained(chosen):
    return sorted(
        row
        for each in chosen.layouts
        for row in np.stack(
            [each.episodes, each.turns, each.offsets, each.targets, each.versions, each.logprobs], axis=1
        ).tolist()
    )
