"""Attention in batches sees exactly what the definition says, however nodes are cut and grouped."""

import numpy as np
import pytest
import torch

from swarmq.learner.model.batched_attention import MAX_PADDING_RATIO, build_batches
from swarmq.learner.model.layout_attention import Visibility
from swarmq.timeline import PrefixTree, plan_rows
from swarmq.timeline.layout import build_mask

CPU = torch.device("cpu")


def laid(way, make_group):
    group = make_group(seed=3, episodes=4, turns=9)
    (layout,) = PrefixTree(group).layouts(5000) if way == "tree" else plan_rows(group, 5000)
    return layout


def batches(layout, window, **sizes):
    visibility = Visibility(layout, CPU, compiled=False)
    return build_batches(visibility.nodes, visibility.paths, window, CPU, **sizes)


def seen(made, size):
    """[size, size] which keys the answer of each token is made from."""
    rows = []
    for queries, keys, mask in made.batches:
        causal = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool).tril()
        for i, of_node in enumerate((causal if mask is None else mask[:, 0]).expand(len(queries), -1, -1)):
            for row in of_node:
                rows.append(np.zeros(size, bool))
                rows[-1][keys[i][row].numpy()] = True
    return np.stack(rows)[made.answers.numpy()]


@pytest.mark.parametrize("way", ["rows", "tree"])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("piece", [2, 512])
@pytest.mark.parametrize("worthwhile", [0, 1 << 16])
def test_every_token_sees_its_ancestors_and_nothing_else(make_group, way, window, piece, worthwhile):
    layout = laid(way, make_group)
    made = batches(layout, window, piece_queries=piece, min_batch_pairs=worthwhile)
    assert np.array_equal(seen(made, layout.num_tokens), build_mask(layout, window))


def test_packed_rows_need_no_mask(make_group):
    assert all(batch.mask is None for batch in batches(laid("rows", make_group), None).batches)


@pytest.mark.parametrize("way", ["rows", "tree"])
def test_little_is_padded_where_it_would_cost(make_group, way):
    layout = laid(way, make_group)
    made = batches(layout, None, min_batch_pairs=0).batches
    padded = sum(batch.queries.numel() * batch.keys.shape[1] for batch in made)
    each = Visibility(layout, CPU, compiled=False)
    real = sum((b - a) * sum(y - x for x, y in path) for (a, b), path in zip(each.nodes, each.paths, strict=True))
    assert real <= padded <= MAX_PADDING_RATIO * real
    assert len(made) < len(each.nodes) / 2


def test_no_mask_grows_with_the_square_of_a_long_node():
    made = build_batches([(0, 100), (100, 200)], [[(0, 100)], [(0, 200)]], None, CPU, piece_queries=8)
    assert all(batch.queries.shape[1] <= 8 for batch in made.batches if batch.mask is not None)
