"""Adapters are trained, the model under them is not, and what leaves the learner is a whole model."""

from __future__ import annotations

import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.episodes import make_group
from support.tiny_model import tiny_experts
from swarmq.config import Lora, Loss, Train
from swarmq.engine.packing import Packed
from swarmq.engine.transfers import distinct
from swarmq.learner import checkpoint, lora
from swarmq.learner.lora import MARK, has_lora
from swarmq.learner.passes import Pass, work_of
from swarmq.learner.records import BatchRecord, Identity, Index
from swarmq.learner.trainer import Trainer
from swarmq.learner.tree import LayoutModel, Placed

EPISODES = tuple(make_group("a", (0.0, 1.0)))
CPU = torch.device("cpu")
TRAIN = Train(
    lora=Lora(rank=4, alpha=8.0), loss=Loss(name="reinforce"), learning_rate=1e-2, warmup_steps=0, token_log=False
)


def record(version: int) -> BatchRecord:
    return BatchRecord(index=Index(record=version, version=version), episodes=EPISODES, settings=TRAIN)


def logprobs(model: torch.nn.Module, one: Pass) -> torch.Tensor:
    return model(Placed.of(one.layout, CPU), torch.from_numpy(one.temperatures)).logprobs.detach()


@pytest.fixture(params=["dense", "experts"])
def model(request: pytest.FixtureRequest, tiny_qwen: Path) -> Path:
    return tiny_qwen if request.param == "dense" else tiny_experts("qwen3_moe")


def test_adapters_learn_and_the_merged_weights_are_the_same_policy(model: Path) -> None:
    trainer = Trainer(str(model), TRAIN)
    before = {name: value.clone() for name, value in trainer.lm.state_dict().items()}
    trainer.step(record(1))
    changed = {name for name, value in trainer.lm.state_dict().items() if not torch.equal(before[name], value)}
    assert changed
    assert all(MARK in name for name in changed)
    plain = AutoModelForCausalLM.from_pretrained(model)
    weights = dict(trainer.named_tensors())
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    (one,) = work_of(EPISODES, TRAIN, trainer.engine).passes
    torch.testing.assert_close(logprobs(LayoutModel(plain), one), logprobs(trainer.model, one), rtol=0, atol=1e-5)


def test_what_is_pushed_is_merged_tensor_by_tensor(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(record(1))
    wanted = distinct(trainer.named_tensors())
    made: list[weakref.ref[torch.Tensor]] = []

    def counted(weight: torch.Tensor, layer: object) -> torch.Tensor:
        assert [each for each in made if each() is not None] == [], "one merged tensor at a time"
        whole = summed(weight, layer)
        made.append(weakref.ref(whole))
        return whole

    summed = lora._sum
    monkeypatch.setattr(lora, "_sum", counted)
    tensors = distinct(trainer.weights_to_push())
    assert made == []
    plan = Packed.of(tensors, torch.float32)
    buffer = torch.empty(plan.size_bytes, dtype=torch.uint8)
    plan.pack(tensors, buffer)
    assert len(made) > 4
    sent = plan.views(buffer)
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_is_a_whole_model_and_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    trainer, identity = Trainer(str(model), TRAIN), Identity(run="r", policy="main", model=str(model))
    trainer.step(record(1))
    checkpoint.save(tmp_path, trainer, identity, model=str(model), keep=1)
    trainer.step(record(2))
    found = checkpoint.newest(tmp_path, identity)
    assert found is not None
    assert not has_lora(AutoModelForCausalLM.from_pretrained(found.path))
    assert [file.name for file in found.path.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads all of them"
    again = Trainer(str(found.path), TRAIN, initial=str(model))
    checkpoint.restore(again, found)
    again.step(record(2))
    ours, wanted = dict(again.named_tensors()), dict(trainer.named_tensors())
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_without_lora_every_parameter_learns(tiny_qwen: Path) -> None:
    trainer = Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, lora=None))
    assert not has_lora(trainer.lm)
    assert all(parameter.requires_grad for parameter in trainer.lm.parameters())
