"""Run on every rank, with each of some named settings: the gradient of a batch of which only some passes show images, optimizer steps on
it, and a step on a batch without images. Rank 0 saves what they made.

python vision_ranks.py MODEL TRAINS_JSON FOLDER        with a folder for each of the named settings
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from benchmarks.vlm.architecture import IMAGE, QWEN2_5_VL, QWEN3_VL, Architecture
from tokenizers import Tokenizer
from torch.distributed import all_gather_object

from support.episodes import make_group
from support.images import make_image, make_turn
from support.learner_ranks import STEPS, batch, forget, learned, let_go, own_work, run_ways, same, weights
from swarmq.config import Train
from swarmq.learner.distributed.sharding import is_sharded
from swarmq.learner.memory.outline import load_config
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Image, Rollout

IN_BF16 = 0.2
"""Of a parameter's gradient, which layers that compute in BF16 round."""


def main(model: str, train: Train, folder: Path) -> None:
    kind = next(each for each in (QWEN2_5_VL, QWEN3_VL) if each.family == load_config(model).model_type)
    placeholder = Tokenizer.from_file(f"{model}/tokenizer.json").token_to_id(IMAGE)
    trainer, episodes = Trainer(model, train), make_episodes(kind, placeholder)
    world, shares = trainer.accelerator.num_processes, trainer.share[1]
    shown = [one.layout.shows_images for one in own_work(trainer, train, episodes).passes]
    of_all = [shown] * world
    if world > 1:
        all_gather_object(of_all, shown)
    assert any(len(set(seen)) > 1 for seen in zip(*of_all, strict=True)) == (shares > 1), "one rank alone sees images"
    made = learned(trainer, train, episodes)
    text = tuple(episode for episode in episodes if not episode.turns[0].images)
    trainer.step(batch(STEPS + 1, train, text))
    made["after_text"] = weights(trainer)
    if trainer.accelerator.is_main_process:
        torch.save(made, folder / "made")
    trainer.accelerator.wait_for_everyone()
    if is_sharded(trainer.model):
        let_go(model, train, made["gradient"], episodes)
        forget()
        half = Trainer(model, msgspec.structs.replace(train, mixed_precision="bf16"))
        half.accumulate(own_work(half, train, episodes), train)
        same(half, made["gradient"], IN_BF16)


def make_episodes(kind: Architecture, placeholder: int) -> tuple[Rollout, ...]:
    """A group about an image that its attempts share, in conversations that go on to another one, and two groups about none."""
    cat, tall = make_image(1, kind=kind), make_image(2, height=3, kind=kind)

    def with_turns(episode: Rollout, number: int, *shown: Image) -> Rollout:
        first = make_turn("1", [5, 6, *shown, 7, number], [9, 10 + number, 3], placeholder=placeholder)
        ids = [5, 6, *shown, 7, number, 9, 10 + number, 3, 4, *([tall] if shown else []), 8]
        more = make_turn("2", ids, [11, 12 + number], placeholder=placeholder, parent=first)
        return msgspec.structs.replace(episode, turns=(first, more))

    groups = (("cat", (cat,)), ("words", ()), ("more words", ()))
    return tuple(
        with_turns(episode, number + 20 * at, *shown)
        for at, (name, shown) in enumerate(groups)
        for number, episode in enumerate(make_group(name, (0.0, 1.0, 0.5)))
    )


if __name__ == "__main__":
    run_ways(main)
