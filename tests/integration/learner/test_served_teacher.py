"""A real vLLM as teacher: what it says of sampled tokens is what its model says in the learner's memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.engine import SECRET
from support.episodes import make_group
from support.tiny_model import tiny_model as make_tiny_model
from swarmq.config import Loss, Train
from swarmq.engine.client.tokenizer_compat import tokenize_with_all
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.teachers.availability import KEY_ENV
from swarmq.learner.teachers.tokenizer_checks import build_probe, encode_ids
from swarmq.learner.train.trainer import Trainer

pytestmark = pytest.mark.vllm

BATCH = tuple(make_group(turns=2))


def stepped(policy: Path, teacher: str, loss: Loss) -> dict[str, Any]:
    """The figures of a step."""
    train = Train(gradient_checkpointing=False, warmup_steps=0, loss=loss, teacher=teacher)
    index = BatchIndex(record=1, version=1, trained=tuple(episode.episode_id for episode in BATCH))
    return Trainer(str(policy), train).step(BatchRecord(index=index, episodes=BATCH, settings=train))


@pytest.mark.parametrize("top_k", [0, 8])
def test_an_engine_teaches_what_its_model_teaches_in_memory(
    engine_url: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    policy = make_tiny_model(seed=1)
    monkeypatch.setenv(KEY_ENV, SECRET)
    loss = Loss(name="distill", top_k=top_k)
    served, loaded = (stepped(policy, str(teacher), loss) for teacher in (engine_url, tiny_model))
    for figure in ("loss", "grad_norm"):
        assert served[figure] == pytest.approx(loaded[figure], rel=1e-3)
        assert abs(loaded[figure]) > 0.1, "with the policy as its own teacher it is 0"


def test_an_engine_s_ids_of_the_test_text_are_its_model_s(engine_url: str, tiny_model: Path) -> None:
    text = build_probe(str(tiny_model))
    assert asyncio.run(tokenize_with_all([engine_url], text, secret=SECRET)) == {
        engine_url: list(encode_ids(str(tiny_model), text) or ())
    }
