"""Several optimizer steps per batch: every episode in exactly one, and the later ones corrected for the earlier."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from support.episodes import make_group
from swarmq.config import Loss, Train
from swarmq.learner.algorithms.advantages import advantages
from swarmq.learner.records import BatchRecord, Index
from swarmq.learner.steps import merged, parts_of
from swarmq.learner.trainer import Trainer

GROUPS = [make_group(name, (0.0, 1.0), turns=2) for name in "abc"]
BATCH = tuple(episode for group in GROUPS for episode in group)
TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-2, warmup_steps=0, loss=Loss(name="reinforce"))


def record(train: Train, episodes=BATCH, version: int = 1) -> BatchRecord:
    return BatchRecord(
        index=Index(record=version, version=version, trained=tuple(e.episode_id for e in episodes)),
        episodes=episodes,
        settings=train,
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_every_episode_is_in_one_step_and_groups_stay_whole(steps: int) -> None:
    parts = parts_of(BATCH, steps)
    assert tuple(e for part in parts for e in part) == BATCH
    assert len(parts) == min(steps, 3)
    assert all(len({e.group_id for e in part}) * 2 == len(part) for part in parts)


def test_figures_add_up_or_are_weighted_by_tokens() -> None:
    steps = [
        {"tokens_trained": 10, "entropy": 1.0, "layout": "rows", "skipped": "nothing_left"},
        {"tokens_trained": 30, "entropy": 2.0, "layout": "tree"},
    ]
    assert merged(steps) == {
        "tokens_trained": 40, "entropy": 1.75, "layout": "tree", "skipped": "nothing_left", "optimizer_steps": 2,
    }  # fmt: skip


def test_a_batch_in_steps_is_its_parts_one_after_another_with_the_proximal_correction(tiny_qwen: Path) -> None:
    """By hand: each part a batch of its own, whose mu is the first weights', weighted by min(prox / mu, C)."""
    train = msgspec.structs.replace(TRAIN, steps_per_batch=3, advantage="batch_norm")
    ours = Trainer(str(tiny_qwen), train)
    fields = ours.step(record(train))
    assert fields["optimizer_steps"] == 3
    theirs = Trainer(str(tiny_qwen), train)
    credit = advantages(GROUPS, train)
    from swarmq.learner.passes import totals, work_of
    from swarmq.learner.tree import Placed

    works = [work_of(tuple(group), train, theirs.engine, credit=credit) for group in GROUPS]
    with torch.no_grad():
        prox = [[theirs.model(Placed.of(p.layout, torch.device("cpu")), torch.from_numpy(p.temperatures)).logprobs for p in w.passes] for w in works]  # fmt: skip
    for number, (group, work) in enumerate(zip(GROUPS, works, strict=True)):
        total = totals(group).of("token")
        for one, first in zip(work.passes, prox[number], strict=True):
            theta = theirs.model(
                Placed.of(one.layout, torch.device("cpu")), torch.from_numpy(one.temperatures)
            ).logprobs
            mu, a = torch.from_numpy(one.layout.logprobs), torch.from_numpy(one.advantages)
            before = theta.detach() if number == 0 else first
            weight = (before - mu).exp().clamp(max=20) * (theta.detach() - before).exp().clamp(max=20)
            ((-weight * a * theta).sum() / total).backward()
        theirs._update(train, 1, anything=True)
    for (name, a), (_, b) in zip(ours.lm.named_parameters(), theirs.lm.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=name)


def test_the_correction_tells_later_steps_from_a_new_batch(tiny_qwen: Path) -> None:
    """With ppo_clip the ratio is held to the batch's own first weights, wherever the engine was."""
    train = msgspec.structs.replace(TRAIN, loss=Loss(name="ppo_clip"), steps_per_batch=3)
    assert Trainer(str(tiny_qwen), train).step(record(train))["clipped_positive"] < 1
    trainer = Trainer(str(tiny_qwen), train)
    trainer.step(record(train))
    assert trainer._proximal is None, "nothing of a batch is left for the next"


def test_a_reference_or_teacher_of_another_vocabulary_is_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from swarmq.errors import LearnerError

    small = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16)  # fmt: skip
    Qwen3ForCausalLM(small).save_pretrained(tmp_path)
    with pytest.raises(LearnerError, match=r"train.teacher: .* knows 64 tokens, the policy 128"):
        Trainer(str(tiny_qwen), Train(loss=Loss(name="distill"), teacher=str(tmp_path), gradient_checkpointing=False))


def test_distillation_moves_the_policy_towards_its_teacher(tiny_qwen: Path, other_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, loss=Loss(name="distill"), teacher=str(other_qwen), learning_rate=3e-3)
    trainer = Trainer(str(tiny_qwen), train)
    from swarmq.learner.passes import work_of

    def distance() -> float:
        (one,) = work_of(BATCH, train, trainer.engine).passes
        ours = trainer._logprobs(work_of(BATCH, train, trainer.engine))[0]
        from swarmq.learner.tree import Placed

        theirs = trainer.frozen.of(train)["teacher"].logprobs(
            Placed.of(one.layout, torch.device("cpu")), torch.from_numpy(one.temperatures)
        )
        return float((theirs - ours).abs().mean())

    before = distance()
    for version in range(1, 9):
        trainer.step(record(train, version=version))
    assert distance() < before
