"""The gradient of a batch against a slow float64 computation, and that no way of computing it changes it."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from support.episodes import make_group
from support.own_methods import ADVANTAGE, LOSS, write_own_methods
from support.same_gradient import assert_same_gradient
from swarmq.config import LOSSES, Loss, Train
from swarmq.errors import LearnerError
from swarmq.learner.batching.micro_batches import (
    MicroBatch,
    MicroBatchBuilder,
    RankBatch,
    build_rank_batch,
    make_idle_micro_batch,
)
from swarmq.learner.health.signs import SignWatch
from swarmq.learner.methods import registry
from swarmq.learner.methods.credit import compute_advantages
from swarmq.learner.model.layout_model import evaluation_mode
from swarmq.learner.model.loading import load_lm
from swarmq.learner.train.trainer import GradientTally, Trainer
from swarmq.messages import Rollout, Sampling, pack_floats
from swarmq.timeline import LayoutPlan, lay_rows, resolve, unfold

pytestmark = pytest.mark.slow

PLAIN = Train(gradient_checkpointing=False, learning_rate=1e-3)
LONGEST = 88
"""Tokens of the longest call of the batch."""
NORMALISATIONS = ["token", "episode", "constant"]
Gradient = dict[str, torch.Tensor]


@cache
def groups() -> tuple[tuple[Rollout, ...], ...]:
    """Chats with forks, unequal lengths and two temperatures."""
    made = [make_group("a", (0.0, 1.0, 0.5), turns=3), make_group("b", (2.0, 0.0), turns=5, length=12)]
    return tuple(
        tuple(
            msgspec.structs.replace(
                e,
                turns=tuple(
                    msgspec.structs.replace(t, sampling=Sampling(temperature=1.0 if i % 2 else 0.7))
                    for i, t in enumerate(e.turns)
                ),
            )
            for e in group
        )
        for group in made
    )


def batch() -> list[Rollout]:
    return [episode for group in groups() for episode in group]


@pytest.fixture(scope="module")
def trainer(tiny_qwen: Path) -> Trainer:
    return Trainer(str(tiny_qwen), PLAIN)


def work(trainer: Trainer, train: Train, **where: int) -> RankBatch:
    return build_rank_batch(batch(), train, trainer.traits, **where)


def gradient(trainer: Trainer, train: Train, passes: RankBatch | None = None) -> Gradient:
    trainer.optimizer.zero_grad()
    trainer.accumulate(passes or work(trainer, train), train)
    return gradients(trainer)


def unfolded(trainer: Trainer, train: Train) -> RankBatch:
    """The oracle: every turn a row, every episode a pass."""
    layouts = [lay_rows([(e, row) for row in unfold(resolve(turns.turns))]) for e, turns in enumerate(batch())]
    tokens = sum(layout.num_tokens for layout in layouts)
    plan = LayoutPlan(layouts=layouts, way="rows", reason="", tokens=tokens, tokens_unfolded=tokens)
    weigh = MicroBatchBuilder(batch(), train)
    passes = [weigh(layout) for layout in layouts]
    return RankBatch(passes=passes, plan=plan, num_episodes=len(batch()), totals=weigh.totals)


def gradient_of_ranks(trainer: Trainer, train: Train, world: int) -> Gradient:
    """Ranks average their gradients after each multiplied its own by their number: a plain sum."""
    return gradient_of_parts(trainer, train, [work(trainer, train, rank=rank, world=world) for rank in range(world)])


def gradient_of_parts(trainer: Trainer, train: Train, parts: list[RankBatch]) -> Gradient:
    trainer.optimizer.zero_grad()
    for part in parts:
        total = part.totals.of(train.normalisation)
        for one in [*part.passes, make_idle_micro_batch()]:
            trainer._backward(one, train, total, GradientTally.start(len(batch()), torch.device("cpu")))
    return gradients(trainer)


def gradients(trainer: Trainer) -> Gradient:
    return {name: p.grad.clone() for name, p in trainer.lm.named_parameters() if p.grad is not None}


def slow_gradient(trainer: Trainer, normalisation: str) -> Gradient:
    """`reinforce`, one turn at a time, float64, no folding, no padding, straight from the formulas."""
    lm = load_lm(trainer.lm.config._name_or_path, gradient_checkpointing=False).double()
    by_id = compute_advantages(groups(), PLAIN)
    episodes = batch()
    tokens = sum(len(t.sampled_ids) // 4 for e in episodes for t in e.turns)
    objective = torch.zeros((), dtype=torch.float64)
    for episode in episodes:
        own = sum(len(turn.sampled_ids) // 4 for turn in episode.turns)
        weight = {"token": 1 / tokens, "episode": 1 / len(episodes) / own, "constant": 1 / len(episodes) / 1024}
        for resolved, turn, a in zip(resolve(episode.turns), episode.turns, by_id[episode.episode_id], strict=True):
            logits = lm(input_ids=torch.tensor(resolved.token_ids.tolist())[None]).logits[0] / turn.sampling.temperature
            for i, target in enumerate(resolved.sampled_ids.tolist()):
                at = resolved.prompt_length + i - 1
                logprobs = logits[at, target] - logits[at].exp().sum().log()
                ratio = min(math.exp(float(logprobs.detach()) - float(resolved.logprobs[i])), 20.0)
                objective = objective - weight[normalisation] * ratio * a * logprobs
    objective.backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_the_gradient_is_the_formulas(trainer: Trainer, normalisation: str) -> None:
    train = msgspec.structs.replace(PLAIN, normalisation=normalisation, loss=Loss(name="reinforce"))
    assert_same_gradient(gradient(trainer, train), slow_gradient(trainer, normalisation))


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize(
    "way",
    ["rows", "tree", "small rows", "small tree", "unfolded", "two ranks", "four ranks", "checkpointing", "chunks"],
)
def test_no_way_of_computing_changes_the_gradient(
    trainer: Trainer, normalisation: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = msgspec.structs.replace(PLAIN, normalisation=normalisation)
    wanted = gradient(trainer, train)
    match way.split():
        case ["rows" | "tree" as layout]:
            train = msgspec.structs.replace(train, layout=layout)
            assert (work(trainer, train).plan.way, len(work(trainer, train).passes)) == (layout, 1)
            ours = gradient(trainer, train)
        case ["small", layout]:
            train = msgspec.structs.replace(train, layout=layout, micro_batch_tokens=LONGEST)
            assert len(work(trainer, train).passes) > 2
            ours = gradient(trainer, train)
        case ["unfolded"]:
            assert unfolded(trainer, train).plan.tokens > work(trainer, train).plan.tokens
            ours = gradient(trainer, train, unfolded(trainer, train))
        case ["two" | "four" as ranks, "ranks"]:
            ours = gradient_of_ranks(trainer, train, {"two": 2, "four": 4}[ranks])
        case ["checkpointing"]:
            trainer.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            ours = gradient(trainer, train)
            trainer.lm.gradient_checkpointing_disable()
        case ["chunks"]:
            monkeypatch.setattr(trainer.accelerator.unwrap_model(trainer.model), "head_chunk", 7)
            ours = gradient(trainer, train)
    assert_same_gradient(ours, wanted)


@pytest.fixture
def _own_methods(tmp_path: Path) -> None:
    write_own_methods(tmp_path)
    registry.adopt(
        registry.read_code(kind, name, str(tmp_path)) for kind, name in (("loss", LOSS), ("advantage", ADVANTAGE))
    )


@pytest.mark.usefixtures("_own_methods")
@pytest.mark.parametrize("ranks", [1, 3])
def test_own_methods_have_the_same_gradient_on_any_number_of_ranks(trainer: Trainer, ranks: int) -> None:
    train = msgspec.structs.replace(PLAIN, loss=Loss(name=LOSS), advantage=ADVANTAGE)
    wanted = gradient(trainer, train, unfolded(trainer, train))
    small = msgspec.structs.replace(train, micro_batch_tokens=LONGEST)
    assert_same_gradient(gradient_of_ranks(trainer, small, ranks), wanted)


@pytest.mark.usefixtures("_own_methods")
@pytest.mark.parametrize("loss", [*LOSSES, LOSS])
@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_no_layout_changes_any_loss_or_filter(trainer: Trainer, other_qwen: Path, loss: str, layout: str) -> None:
    """What a loss or a filter takes together is a model call, and that is whole in every layout."""
    train = msgspec.structs.replace(
        PLAIN,
        loss=Loss(name=loss, kl=0.1, reward_kl=0.0 if loss in {"sft", "distill"} else 0.05, entropy_bonus=0.01),
        reference=str(other_qwen),
        teacher=str(other_qwen) if loss == "distill" else None,
        row_k3_max=0.2,
        ratio_band=(0.3, 3.0),
    )
    wanted = gradient(trainer, train, unfolded(trainer, train))
    ours = msgspec.structs.replace(train, layout=layout, micro_batch_tokens=LONGEST)
    assert_same_gradient(gradient(trainer, ours), wanted)


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_no_layout_changes_what_the_likeliest_tokens_of_a_teacher_teach(
    trainer: Trainer, other_qwen: Path, layout: str
) -> None:
    loss = Loss(name="distill", top_k=5, distill_beta=0.5)
    train = msgspec.structs.replace(PLAIN, loss=loss, teacher=str(other_qwen), ratio_band=(0.3, 3.0))
    wanted = gradient(trainer, train, unfolded(trainer, train))
    ours = msgspec.structs.replace(train, layout=layout, micro_batch_tokens=LONGEST)
    assert_same_gradient(gradient(trainer, ours), wanted)


def test_every_rank_has_as_many_passes_and_every_token_is_trained_once(trainer: Trainer) -> None:
    parts = [work(trainer, PLAIN, rank=rank, world=6) for rank in range(6)]
    assert len({len(part.passes) for part in parts}) == 1
    trained = [key for part in parts for one in part.passes if not one.idle for key in keys(one)]
    assert len(trained) == len(set(trained)) == parts[0].totals.tokens
    assert_same_gradient(gradient_of_ranks(trainer, PLAIN, 6), gradient(trainer, PLAIN))


def test_ranks_share_a_batch_evenly(trainer: Trainer) -> None:
    loads = [sum(p.layout.num_tokens for p in work(trainer, PLAIN, rank=r, world=2).passes) for r in range(2)]
    assert max(loads) < 1.2 * min(loads)


def test_more_ranks_than_passes_leave_some_idle(trainer: Trainer) -> None:
    parts = [work(trainer, PLAIN, rank=rank, world=20) for rank in range(20)]
    assert any(one.idle for part in parts for one in part.passes)
    assert_same_gradient(gradient_of_ranks(trainer, PLAIN, 20), gradient(trainer, PLAIN))


def test_what_a_filter_takes_leaves_the_denominator_too(trainer: Trainer) -> None:
    """Calls that disagree with the engine are left out: the same gradient as a batch that never had them."""
    episodes = batch()
    worst = msgspec.structs.replace(
        episodes[0],
        turns=tuple(
            msgspec.structs.replace(t, logprobs=b"\x00\x00\x48\xc1" * (len(t.logprobs) // 4)) for t in episodes[0].turns
        ),
    )  # -12.5: the learner finds these tokens far likelier than the engine said
    train = msgspec.structs.replace(PLAIN, row_k3_max=50.0)
    with_worst = build_rank_batch([worst, *episodes[1:]], train, trainer.traits)
    trainer.optimizer.zero_grad()
    fields, left, _ = trainer.accumulate(with_worst, train)
    ours = gradients(trainer)
    rest = [only(one, one.layout.episodes != 0) for one in with_worst.passes]
    trainer.optimizer.zero_grad()
    count = sum(one.layout.num_trained for one in rest)
    trainer.accumulate(msgspec.structs.replace(with_worst, passes=rest), PLAIN)
    assert fields["calls_left_out"] == len(worst.turns)
    assert left == count < with_worst.totals.tokens
    assert_same_gradient(ours, gradients(trainer))


def test_a_filtered_token_whose_loss_is_infinite_leaves_the_figure_as_it_is(trainer: Trainer) -> None:
    """An engine may call a token that it sampled all but impossible."""
    train = msgspec.structs.replace(PLAIN, row_k3_max=50.0)
    losses = []
    for logprob in (-1000.0, -1e20):
        first, *rest = batch()
        turns = tuple(
            msgspec.structs.replace(t, logprobs=pack_floats([logprob] * (len(t.logprobs) // 4))) for t in first.turns
        )
        episodes = [msgspec.structs.replace(first, turns=turns), *rest]
        trainer.optimizer.zero_grad()
        fields = trainer.accumulate(build_rank_batch(episodes, train, trainer.traits), train).fields
        losses.append(fields["loss"])
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])


@pytest.mark.parametrize("filters", [{"ratio_band": (0.5, 2.0)}, {"row_k3_max": 0.3}])
def test_a_filter_does_not_hide_the_mismatch_that_it_is_there_for(trainer: Trainer, filters: dict[str, Any]) -> None:
    """The figures are those of all tokens; loss and N those of what the filter leaves."""
    sampled = work(trainer, PLAIN)
    (logprobs,) = trainer.score(sampled)
    gaps = torch.zeros(len(logprobs)).index_fill(0, torch.arange(len(logprobs) // 4), 3.0)
    layout = msgspec.structs.replace(sampled.passes[0].layout, logprobs=(logprobs - gaps).numpy())
    apart = msgspec.structs.replace(sampled, passes=[msgspec.structs.replace(sampled.passes[0], layout=layout)])
    plain, filtered = (
        trainer.accumulate(apart, msgspec.structs.replace(PLAIN, **each)).fields for each in ({}, filters)
    )
    trainer.optimizer.zero_grad()
    assert filtered["tokens_trained"] < plain["tokens_trained"] == plain["tokens_compared"]
    assert filtered["loss"] != plain["loss"]
    mismatch = ("tokens_compared", "kl_k3", "gap_p99", "effective_samples")
    assert {name: filtered[name] for name in mismatch} == pytest.approx({name: plain[name] for name in mismatch})
    assert filtered["kl_k3"] == pytest.approx(float((gaps.exp() - gaps - 1).mean()), rel=1e-3)
    shown = {finding.check for finding in SignWatch().step(filtered, 4)}
    assert "broken mismatch" in shown


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_the_mean_over_an_episode_is_over_what_filters_leave_of_it(trainer: Trainer, layout: str) -> None:
    """However its turns are spread over passes: as if nothing else had been sampled."""
    train = msgspec.structs.replace(PLAIN, normalisation="episode", ratio_band=(0.9, 1.1), row_k3_max=1.0)
    spread = msgspec.structs.replace(train, layout=layout, micro_batch_tokens=LONGEST)
    made = gradient(trainer, spread)
    whole = work(trainer, train)
    rest = []
    for one, logprobs in zip(whole.passes, trainer.score(whole), strict=True):
        ratio = (logprobs - torch.from_numpy(one.layout.logprobs)).exp().numpy()
        left = only(one, (ratio >= 0.9) & (ratio <= 1.1))
        counts = np.bincount(left.layout.episodes, minlength=len(batch()))
        rest.append(msgspec.structs.replace(left, weights=(1 / counts[left.layout.episodes]).astype(np.float32)))
        assert 0 < left.layout.num_trained < one.layout.num_trained
    plain = msgspec.structs.replace(PLAIN, normalisation="episode")
    assert_same_gradient(made, gradient(trainer, plain, msgspec.structs.replace(whole, passes=rest)))


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_turns_without_anything_to_learn_leave_gradient_and_denominator(trainer: Trainer, normalisation: str) -> None:
    """Judges with equal rewards beside solvers with different ones: as if nobody had judged."""
    group = [
        msgspec.structs.replace(
            e,
            agent_rewards={"judge": 5.0},
            turns=tuple(msgspec.structs.replace(t, agent="judge" if i else "solver") for i, t in enumerate(e.turns)),
        )
        for e in groups()[0]
    ]
    train = msgspec.structs.replace(PLAIN, normalisation=normalisation)
    ours = build_rank_batch(group, train, trainer.traits)
    trainer.optimizer.zero_grad()
    fields, left, _ = trainer.accumulate(ours, train)
    made = gradients(trainer)
    solved = msgspec.structs.replace(ours, passes=[only(one, one.layout.turns == 0) for one in ours.passes])
    trainer.optimizer.zero_grad()
    trainer.accumulate(solved, train)
    first = sum(len(e.turns[0].sampled_ids) // 4 for e in group)
    assert fields["tokens_trained"] == first == ours.totals.tokens
    assert left == ours.totals.of(normalisation)
    assert_same_gradient(made, gradients(trainer))


def test_an_episode_that_two_ranks_share_counts_once(trainer: Trainer) -> None:
    """A filter leaves one call of an episode; ranks would each count the episode if they only added up."""
    train = msgspec.structs.replace(PLAIN, normalisation="episode", layout="rows", micro_batch_tokens=LONGEST)
    whole = work(trainer, train)
    left = trainer.accumulate(whole, train).units_left
    assert max(Counter(e for one in whole.passes for e in {e for e, *_ in keys(one)}).values()) > 1
    assert left == len(batch())
    trainer.optimizer.zero_grad()


def test_a_model_that_cannot_compute_trees_trains_rows_and_refuses_to_be_asked_for_trees(tmp_path: Path) -> None:
    shape = {"vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(**shape)).save_pretrained(tmp_path)
    trainer = Trainer(str(tmp_path), PLAIN)
    assert work(trainer, PLAIN).plan.reason.startswith("trees are not available: ")
    assert_same_gradient(gradient(trainer, PLAIN), gradient(trainer, PLAIN, unfolded(trainer, PLAIN)))
    with pytest.raises(LearnerError, match=r"train.layout: .* cannot compute trees .*; set it to 'auto'"):
        Trainer(str(tmp_path), msgspec.structs.replace(PLAIN, layout="tree"))


def test_ranks_compute_as_many_rows_as_each_other_where_rows_are_computed_one_by_one(trainer: Trainer) -> None:
    """Each gathers the layers that ranks share out; what is added trains nothing."""
    train = msgspec.structs.replace(PLAIN, layout="rows", micro_batch_tokens=LONGEST)
    one_by_one = msgspec.structs.replace(trainer.traits, rows_only="for a test")
    parts = [build_rank_batch(batch(), train, one_by_one, rank=rank, world=5) for rank in range(5)]
    rows = [[len(one.layout.node_starts) for one in part.passes] for part in parts]
    assert rows == [rows[0]] * 5
    assert max(rows[0]) > 1
    plain = [[len(one.layout.node_starts) for one in work(trainer, train, rank=r, world=5).passes] for r in range(5)]
    assert any(of != plain[0] for of in plain), "nothing to make even"
    assert_same_gradient(gradient_of_parts(trainer, train, parts), gradient(trainer, train))


def test_a_model_with_dropout_is_trained_without_it(trainer: Trainer, tiny_qwen: Path, tmp_path: Path) -> None:
    dropping = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    dropping.config.attention_dropout = 0.5
    dropping.save_pretrained(tmp_path)
    assert_same_gradient(gradient(Trainer(str(tmp_path), PLAIN), PLAIN), gradient(trainer, PLAIN))


@pytest.mark.parametrize(
    ("family", "noise"), [("mixtral", {"router_jitter_noise": 0.1}), ("phimoe", {"input_jitter_noise": 0.1})]
)
def test_a_router_chooses_in_training_what_it_chooses_in_an_engine(
    family: str, noise: dict[str, float], tmp_path: Path
) -> None:
    """Without noise; PhiMoE's would even draw its experts at random."""
    config = AutoConfig.for_model(
        family,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        **noise,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    routed = Trainer(str(tmp_path), PLAIN)
    for one in work(routed, PLAIN).passes:
        with torch.no_grad():
            ours = routed.model(routed.place(one)).logprobs
        with evaluation_mode(routed.model):
            wanted = routed.model(routed.place(one)).logprobs
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    assert routed.model.training


def keys(one: MicroBatch) -> list[tuple[int, int, int]]:
    """Episode, turn and offset of every token that a pass trains."""
    layout = one.layout
    return list(zip(layout.episodes.tolist(), layout.turns.tolist(), layout.offsets.tolist(), strict=True))


def only(one: MicroBatch, kept: np.ndarray) -> MicroBatch:
    """The pass as if the other tokens had not been sampled by the policy."""
    per_token = ("predictors", "targets", "logprobs", "versions", "episodes", "turns", "offsets")
    return msgspec.structs.replace(
        one,
        layout=msgspec.structs.replace(one.layout, **{name: getattr(one.layout, name)[kept] for name in per_token}),
        **{
            name: getattr(one, name)[kept]
            for name in ("advantages", "weights", "temperatures", "calls", "held", "plain")
        },
    )
