"""Run on every rank, some of which share their passes, with each of some models and settings: what `learner_ranks` makes of them, and
what the token log has of every token. Rank 0 saves it all.

python context_ranks.py CASES_JSON TARGET
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import all_gather_object, get_world_size

from support.episodes import make_group
from support.learner_ranks import forget, learned, let_go, own_work
from swarmq.config import Train
from swarmq.errors import LearnerError
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, Sampling, VersionSpan, pack_floats, pack_ids


class Case(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    train: Train
    refused: str | None = None
    """What is said of it where ranks share passes."""


def _warm(episode: Rollout) -> Rollout:
    """Its turns at two temperatures."""
    turns = tuple(
        msgspec.structs.replace(turn, sampling=Sampling(temperature=0.7 if number % 2 else 1.0))
        for number, turn in enumerate(episode.turns)
    )
    return msgspec.structs.replace(episode, turns=turns)


def _asked_much(episode: Rollout) -> Rollout:
    """A long prompt and a short answer, which the ranks that compute the middle score nothing of."""
    (turn,) = episode.turns
    prompt = [number % 128 for number in range(80)]
    sampled, logprobs = [3, 1, 4], [-4.5, -5.0, -4.8]
    long = msgspec.structs.replace(
        turn,
        prompt_ids=pack_ids(prompt),
        sampled_ids=pack_ids(sampled),
        logprobs=pack_floats(logprobs),
        versions=(VersionSpan(version=0, start=0, end=len(sampled)),),
    )
    return msgspec.structs.replace(episode, turns=(long,))


EPISODES = tuple(
    _warm(episode)
    for group in (
        make_group("a", (0.0, 1.0, 0.5), turns=3),
        make_group("b", (2.0, 0.0), turns=5, length=12),
        [_asked_much(episode) for episode in make_group("c", (1.0, 0.0), turns=1)],
    )
    for episode in group
)


def main(cases: Sequence[Case], target: Path) -> None:
    made, trainer = [], None
    for number, case in enumerate(cases):
        if number:
            forget()
        if case.refused and case.train.context_parallel > 1:
            with pytest.raises(LearnerError, match=case.refused):
                Trainer(case.model, case.train)
            continue
        trainer = Trainer(case.model, case.train)
        made.append(learned(trainer, case.train, EPISODES) | seen(trainer, case.train))
        trainer.accelerator.wait_for_everyone()
        if is_sharded(trainer.model) and not number:
            let_go(case.model, case.train, made[0]["gradient"], EPISODES)
        if trainer.context.ranks > 1 and not number:
            asks_once(trainer)
    if trainer is None:
        return
    if trainer.accelerator.is_main_process:
        torch.save(made, target)
    trainer.accelerator.wait_for_everyone()


def seen(trainer: Trainer, train: Train) -> dict[str, Any]:
    """Of all ranks: tokens that they computed, and what each logged of the last step."""
    work = own_work(trainer, train, EPISODES)
    passes = [trainer.place(one) for one in work.passes]
    ours = {
        "tokens": trainer.token_traces,
        "lengths": [each.input_ids.shape[1] for each in passes],
        "sampled": [len(each.targets) for each in passes],
        "idle": sum(one.idle for one in work.passes),
        "forks": int(sum((one.layout.node_parents >= 0).sum() for one in work.passes)),
    }
    said: list[Any] = [ours]
    if trainer.accelerator.num_processes > 1:
        said *= get_world_size()
        all_gather_object(said, ours)
    return {name: [one[name] for one in said] for name in ours}


def asks_once(trainer: Trainer) -> None:
    """What an engine is asked, one rank of those that share passes asks for all; its error is theirs, too."""
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        return f"by {trainer.share}"

    def fail() -> str:
        raise LearnerError(f"no answer for {trainer.share}")

    assert trainer.context.run_on_first(ask) == f"by {trainer.share}"
    assert len(asked) == trainer.context.is_first
    with pytest.raises(LearnerError, match="no answer for"):
        trainer.context.run_on_first(fail)
    number = float(trainer.accelerator.process_index)
    assert trainer.context.reduce_min(number) == number - trainer.context.rank


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(msgspec.json.decode(sys.argv[1], type=list[Case]), Path(sys.argv[2]))
    leave_group()
