"""Whether what was recorded trains: a step of the real trainer on it, held against the engine token by token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.engine import KNOWN
from support.real_proxy import RealStage
from swarmq.config import Train
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Slot, Turn, unpack_floats
from swarmq.timeline import resolve

TRAIN = Train(gradient_checkpointing=False, advantage="ema", warmup_steps=0)
"""An advantage that an episode has without others to compare it with."""


async def train(stage: RealStage, model: Path, turns: Sequence[Turn]) -> None:
    """An episode of these turns trains, as in `train_episode`."""
    made = Rollout(
        run=stage.run,
        policy="main",
        episode_id=turns[0].episode_id,
        slot=Slot(task_id="t", repeat=0),
        kind="default",
        group_id="t/0",
        group_members=1,
        group_size=1,
        reward=1.0,
        turns=tuple(turns),
    )
    await train_episode(stage, model, made)


async def train_episode(stage: RealStage, model: Path, episode: Rollout) -> None:
    """Every sampled token is trained, with the log-probability that the engine gives it too."""
    turns = episode.turns
    record = BatchRecord(
        index=BatchIndex(record=1, version=1), episodes=(episode,), settings=TRAIN, baselines={episode.kind: 0.0}
    )
    trainer = Trainer(str(model), TRAIN)
    fields = await asyncio.to_thread(trainer.step, record)
    assert fields["tokens_trained"] == sum(len(turn.sampled_ids) // 4 for turn in turns)
    assert "skipped" not in fields
    assert math.isfinite(fields["loss"])
    assert fields["grad_norm"] > 0
    [seen] = trainer.token_traces
    trained = {one.call_id: unpack_floats(one.logprobs).tolist() for one in seen.turns}
    for turn, whole in zip(turns, resolve(turns), strict=True):
        scored = await _scores(stage, whole.token_ids.tolist(), whole.prompt_length)
        assert trained[turn.call_id] == pytest.approx(scored, abs=1e-3)
        for sampled, free in zip(unpack_floats(turn.logprobs), scored, strict=True):
            assert 0 >= sampled > free - 1e-3, "a grammar leaves less to choose from, so nothing gets less likely"


async def _scores(stage: RealStage, token_ids: list[int], prompt_length: int) -> list[float]:
    """The engine's own log-probabilities of the tokens after the prompt, without a grammar."""
    body = {"model": (await stage.engine.info()).model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
    async with stage.http.post(f"{stage.engine.url}/v1/completions", json=body, headers=KNOWN) as response:
        assert response.status == 200, await response.text()
        scores = (await response.json())["choices"][0]["prompt_logprobs"]
    return [scores[at][str(token_ids[at])]["logprob"] for at in range(prompt_length, len(token_ids))]
