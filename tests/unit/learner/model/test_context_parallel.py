"""How ranks cut a pass: every token once, each rank as much to see, and nobody sees anything else than before."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.forks import make_group
from swarmq.learner.model.attention_check import RecordingVisibility, attend_as_ranks
from swarmq.learner.model.context_parallel import ALONE, ContextGroup, _to_layout_order, _to_rank_order, cut_for_rank
from swarmq.learner.model.layout_attention import BLOCK, LENGTHS, Visibility
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import PrefixTree, lay_rows, make_resolved_turn, plan_rows, unfold
from swarmq.timeline.layout import build_mask

CPU = torch.device("cpu")
RANKS = [2, 3, 4, 8]


def parts_of(layout, ranks, block=1):
    return [cut_for_rank(layout, ContextGroup(ranks, rank), block=block) for rank in range(ranks)]


def layouts(seed, turns=5):
    group = make_group(seed, turns=turns)
    return [*PrefixTree(group).layouts(400), *plan_rows(group, 400)]


def one_row(length):
    return lay_rows([(0, row) for row in unfold([make_resolved_turn([1] * (length - 1), [2], [0.0])])])


@given(seed=st.integers(0, 50), ranks=st.sampled_from(RANKS), block=st.sampled_from([1, 16, BLOCK]))
def test_every_token_is_computed_and_scored_once(seed, ranks, block):
    for layout in layouts(seed):
        parts = parts_of(layout, ranks, block)
        whole = parts[0].layout
        assert whole.num_tokens % (2 * ranks * block) == 0
        assert 0 <= whole.num_tokens - layout.num_tokens < 2 * ranks * block
        assert sorted(np.concatenate([part.tokens for part in parts])) == list(range(whole.num_tokens))
        assert len({len(part.tokens) for part in parts}) == 1
        assert sorted(np.concatenate([part.sampled for part in parts])) == list(range(layout.num_trained))
        for part in parts:
            assert (np.diff(part.tokens) > 0).all()
            assert (part.tokens.reshape(-1, block) - part.tokens[::block, None] == np.arange(block)).all()
            assert (part.tokens[part.predictors] == layout.predictors[part.sampled]).all()
            assert (part.targets == layout.targets[part.sampled]).all()
            real = part.tokens < layout.num_tokens
            assert (part.token_ids[real] == layout.token_ids[part.tokens[real]]).all()
            assert (part.positions[real] == layout.positions[part.tokens[real]]).all()


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_have_as_much_to_see_as_each_other(ranks):
    layout = one_row(6000)
    seen = [int((part.positions + 1).sum()) for part in parts_of(layout, ranks)]
    assert max(seen) < 1.01 * min(seen)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_and_masks_are_those_of_the_layout(ranks, window):
    for layout in layouts(seed=3, turns=30):
        whole = parts_of(layout, ranks, BLOCK)[0].layout
        allowed = build_mask(whole, window)
        found = []
        for part in parts_of(layout, ranks, BLOCK):
            context = ContextGroup(ranks, len(found))
            visibility = Visibility(layout, CPU, compiled=True, part=part, context=context)
            seen = dense(visibility.block_mask(window))
            queries, keys = len(part.tokens), whole.num_tokens
            assert seen.shape == (visibility.padded_queries, visibility.padded_length)
            assert (seen[:queries, :keys] == allowed[part.tokens]).all()
            assert not seen[queries:].any()
            assert not seen[:, keys:].any()
            found.append(seen[:queries, :keys].sum())
        assert sum(found) == allowed.sum()


def dense(mask):
    """[queries, keys] who is seen, as the kernel goes by blocks."""
    queries, keys = (length // BLOCK for length in mask.seq_lengths)
    q, k = torch.arange(queries * BLOCK)[:, None], torch.arange(keys * BLOCK)[None, :]
    sees = mask.mask_mod(None, None, q, k).view(queries, BLOCK, keys, BLOCK)
    seen = torch.zeros(queries, BLOCK, keys, BLOCK, dtype=torch.bool)
    for row in range(queries):
        for number, blocks, whole in (
            (mask.kv_num_blocks, mask.kv_indices, False),
            (mask.full_kv_num_blocks, mask.full_kv_indices, True),
        ):
            for column in blocks[0, 0, row, : number[0, 0, row]].tolist():
                seen[row, :, column] = True if whole else sees[row, :, column]
    return seen.view(queries * BLOCK, keys * BLOCK).numpy()


@pytest.mark.parametrize("ranks", RANKS)
def test_there_is_one_kernel_for_each_length(ranks):
    """However a pass is cut."""
    shapes = {}
    for length in (100, 1000, 1025, 3000, 4096, 5000, 8192, 9000, 16384):
        layout, context = one_row(length), ContextGroup(ranks)
        part = cut_for_rank(layout, context, block=BLOCK)
        visibility = Visibility(layout, CPU, compiled=True, part=part, context=context)
        assert visibility.padded_length in LENGTHS
        assert len(part.tokens) <= visibility.padded_queries <= visibility.padded_length / ranks + BLOCK
        shapes.setdefault(visibility.padded_length, set()).add(visibility.padded_queries)
    assert {len(queries) for queries in shapes.values()} == {1}


def test_ranks_have_the_experts_of_their_own_tokens():
    for layout in layouts(seed=3)[:2]:
        routing = np.arange(1, layout.num_tokens + 1, dtype=np.uint16)[:, None].view(np.uint8)
        for part in parts_of(msgspec.structs.replace(layout, routing=routing), 2):
            expected = np.where(part.tokens < layout.num_tokens, part.tokens + 1, 0)
            assert part.routing.view(np.uint16)[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt-oss"])
def test_what_ranks_attend_to_together_is_what_one_does(make_model, name, ranks):
    """Windows, capped scores and sinks, with the gradients of all."""
    for layout in layouts(seed=5)[:2]:
        model, recorded = LayoutModel(make_model(name)), RecordingVisibility(layout, CPU)
        placed = PlacedLayout.of(layout, CPU)
        model(PlacedLayout(placed.input_ids, placed.position_ids, placed.predictors, placed.targets, recorded))
        alone = [Visibility(layout, CPU, compiled=False)]
        cut_up = [
            Visibility(layout, CPU, compiled=False, part=part, context=ContextGroup(ranks, rank))
            for rank, part in enumerate(parts_of(layout, ranks))
        ]
        for call in recorded.calls:
            inputs = [x.detach().requires_grad_() for x in call[:3]]
            outputs = [attend_as_ranks(*inputs, call.form, some) for some in (alone, cut_up)]
            gradients = [torch.autograd.grad(output.sin().sum(), inputs, retain_graph=True) for output in outputs]
            for ours, wanted in zip((outputs[1], *gradients[1]), (outputs[0], *gradients[0]), strict=True):
                torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, *RANKS])
def test_gathered_tokens_are_in_the_layouts_order_and_their_gradients_go_back_to_their_ranks(ranks):
    layout = one_row(4 * ranks)
    tokens = torch.randn(1, 3, 4 * ranks, 5)
    parts = torch.cat([tokens[:, :, part.tokens] for part in parts_of(layout, ranks)])
    assert torch.equal(_to_layout_order(parts), tokens)
    assert torch.equal(_to_rank_order(tokens, ranks), parts)
    assert _to_rank_order(tokens.bfloat16(), ranks).dtype == torch.float32


def test_one_rank_that_shares_nothing_exchanges_nothing():
    key, value = torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)
    assert all(a is b for a, b in zip(ALONE.gather(key, value), (key, value), strict=True))
    assert ALONE.reduce_min(3.0) == 3.0
    assert ALONE.run_on_first(lambda: 4) == 4
    assert ALONE.is_first
