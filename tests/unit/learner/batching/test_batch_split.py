"""Several optimizer steps per batch: every episode in exactly one, and the later ones corrected for the earlier.
Models that judge: the teacher of a distillation, the reference of a divergence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.episodes import make_group
from swarmq.config import Loss, Train
from swarmq.errors import LearnerError
from swarmq.learner.batching.batch_split import merge_metrics, split_groups
from swarmq.learner.batching.micro_batches import MicroBatch, build_rank_batch
from swarmq.learner.methods.credit import compute_advantages
from swarmq.learner.model.layout_model import PlacedLayout
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer

GROUPS = [make_group(name, (0.0, 1.0), turns=2) for name in "abc"]
BATCH = tuple(episode for group in GROUPS for episode in group)
CPU = torch.device("cpu")
TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-2, warmup_steps=0, loss=Loss(name="reinforce"))


def logprobs(trainer: Trainer, one: MicroBatch) -> torch.Tensor:
    return trainer.model(PlacedLayout.of(one.layout, CPU), torch.from_numpy(one.temperatures)).logprobs


def record(train: Train, version: int = 1) -> BatchRecord:
    index = BatchIndex(record=version, version=version, trained=tuple(e.episode_id for e in BATCH))
    return BatchRecord(index=index, episodes=BATCH, settings=train)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_every_episode_is_in_one_step_and_groups_stay_whole(steps: int) -> None:
    parts = split_groups(BATCH, steps)
    assert tuple(e for part in parts for e in part) == BATCH
    assert len(parts) == min(steps, 3)
    assert all(len({e.group_id for e in part}) * 2 == len(part) for part in parts)


def test_figures_add_up_or_are_weighted_by_tokens() -> None:
    steps = [
        {"tokens_trained": 10, "entropy": 1.0, "layout": "rows", "skipped": "nothing_left"},
        {"tokens_trained": 30, "entropy": 2.0, "layout": "tree"},
    ]
    assert merge_metrics(steps) == {
        "tokens_trained": 40, "entropy": 1.75, "layout": "tree", "skipped": "nothing_left", "optimizer_steps": 2,
    }  # fmt: skip


def test_a_step_of_which_a_filter_left_nothing_weighs_what_it_had_in_the_mismatch() -> None:
    steps = [
        {"tokens_trained": 0, "tokens_compared": 30, "kl_k3": 2.0, "filtered_positive": 1.0},
        {"tokens_trained": 10, "tokens_compared": 10, "kl_k3": 0.0, "filtered_positive": 0.0},
    ]
    whole = merge_metrics(steps)
    assert (whole["tokens_compared"], whole["kl_k3"], whole["filtered_positive"]) == (40, 1.5, 0.75)


@pytest.mark.parametrize("order", [1, -1])
def test_a_figure_that_only_some_steps_have_is_averaged_over_those(order: int) -> None:
    """A step whose kinds have no critic has no value loss."""
    steps = [{"tokens_trained": 10, "loss": 1.0}, {"tokens_trained": 30, "loss": 2.0, "value_loss": 0.5}]
    whole = merge_metrics(steps[::order])
    assert (whole["loss"], whole["value_loss"]) == (1.75, 0.5)


def test_a_batch_in_steps_is_its_parts_one_after_another_with_the_proximal_correction(tiny_qwen: Path) -> None:
    """By hand: each part a batch of its own, compared with the first weights and weighted by min(prox / behavior_logprobs, C)."""
    train = msgspec.structs.replace(TRAIN, steps_per_batch=3, advantage="batch_norm")
    ours, theirs = Trainer(str(tiny_qwen), train), Trainer(str(tiny_qwen), train)
    assert ours.step(record(train))["optimizer_steps"] == 3
    credit = compute_advantages(GROUPS, train)
    works = [build_rank_batch(tuple(group), train, theirs.traits, credit=credit) for group in GROUPS]
    first = [[logprobs(theirs, one).detach() for one in work.passes] for work in works]
    for work, befores in zip(works, first, strict=True):
        for one, before in zip(work.passes, befores, strict=True):
            learned = logprobs(theirs, one)
            behavior_logprobs, a = torch.from_numpy(one.layout.logprobs), torch.from_numpy(one.advantages)
            weight = (before - behavior_logprobs).exp().clamp(max=20) * (learned.detach() - before).exp().clamp(max=20)
            ((-weight * a * learned).sum() / work.totals.tokens).backward()
        theirs._update(theirs._clip(train), train, 1, anything=True)
    for (name, a), (_, b) in zip(ours.lm.named_parameters(), theirs.lm.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=name)


def test_a_reference_or_teacher_of_fewer_tokens_or_that_is_not_there_is_refused(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=1, **shape)).save_pretrained(tmp_path)
    with pytest.raises(LearnerError, match=r"train.teacher: .* has 64 tokens, the policy 128"):
        Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, loss=Loss(name="distill"), teacher=str(tmp_path)))
    with pytest.raises(LearnerError, match=r"train.teacher: model /nowhere: there is no such folder"):
        Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, loss=Loss(name="distill"), teacher="/nowhere"))


def test_distillation_moves_the_policy_towards_its_teacher(tiny_qwen: Path, other_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, loss=Loss(name="distill"), teacher=str(other_qwen), learning_rate=3e-3)
    trainer = Trainer(str(tiny_qwen), train)
    (one,) = build_rank_batch(BATCH, train, trainer.traits).passes
    asked = PlacedLayout.of(one.layout, CPU), torch.from_numpy(one.temperatures)
    teacher = trainer.frozen.of(train)["teacher"].score(*asked).logprobs

    def distance() -> float:
        return float((teacher - logprobs(trainer, one).detach()).abs().mean())

    before = distance()
    for version in range(1, 9):
        trainer.step(record(train, version=version))
    assert distance() < before
