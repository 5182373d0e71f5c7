"""Steps on images: a checkpoint continues to the bit after a step without any, and the batch log repeats their pixels."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from benchmarks.vlm.architecture import IMAGE
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from support.episodes import make_group
from support.images import make_image, make_turn
from support.tiny_vision_model import tiny_vision_model
from swarmq.config import Policy, Train
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.model.vision import read_input_norm
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity, decode_record, encode_record
from swarmq.learner.train.trainer import Trainer, load_trainer

pytestmark = pytest.mark.slow

OURS = RunIdentity(run="r", policy="main", model="m")
TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-3, deterministic=True)


@pytest.fixture(autouse=True)
def no_leftover_state() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    AcceleratorState._reset_state()
    PartialState._reset_state()


def batch(version: int, *, images: bool) -> BatchRecord:
    """A group whose attempts see the same image, read from the batch log's bytes."""
    pad = Tokenizer.from_file(str(tiny_vision_model() / "tokenizer.json")).token_to_id(IMAGE)
    shown = [make_image(version, width=3)] if images else []
    group = [
        msgspec.structs.replace(each, turns=(make_turn("c", [5, *shown, 7], [8 + number, 9], placeholder=pad),))
        for number, each in enumerate(make_group(f"g{version}"))
    ]
    index = BatchIndex(record=version, version=version, trained=tuple(each.episode_id for each in group))
    return decode_record(encode_record(BatchRecord(index=index, episodes=tuple(group), settings=TRAIN)))


def weights(trainer: Trainer) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in trainer.named_tensors()}


@pytest.mark.parametrize("images_first", [True, False])
def test_training_on_images_goes_on_to_the_bit(images_first: bool, tmp_path: Path) -> None:
    """Without an image in a batch, the vision tower has no gradient, and its optimizer no state yet."""
    model = str(tiny_vision_model())
    trainer = Trainer(model, TRAIN)
    before = weights(trainer)
    trainer.step(batch(1, images=images_first))
    saw = {name for name, value in weights(trainer).items() if "visual" in name and value != before[name]}
    assert bool(saw) == images_first
    save_load.save_checkpoint(tmp_path, trainer, OURS, model=model, keep=3)
    trainer.step(batch(2, images=True))
    found = discovery.find_newest(tmp_path, OURS)
    assert found is not None
    again = load_trainer(found, Policy(model=model, train=TRAIN))
    again.step(batch(2, images=True))
    assert weights(again) == weights(trainer)


def test_a_checkpoint_is_a_model_with_its_image_processor(tmp_path: Path) -> None:
    model = str(tiny_vision_model())
    trainer = Trainer(model, TRAIN)
    trainer.step(batch(1, images=True))
    save_load.save_checkpoint(tmp_path, trainer, OURS, model=model, keep=3)
    found = discovery.find_newest(tmp_path, OURS)
    assert found is not None
    assert read_input_norm(str(found.path)) == read_input_norm(model)
    loaded = AutoModelForImageTextToText.from_pretrained(found.path, dtype=torch.float32).state_dict()
    ours = trainer.lm.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in ours.items())
