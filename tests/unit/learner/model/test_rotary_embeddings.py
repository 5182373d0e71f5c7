"""Positions are turned by what the engine turns them by, whatever else is in a pass."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers import models as families

from support.forks import MIXED, SHARED
from swarmq.config import EngineSettings, Policy, Train
from swarmq.learner.model.context_parallel import ContextGroup, cut_for_rank
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.train.trainer import load_trainer
from swarmq.timeline import lay_rows, make_resolved_turn, plan_rows, unfold

CPU = torch.device("cpu")
ORIGINAL, MADE_FOR = 32, 128
THETA = {"rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
    **THETA,
}
SCALED = {"short_mscale": 1.1, "long_mscale": 1.3}
DEFAULT_SCALE = math.sqrt(1 + math.log(MADE_FOR / ORIGINAL) / math.log(ORIGINAL))
ROPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "phi3": (
        families.phi3.Phi3Config,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL, "tie_word_embeddings": False},
    ),
    "phimoe": (families.phimoe.PhimoeConfig, {"rope_parameters": LONGROPE | SCALED, "num_local_experts": 4}),
    "dynamic": (
        families.llama.LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}, "max_position_embeddings": ORIGINAL},
    ),
    "some layers": (
        families.gemma3.Gemma3TextConfig,
        {
            "layer_types": MIXED,
            "sliding_window": 100,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", **THETA},
                "full_attention": LONGROPE,
            },
        },
    ),
}


def make(name: str, **changed: Any) -> PreTrainedModel:
    family, special = copy.deepcopy(ROPES[name])
    torch.manual_seed(0)
    config = family(**(SHARED | {"max_position_embeddings": MADE_FOR} | special | changed))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def logprobs(model: LayoutModel, *lengths: int) -> torch.Tensor:
    """Of a pass with a row of each length, the first one's."""
    rows = [[make_resolved_turn([5 + n] * (length - 2), [3, 4], [-1.0] * 2)] for n, length in enumerate(lengths)]
    (layout,) = plan_rows(rows, budget=1000)
    with torch.no_grad():
        return model(PlacedLayout.of(layout, CPU)).logprobs[torch.from_numpy(layout.episodes == 0)]


def angles(model: PreTrainedModel, positions: torch.Tensor) -> torch.Tensor:
    """The cosines of each position, [T, D / 2]."""
    cosines: torch.Tensor = model.model.rotary_emb(torch.zeros(1), position_ids=positions[None])[0][0]
    return cosines[:, : cosines.shape[1] // 2]


@pytest.mark.parametrize("max_model_len", [ORIGINAL, None], ids=["short calls", "any calls"])
@pytest.mark.parametrize("name", ROPES)
def test_a_row_is_scored_alike_alone_and_beside_a_long_one(name: str, max_model_len: int | None) -> None:
    model = LayoutModel(make(name), max_model_len=max_model_len)
    assert model.rows_only is None
    assert torch.allclose(logprobs(model, 20), logprobs(model, 20, 100), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scales"), [("phi3", (DEFAULT_SCALE, DEFAULT_SCALE)), ("phimoe", (1.1, 1.3))], ids=["phi3", "phimoe"]
)
@pytest.mark.parametrize("max_model_len", [ORIGINAL, ORIGINAL + 1, 10 * MADE_FOR])
def test_longrope_turns_as_an_engine_with_that_much_room_does(
    name: str, scales: tuple[float, float], max_model_len: int
) -> None:
    """By vLLM's formula; it never looks at the length of a call."""
    lm = make(name)
    LayoutModel(lm, max_model_len=max_model_len)
    factors, scale = (
        (LONGROPE["short_factor"], scales[0]) if max_model_len == ORIGINAL else (LONGROPE["long_factor"], scales[1])
    )
    frequencies = 1 / (torch.tensor(factors) * 10000.0 ** (torch.arange(0, 8, 2) / 8))
    positions = torch.tensor([0, 1, 7, 100])
    expected = (positions[:, None] * frequencies).cos() * scale
    for few in (positions[:3], positions):
        torch.testing.assert_close(angles(lm, few), expected[: len(few)])


def test_a_model_made_for_no_more_than_its_first_length_has_short_rows_alone() -> None:
    some, all_ = (make("phi3", max_position_embeddings=ORIGINAL) for _ in range(2))
    LayoutModel(some, max_model_len=ORIGINAL)
    LayoutModel(all_, max_model_len=10 * ORIGINAL)
    assert torch.equal(angles(some, torch.arange(9)), angles(all_, torch.arange(9)))


@pytest.mark.parametrize("name", ROPES)
def test_ranks_that_compute_other_tokens_of_a_row_turn_them_alike(name: str) -> None:
    lm = make(name)
    LayoutModel(lm)
    kinds = {"layer_type": "full_attention"} if name == "some layers" else {}
    layout = lay_rows([(0, row) for row in unfold([make_resolved_turn([1] * 99, [2], [0.0])])])
    rotary = lm.model.rotary_emb
    whole = rotary(torch.zeros(1), position_ids=torch.arange(104)[None], **kinds)[0][0]
    for rank in range(2):
        positions = torch.from_numpy(cut_for_rank(layout, ContextGroup(2, rank)).positions.astype("int64"))
        assert torch.equal(rotary(torch.zeros(1), position_ids=positions[None], **kinds)[0][0], whole[positions])


def test_what_a_checkpoint_says_of_its_rotations_stays_as_it_was() -> None:
    lm = make("phi3")
    before = copy.deepcopy(lm.config.to_dict())
    LayoutModel(lm, max_model_len=MADE_FOR)
    assert lm.config.to_dict() == before


def test_a_learner_turns_by_the_room_that_its_engine_has(tmp_path: Any) -> None:
    make("phi3").save_pretrained(tmp_path)
    train = Train(gradient_checkpointing=False, token_log=False, trackers=())
    turned = [
        angles(
            load_trainer(None, Policy(model=str(tmp_path), train=train, engine=EngineSettings(max_model_len=room))).lm,
            torch.arange(9),
        )
        for room in (ORIGINAL, MADE_FOR)
    ]
    assert not torch.allclose(*turned)
