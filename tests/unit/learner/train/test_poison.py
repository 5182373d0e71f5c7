"""An episode with numbers that cannot be computed with costs its own place in a batch, not the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support.episodes import make_group
from swarmq.config import Train
from swarmq.learner.store.records import BatchIndex, BatchRecord, decode_record, encode_record
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, pack_floats

TRAIN = Train(warmup_steps=0, learning_rate=1e-2, token_log=False)
EMA = msgspec.structs.replace(TRAIN, advantage="ema")


def weights_after(
    model: Path, episodes: Sequence[Rollout], train: Train = TRAIN, **record: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Of one step from a batch that was written and read; and its figures."""
    trainer = Trainer(str(model), train)
    whole = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(episodes), settings=train, **record)
    fields = trainer.step(decode_record(encode_record(whole)))
    return torch.cat([p.detach().flatten() for p in trainer.lm.parameters()]), fields


def unlikely(episode: Rollout) -> dict[str, Any]:
    first, *rest = episode.turns
    return {"turns": (msgspec.structs.replace(first, logprobs=pack_floats([-9999.0] * first.num_sampled)), *rest)}


@pytest.mark.parametrize(
    "poison",
    [
        lambda _: {"reward": 1e39},
        lambda _: {"reward": 1e30},
        lambda _: {"call_rewards": {"c0": math.nan}},
        lambda _: {"agent_rewards": {"a": math.inf}},
        unlikely,
    ],
    ids=["overflow", "huge", "call not a number", "agent infinite", "impossible"],
)
def test_a_poisoned_episode_of_a_batch_log_leaves_the_others_their_step(poison: Any, tiny_qwen: Path) -> None:
    others = make_group("a", (0.0, 1.0, 3.0, 2.0))
    bad = msgspec.structs.replace(others[2], **poison(others[2]))
    wanted, plain = weights_after(tiny_qwen, [others[0], others[1], others[3]])
    got, fields = weights_after(tiny_qwen, [others[0], others[1], bad, others[3]])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)  # of steps of 1e-2
    assert (fields["episodes_left_out"], plain["episodes_left_out"]) == (1, 0)
    assert fields["tokens_trained"] == plain["tokens_trained"]
    assert "skipped" not in fields
    assert torch.equal(got, weights_after(tiny_qwen, [others[0], others[1], bad, others[3]])[0]), "no exact replay"


def test_a_batch_of_nothing_else_changes_nothing(tiny_qwen: Path) -> None:
    before = torch.cat([p.detach().flatten() for p in Trainer(str(tiny_qwen), TRAIN).lm.parameters()])
    got, fields = weights_after(tiny_qwen, make_group("a", (math.nan, 1e39)))
    assert torch.equal(got, before)
    assert (fields["episodes_left_out"], fields["skipped"]) == (2, "nothing_left")


@pytest.mark.parametrize("normalisation", ["token", "episode"])
def test_a_step_whose_gradient_is_not_finite_is_made_again_without_the_episodes_that_spoil_it(
    tiny_qwen: Path, normalisation: str
) -> None:
    """A baseline that a poisoned reward has spoilt, as in logs of earlier versions."""
    train = msgspec.structs.replace(EMA, normalisation=normalisation)
    good, bad = make_group("a", (0.0, 1.0), kind="good"), make_group("b", (0.0, 1.0), kind="bad")
    baselines = {"good": 0.25, "bad": math.nan}
    wanted, _ = weights_after(tiny_qwen, good, train, baselines=baselines)
    got, fields = weights_after(tiny_qwen, [*bad, *good], train, baselines=baselines)
    assert (fields["episodes_left_out"], "skipped" in fields) == (2, False)
    assert math.isfinite(fields["loss"])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)  # of steps of 1e-2
