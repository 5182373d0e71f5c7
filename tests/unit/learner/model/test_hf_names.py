"""What leaves the learner has the names, the shapes and the values of the folder that the model was loaded from."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, HrmTextConfig

from support.tiny_model import tiny_experts
from swarmq.config import Lora, Train
from swarmq.learner.model import hf_names
from swarmq.learner.model.hf_names import to_hf_names
from swarmq.learner.train.trainer import Trainer
from swarmq.weights.format.packing import LazyTensor, materialize
from swarmq.weights.push.transfers import deduplicate

TRAIN = Train(token_log=False)
ADAPTERS = msgspec.structs.replace(TRAIN, lora=Lora(rank=4, alpha=8.0))
WEIGHTS = "model.safetensors"


def same(ours: Iterable[tuple[str, torch.Tensor | LazyTensor]], folder: Path) -> bool:
    wanted, told = (
        load_file(folder / WEIGHTS),
        {name: materialize(tensor) for name, tensor in deduplicate(ours).items()},
    )
    return wanted.keys() == told.keys() and all(torch.equal(told[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("train", [TRAIN, ADAPTERS], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_are_pushed_and_saved_one_by_one_as_the_folder_has_them(
    family: str, train: Train, tmp_path: Path
) -> None:
    folder = tiny_experts(family)
    assert any(".experts.0." in name for name in load_file(folder / WEIGHTS)), "nothing is taken apart"
    trainer = Trainer(str(folder), train)
    assert same(trainer.weights_to_push(), folder)
    with torch.no_grad():
        for parameter in trainer.lm.parameters():
            parameter.add_(0.01)
    trainer.save_weights(tmp_path)
    assert not same(trainer.weights_to_push(), folder)
    assert same(trainer.weights_to_push(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trainer.named_tensors())


def test_a_folder_with_stacked_experts_gets_them_stacked(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_experts("qwen3_moe")).save_pretrained(
        tmp_path, save_original_format=False
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / WEIGHTS)
    assert same(Trainer(str(tmp_path), TRAIN).weights_to_push(), tmp_path)


def test_what_the_folder_has_together_is_put_together(tmp_path: Path) -> None:
    config = HrmTextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(load_file(tmp_path / WEIGHTS)) < len(lm.state_dict())
    assert same(to_hf_names(lm, lm.state_dict().items()), tmp_path)


def test_what_is_in_the_folder_as_in_the_model_is_not_copied(tiny_qwen: Path) -> None:
    named = {
        name: tensor.detach() for name, tensor in AutoModelForCausalLM.from_pretrained(tiny_qwen).named_parameters()
    }
    told = dict(to_hf_names(AutoModelForCausalLM.from_pretrained(tiny_qwen), named.items()))
    assert list(told) == list(named)
    assert all(told[name] is tensor for name, tensor in named.items())


def test_experts_are_taken_apart_tensor_by_tensor_and_no_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(str(tiny_experts("qwen3_moe")), TRAIN)
    copies: list[weakref.ref[torch.Tensor]] = []

    def counted(lm: object, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = reverted(lm, tensors)
        if not any(part.is_meta for part in parts.values()):
            assert [each for each in copies if each() is not None] == [], "one tensor at a time"
            copies.extend(weakref.ref(part) for part in parts.values())
        return parts

    reverted = hf_names._revert_names
    monkeypatch.setattr(hf_names, "_revert_names", counted)
    for _ in range(2):  # once for each way that the weights go
        tensors = deduplicate(trainer.weights_to_push())
        assert copies == []
        for tensor in tensors.values():
            materialize(tensor)
        assert len(copies) == 2 * 4 * 3, "layers, experts and their matrices"
        copies.clear()
