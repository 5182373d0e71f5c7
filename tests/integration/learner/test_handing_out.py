"""What rank 0 loads and hands out is on every rank what that rank would have loaded itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import models as families

from support import handed_out
from support.forks import CONFIGS, INHERENTLY_SEQUENTIAL, SHARED, make_model
from support.launch import launch

RANKS = 3
"""Which divide no size of a weight."""


def make_router(folder: Path) -> Path:
    """Its layers have buffers that are saved like weights."""
    config = families.glm4_moe.Glm4MoeConfig(
        **SHARED, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
    )
    lm = families.glm4_moe.Glm4MoeForCausalLM(config)
    biases = [buffer for name, buffer in lm.named_buffers() if "bias" in name]
    assert biases
    for number, bias in enumerate(biases):
        bias.fill_(0.01 * number)
    lm.save_pretrained(folder)
    return folder


def make_untied(folder: Path) -> Path:
    """Its config ties embeddings and head, and its file has another head."""
    lm = make_model("mistral")
    lm.save_pretrained(folder)
    lm.config.tie_word_embeddings = True
    lm.config.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_models_of_all_kinds_come_together_again_as_they_were_loaded(tmp_path: Path) -> None:
    folders = [make_router(tmp_path / "router"), make_untied(tmp_path / "untied")]
    for name in CONFIGS | INHERENTLY_SEQUENTIAL:
        make_model(name).save_pretrained(tmp_path / name)
        folders.append(tmp_path / name)
    launch(RANKS, handed_out.__file__, *map(str, folders))
