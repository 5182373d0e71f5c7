"""Replayed routing against plain transformers: a loop over sequences, with each router's choice replaced by the recorded experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation writes it

from support.episodes import make_routed_turn
from support.tiny_model import tiny_experts
from swarmq.errors import SetUpError
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.messages import Turn
from swarmq.timeline import Cost, FoldedEpisodes, ResolvedTurn, plan_layouts, resolve

CPU = torch.device("cpu")
LAYERS, CHOSEN, EXPERTS = 2, 2, 4


def make_turn(number, prompt, sampled, rng, *, parent=None, shared=0) -> Turn:
    """A turn whose tokens were routed at random, so in most cases to other experts than the router's."""
    rows = shared + len(prompt) + len(sampled) - max(shared, 1)
    routed = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (rows, LAYERS, 1)), axis=-1)[..., :CHOSEN]
    return make_routed_turn(number, prompt, sampled, routed.tobytes(), parent=parent, shared=shared)


@pytest.fixture(scope="module")
def episodes() -> list[list[ResolvedTurn]]:
    """Two episodes with the same prompt, routed alike in one of them and differently in the other; a continuation and a fork."""
    prompt, rng = list(range(10, 30)), np.random.default_rng(0)
    first = make_turn(0, prompt, [5, 6, 7], rng)
    more = make_turn(1, [8, 9], [4, 3], rng, parent="c0", shared=len(prompt) + 3)
    fork = make_turn(2, [11], [12, 13], rng, parent="c0", shared=len(prompt) - 4)
    other = make_turn(0, prompt, [5, 2], rng)
    return [resolve([first, more, fork], routing=True), resolve([other], routing=True)]


@contextmanager
def routed(network, experts: Sequence[torch.Tensor], *, normalised: bool) -> Iterator[None]:
    """The oracle: routers [layers] of plain transformers choose `experts` [T, chosen] and weigh them by their own logits."""

    def replace(own):
        def forward(hidden):
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            weights = torch.stack([logits.softmax(-1)[t, own[t]] for t in range(len(own))])
            return logits, weights / weights.sum(-1, keepdim=True) if normalised else weights, own

        router = network.model.layers[number].mlp.gate
        return forward

    routers = [layer.mlp.gate for layer in network.model.layers]
    for number, own in enumerate(experts):
        routers[number].forward = replace(own)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def loop(network, episodes, *, normalised: bool) -> tuple[dict[tuple[int, int, int], float], list[torch.Tensor]]:
    """Log-probability of every sampled token, and the gradient of a weighted sum, one sequence at a time."""
    network.zero_grad()
    found = {}
    for e, turns in enumerate(episodes):
        for t, turn in enumerate(turns):
            experts = torch.from_numpy(turn.routing.reshape(len(turn), LAYERS, CHOSEN)).long()
            with routed(network, experts.unbind(1), normalised=normalised):
                logits = network(torch.from_numpy(turn.token_ids)[None].long()).logits[0]
            logprobs = logits.log_softmax(-1)[torch.arange(len(turn) - 1), torch.from_numpy(turn.token_ids[1:]).long()]
            own = logprobs[turn.prompt_length - 1 :]
            sum(weigh(e, t, k) * value for k, value in enumerate(own)).backward()
            found |= {(e, t, k): float(value) for k, value in enumerate(own.detach())}
    return found, [p.grad.clone() for p in network.parameters()]


def weigh(episode: int, turn: int, offset: int) -> float:
    return 0.5 + ((7 * episode + 3 * turn + offset) % 5) / 3


def replay(model: LayoutModel, episodes, way: str):
    model.zero_grad()
    found = {}
    for layout in plan_layouts(FoldedEpisodes(episodes), 60, cost=Cost(token=1.0, pair=0.0), only=way).layouts:
        logprobs = model(PlacedLayout.of(layout, CPU)).logprobs
        places = list(zip(*(each.tolist() for each in (layout.episodes, layout.turns, layout.offsets)), strict=True))
        sum(weigh(*place) * value for place, value in zip(places, logprobs, strict=True)).backward()
        found |= dict(zip(places, logprobs.tolist(), strict=True))
    return found, [p.grad.clone() for p in model.model.parameters()]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", ["rows", "tree"])
def test_log_probabilities_and_gradient_are_those_of_a_loop_with_fixed_experts(way, checkpointing, episodes):
    source = str(tiny_experts("qwen3_moe"))
    expected, gradient = loop(load_lm(source, gradient_checkpointing=False), episodes, normalised=True)
    model = LayoutModel(load_lm(source, gradient_checkpointing=checkpointing), replays_routing=True)
    assert model.rows_only is None
    got, own = replay(model, episodes, way)
    assert got == pytest.approx(expected, abs=2e-5)
    for a, b in zip(own, gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    router = dict(zip(dict(model.model.named_parameters()), own, strict=True))["model.layers.0.mlp.gate.weight"]
    assert router.abs().max() > 1e-4, "the router learns"
    plain, _ = replay(LayoutModel(load_lm(source, gradient_checkpointing=False)), episodes, way)
    assert max(abs(plain[place] - expected[place]) for place in expected) > 0.01, "its own choice is another one"


@pytest.mark.parametrize(("family", "normalised"), [("olmoe", False), ("mixtral", True)])
def test_other_families_are_replayed_too(family, normalised, episodes):
    source = str(tiny_experts(family))
    expected, _ = loop(load_lm(source, gradient_checkpointing=False), episodes, normalised=normalised)
    got, _ = replay(LayoutModel(load_lm(source, gradient_checkpointing=False), replays_routing=True), episodes, "tree")
    assert got == pytest.approx(expected, abs=2e-5)


def test_rows_are_replayed_one_by_one(episodes):
    source = str(tiny_experts("qwen3_moe"))
    model = LayoutModel(load_lm(source, gradient_checkpointing=False), replays_routing=True)
    together, _ = replay(model, episodes, "rows")
    model.rows_only = "for this test"
    model._attend_with("sdpa")
    alone, _ = replay(model, episodes, "rows")
    assert alone == pytest.approx(together, abs=2e-5)


def test_ids_of_many_experts_take_two_bytes():
    shape = RoutingShape(layers=3, experts_per_token=2, experts=257)
    assert (shape.id_bytes, shape.token_bytes) == (2, 12)


def test_a_model_whose_routing_cannot_be_replayed_is_refused():
    with pytest.raises(SetUpError, match=r"train.routing_replay: .*'glm4_moe' cannot be replayed, only that of"):
        RoutingShape.of(load_lm(str(tiny_experts("glm4_moe")), gradient_checkpointing=False).config)
