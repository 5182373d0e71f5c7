"""Engines that sample from another model than the learner trains stop it before a step; what may differ for good reasons does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support.episodes import make_group
from swarmq.config import EngineSettings, Loss, Policy, SwarmJob, Train
from swarmq.errors import SetUpError
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.store.records import BatchIndex, BatchRecord, encode_record
from swarmq.learner.train.engine_agreement import EXACT, MIN_TOKENS, NARROW, ROUNDED, agreement_limit
from swarmq.learner.train.loop import Learner, RankCommand
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Sampling, Turn, VersionSpan, pack_floats

TRAIN = Train(warmup_steps=0, learning_rate=1e-3, token_log=False, trackers=())
MANY: dict[str, Any] = {"turns": 4, "length": 20}
Edit = Callable[[Turn], Turn]


@pytest.fixture
def trainer(tiny_qwen: Path) -> Trainer:
    return Trainer(str(tiny_qwen), TRAIN, engine_gap_max=EXACT)


def sampled(trainer: Trainer, *, off: float = 0.0, edit: Edit = lambda turn: turn, train: Train = TRAIN) -> BatchRecord:
    """A batch whose log-probabilities are the trainer's own, `off` nats away by turns up and down; `edit` is of every turn."""
    episodes = make_group("a", (0.0, 1.0, 3.0), **MANY)
    found: dict[tuple[int, int], dict[int, float]] = {}
    for one in build_rank_batch(episodes, train, trainer.traits).passes:
        with torch.no_grad():
            logprobs = trainer.model(trainer.place(one)).logprobs.tolist()
        layout = one.layout
        for e, t, o, value in zip(layout.episodes, layout.turns, layout.offsets, logprobs, strict=True):
            found.setdefault((int(e), int(t)), {})[int(o)] = value + (off if o % 2 else -off)

    def of(e: int, t: int, turn: Turn) -> Turn:
        values = found[e, t]
        return edit(msgspec.structs.replace(turn, logprobs=pack_floats([values[o] for o in range(len(values))])))

    made = [
        msgspec.structs.replace(episode, turns=tuple(of(e, t, turn) for t, turn in enumerate(episode.turns)))
        for e, episode in enumerate(episodes)
    ]
    return recorded(made, train)


def recorded(episodes: list[Rollout], train: Train = TRAIN) -> BatchRecord:
    return BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(episodes), settings=train)


def changed(**fields: Any) -> Edit:
    return lambda turn: msgspec.structs.replace(turn, **fields)


def pushed_midway(turn: Turn) -> Turn:
    half, end = turn.num_sampled // 2, turn.num_sampled
    spans = (VersionSpan(version=0, start=0, end=half), VersionSpan(version=0, start=half, end=end))
    return msgspec.structs.replace(turn, versions=spans)


def test_an_engine_that_samples_from_the_trained_model_passes(trainer: Trainer) -> None:
    fields = trainer.step(sampled(trainer))
    assert fields["same_weights_tokens"] > MIN_TOKENS
    assert fields["same_weights_gap"] < 1e-5


@pytest.mark.parametrize("off", [0.06, 0.6])
def test_one_that_samples_from_another_stops_the_run_with_the_familys_name_before_the_step(
    trainer: Trainer, off: float
) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.lm.state_dict().items()}
    with pytest.raises(SetUpError, match=rf"Qwen3ForCausalLM differently: .* are {off:g} nats apart .*engine_gap_max"):
        trainer.step(sampled(trainer, off=off))
    assert trainer.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.lm.state_dict().items())


@pytest.mark.parametrize(
    "edit",
    [
        changed(sampling=Sampling(grammar="json 0123")),
        changed(sampling=Sampling(top_p=0.5)),
        changed(repaired=True),
        pushed_midway,
    ],
    ids=["held to a grammar", "from a part of the vocabulary", "repaired prompt", "a push in mid-answer"],
)
def test_turns_that_differ_for_a_reason_of_their_own_say_nothing_of_the_model(trainer: Trainer, edit: Edit) -> None:
    fields = trainer.step(sampled(trainer, off=0.6, edit=edit))
    assert fields["same_weights_tokens"] == 0


def test_neither_do_tokens_of_older_weights(trainer: Trainer) -> None:
    trainer.version = 3
    record = sampled(trainer, off=0.6)
    fields = trainer.step(msgspec.structs.replace(record, index=BatchIndex(record=4, version=4)))
    assert fields["same_weights_tokens"] == 0


def test_later_steps_of_a_batch_are_compared_by_the_weights_before_its_first(tiny_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, steps_per_batch=2, learning_rate=0.1)
    trainer = Trainer(str(tiny_qwen), train, engine_gap_max=EXACT)
    one = sampled(trainer, train=train)
    other = [msgspec.structs.replace(e, group_id="b/0", episode_id=f"b{e.episode_id}") for e in one.episodes]
    fields = trainer.step(recorded([*one.episodes, *other], train))
    assert fields["optimizer_steps"] == 2
    assert fields["same_weights_gap"] < 1e-5


def test_few_tokens_prove_nothing_and_a_loss_without_ratios_asks_for_none(tiny_qwen: Path) -> None:
    few = Trainer(str(tiny_qwen), TRAIN, engine_gap_max=EXACT)
    assert few.step(recorded(make_group("a", turns=1)))["same_weights_tokens"] < MIN_TOKENS
    train = msgspec.structs.replace(TRAIN, loss=Loss(name="sft"))
    taught = Trainer(str(tiny_qwen), train, engine_gap_max=EXACT)
    assert taught.step(recorded(make_group("a", **MANY), train))["same_weights_tokens"] == 0


@pytest.mark.parametrize(
    ("engine", "train", "cuda", "limit"),
    [
        ({}, {}, False, EXACT),
        ({}, {}, True, ROUNDED),
        ({"dtype": "float32"}, {"mixed_precision": "no"}, True, EXACT),
        ({"dtype": "bfloat16"}, {}, False, ROUNDED),
        ({}, {"mixed_precision": "fp8"}, True, NARROW),
        ({"quantization": "fp8"}, {}, True, NARROW),
        ({"kv_cache_dtype": "fp8", "dtype": "float32"}, {"mixed_precision": "no"}, True, NARROW),
        ({}, {"engine_gap_max": 0.3}, True, 0.3),
        ({}, {"engine_gap_max": 0.0}, True, 0.0),
        ({"urls": ()}, {}, True, 0.0),
    ],
)
def test_the_limit_is_what_rounding_can_make(
    engine: dict[str, Any], train: dict[str, Any], cuda: bool, limit: float
) -> None:
    policy = Policy(model="m", engine=EngineSettings(**{"urls": ("http://a",)} | engine), train=Train(**train))
    assert agreement_limit(policy, cuda=cuda) == limit


def test_a_learner_with_engines_watches_them(trainer: Trainer, tiny_qwen: Path, tmp_path: Path) -> None:
    """Also after a restart: the batch is in the log, and is not trained then either."""
    policy = Policy(model=str(tiny_qwen), engine=EngineSettings(urls=("http://127.0.0.1:9",)), train=TRAIN)
    job = SwarmJob(run="r", folder=str(tmp_path), policies={"main": policy})
    learner = Learner(job, "main", pusher=None, stop=StopSignal())
    command = RankCommand("step", encode_record(sampled(trainer, off=0.06)), replayed=True)
    with pytest.raises(SetUpError, match="Qwen3ForCausalLM differently"):
        learner._step(None, command, wait_s=0.0, began=0.0)
    assert learner.trainer.version == 0
