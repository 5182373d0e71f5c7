"""Rows and trees against the oracle: every turn a row of its own, through the untouched model, in FP32."""

import numpy as np
import pytest
import torch

from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.timeline import PrefixTree, plan_rows

pytestmark = pytest.mark.slow

ARCHITECTURES = ["qwen3", "qwen2", "llama", "mistral", "gemma2", "gemma3", "gpt-oss", "cohere", "granite", "phi"]
TEMPERATURE = 0.8
BUDGET = 60
"""So small that trees are split and rows need several passes."""


def weight(episode, turn, offset):
    """Some fixed weight for every sampled token, as an advantage would be."""
    return float(np.sin(1 + 7 * episode + 3 * turn + offset))


def oracle(model, group):
    logprobs = {}
    for e, turns in enumerate(group):
        for t, turn in enumerate(turns):
            ids = torch.tensor(turn.token_ids.tolist())[None]
            chosen = (model(input_ids=ids, use_cache=False).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
            for offset in range(len(turn.sampled_ids)):
                at = turn.prompt_length + offset
                logprobs[e, t, offset] = chosen[at - 1, ids[0, at]]
    whole = gradient(model, sum(weight(*key) * value for key, value in logprobs.items()))
    return {key: value.item() for key, value in logprobs.items()}, whole


def computed(model, layouts):
    logprobs, loss = {}, 0.0
    for layout in layouts:
        scored = model(PlacedLayout.of(layout, torch.device("cpu")), TEMPERATURE).logprobs
        keys = list(zip(layout.episodes.tolist(), layout.turns.tolist(), layout.offsets.tolist(), strict=True))
        logprobs.update(zip(keys, scored.tolist(), strict=True))
        loss += (scored * torch.tensor([weight(*key) for key in keys])).sum()
    return logprobs, gradient(model.model, loss)


def gradient(model, loss):
    loss.backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return whole


def passes(group, way):
    return PrefixTree(group).layouts(BUDGET) if way == "tree" else plan_rows(group, BUDGET)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("way", ["rows", "tree"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probabilities_and_gradient_are_the_oracles(make_model, make_group, name, way, checkpointing):
    group = make_group(seed=3)
    expected, expected_gradient = oracle(make_model(name), group)
    model = LayoutModel(make_model(name))
    assert model.rows_only is None
    assert model.head_apart
    if checkpointing:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got, got_gradient = computed(model, passes(group, way))
    assert got.keys() == expected.keys()
    assert max(abs(got[key] - expected[key]) for key in expected) < 1e-5
    assert (got_gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5


@pytest.mark.parametrize("seed", range(12))
def test_rows_and_trees_of_random_episodes_compute_what_the_oracle_does(make_model, make_group, seed):
    group = make_group(seed=seed, episodes=2, turns=8)
    expected, expected_gradient = oracle(make_model("mistral"), group)
    model = LayoutModel(make_model("mistral"))
    for way in ("rows", "tree"):
        got, got_gradient = computed(model, passes(group, way))
        assert max(abs(got[key] - expected[key]) for key in expected) < 1e-5
        assert (got_gradient - expected_gradient).norm() / expected_gradient.norm() < 1e-5


def test_the_tree_computes_less_than_the_rows_and_these_less_than_the_oracle(make_group):
    group = make_group(seed=3)
    tree, rows = (sum(layout.num_tokens for layout in passes(group, way)) for way in ("tree", "rows"))
    assert tree < rows < sum(len(turn) for turns in group for turn in turns)
