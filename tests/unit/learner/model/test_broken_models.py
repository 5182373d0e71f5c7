"""A folder whose files do not hold the model that its config.json describes is refused: what is missing would be random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2Model

from swarmq.config import Loss, Train
from swarmq.errors import LearnerError, SetUpError
from swarmq.learner.memory.plan import load_shape
from swarmq.learner.model.layout_model import LayoutModel
from swarmq.learner.model.loading import load_lm
from swarmq.learner.train.trainer import Trainer

Edit = Callable[[Path], None]
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
THREE_LAYERS = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}


def configured(**fields: Any) -> Edit:
    def edit(folder: Path) -> None:
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | fields))

    return edit


def weighted(change: Callable[[dict[str, Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def cut(size: int) -> Edit:
    def edit(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:size])

    return edit


def edited(model: Path, folder: Path, edit: Edit) -> str:
    shutil.copytree(model, folder)
    edit(folder)
    return str(folder)


UP = "model.layers.1.mlp.up_proj.weight"
WRONG = {
    "a missing matrix": (weighted(lambda w: w.pop(UP)), rf"\(missing: {UP}\)"),
    "a missing head": (configured(tie_word_embeddings=False), r"\(missing: lm_head.weight\)"),
    "a missing layer": (configured(**THREE_LAYERS), r"\(missing: model.layers.2.* and 8 more\)"),
    "another shape": (weighted(lambda w: w.update({UP: torch.ones(2, 2)})), rf"\(of another shape: {UP}\)"),
    "a further layer": (configured(**ONE_LAYER), r"\(of layers that it does not have: model.layers.1.* and 8 more\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_are_not_those_of_the_configuration_are_named(name: str, tmp_path: Path, tiny_qwen: Path) -> None:
    edit, says = WRONG[name]
    folder = edited(tiny_qwen, tmp_path / "model", edit)
    with pytest.raises(
        LearnerError, match=f"model {folder}: its weights are not those .*{says}.*fetch its files again"
    ):
        load_lm(folder, gradient_checkpointing=False)


def test_layers_are_counted_by_whatever_name_a_family_gives_them(tmp_path: Path) -> None:
    """And where a folder has the decoder alone."""
    GPT2Model(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=16)).save_pretrained(tmp_path)
    load_lm(str(tmp_path), gradient_checkpointing=False)
    configured(n_layer=1)(tmp_path)
    with pytest.raises(LearnerError, match=r"of layers that it does not have: .*h.1.attn"):
        load_lm(str(tmp_path), gradient_checkpointing=False)


@pytest.mark.parametrize(
    "further",
    [
        ("visual.blocks.7.weight", "mtp.layers.0.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"),
    ],
    ids=["elsewhere", "a layer that predicts several tokens"],
)
def test_weights_beside_the_language_model_are_left_out(
    further: tuple[str, ...], tmp_path: Path, tiny_qwen: Path
) -> None:
    folder = edited(tiny_qwen, tmp_path / "model", weighted(lambda w: w.update({n: torch.ones(2) for n in further})))
    configured(num_nextn_predict_layers=1)(Path(folder))
    loaded, plain = (load_lm(source, gradient_checkpointing=False) for source in (folder, str(tiny_qwen)))
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in loaded.state_dict().items())


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_judge_without_all_of_its_weights_is_refused_under_its_setting(
    role: str, tmp_path: Path, tiny_qwen: Path
) -> None:
    broken = edited(tiny_qwen, tmp_path / "broken", weighted(lambda w: w.pop(UP)))
    loss = Loss(kl=0.1) if role == "reference" else Loss(name="distill")
    train = Train(gradient_checkpointing=False, token_log=False, trackers=(), loss=loss, **{role: broken})
    with pytest.raises(LearnerError, match=rf"train\.{role}: model {broken}: .*missing: {UP}"):
        Trainer(str(tiny_qwen), train)


@pytest.mark.parametrize("size", [0, 100, 5000], ids=["empty", "within the header", "within the weights"])
def test_a_file_that_was_cut_is_refused(size: int, tmp_path: Path, tiny_qwen: Path) -> None:
    folder = edited(tiny_qwen, tmp_path / "model", cut(size))
    with pytest.raises(LearnerError, match=f"model {folder}: its weights cannot be loaded: .*fetch its files again"):
        load_lm(folder, gradient_checkpointing=False)


def test_a_quantised_model_that_cannot_be_loaded_is_refused(tmp_path: Path, tiny_qwen: Path) -> None:
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    folder = edited(tiny_qwen, tmp_path / "model", configured(quantization_config=quantised))
    with pytest.raises(LearnerError, match=f"model {folder}: .*use the model with weights that are not quantised"):
        load_lm(folder, gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": "big"}, "cannot be read: .*expected int, got str"),
        ({"num_attention_heads": 0}, "does not describe a model that transformers can build: ZeroDivisionError"),
        (
            {"rope_parameters": {"rope_type": "odd", "rope_theta": 1.0}},
            "model that transformers can build: KeyError: 'odd'",
        ),
    ],
    ids=["a word for a number", "no heads", "unknown positions"],
)
def test_a_configuration_of_no_model_is_refused_before_anything_is_planned_or_loaded(
    fields: dict[str, Any], says: str, tmp_path: Path, tiny_qwen: Path
) -> None:
    folder = edited(tiny_qwen, tmp_path / "model", configured(**fields))
    for look in (load_shape, lambda source: load_lm(source, gradient_checkpointing=False)):
        with pytest.raises(LearnerError, match=f"model {folder}: .*{says}.*fetch its files again"):
            look(folder)


NO_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)


def nothing_is_granted(*_: object, **__: object) -> NoReturn:
    raise NO_MEMORY


def test_a_host_without_memory_for_a_model_is_not_said_to_have_broken_files(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", nothing_is_granted)
    with pytest.raises(LearnerError, match="can't allocate memory.*; free some of the host's memory") as refused:
        load_lm(str(tiny_qwen), gradient_checkpointing=False)
    assert not isinstance(refused.value, SetUpError), "there may be more of it later"


def test_a_host_without_memory_for_the_trial_of_a_model_is_not_said_to_have_another_model(
    tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load_lm(str(tiny_qwen), gradient_checkpointing=False)
    monkeypatch.setattr(type(lm), "forward", nothing_is_granted)
    with pytest.raises(LearnerError, match="no memory for a small example .*; free some of it") as refused:
        LayoutModel(lm)
    assert not isinstance(refused.value, SetUpError), "there may be more of it later"
