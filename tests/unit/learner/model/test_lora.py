"""Adapters are trained, the model under them is not, and what leaves the learner is a whole model."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM

from support.episodes import make_group
from support.tiny_model import tiny_experts
from swarmq.config import Lora, Loss, Train
from swarmq.errors import LearnerError
from swarmq.learner.batching.micro_batches import MicroBatch, build_rank_batch
from swarmq.learner.checkpoint import save_load
from swarmq.learner.checkpoint.discovery import find_newest
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.lora import MARK
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.teachers.reference_models import FrozenModel
from swarmq.learner.train.trainer import Trainer
from swarmq.weights.format.packing import LowRankUpdate, PackedLayout, materialize
from swarmq.weights.push.transfers import deduplicate

EPISODES = tuple(make_group("a", (0.0, 1.0)))
CPU = torch.device("cpu")
TRAIN = Train(
    lora=Lora(rank=4, alpha=8.0), loss=Loss(name="reinforce"), learning_rate=1e-2, warmup_steps=0, token_log=False
)


HELD = msgspec.structs.replace(TRAIN, loss=Loss(name="reinforce", kl=0.5))
"""To the initial model."""


def record(version: int, train: Train = TRAIN) -> BatchRecord:
    return BatchRecord(index=BatchIndex(record=version, version=version), episodes=EPISODES, settings=train)


def has_adapters(lm: torch.nn.Module) -> bool:
    return any(MARK in name for name in lm.state_dict())


def logprobs(model: torch.nn.Module, one: MicroBatch) -> torch.Tensor:
    return model(PlacedLayout.of(one.layout, CPU), torch.from_numpy(one.temperatures)).logprobs.detach()


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
    (one,) = build_rank_batch(EPISODES, TRAIN, trainer.traits).passes
    torch.testing.assert_close(logprobs(LayoutModel(plain), one), logprobs(trainer.model, one), rtol=0, atol=1e-5)


def test_in_bf16_what_is_not_trained_is_kept_so_and_what_adapters_learn_is_not_rounded(model: Path) -> None:
    AcceleratorState._reset_state()
    half = Trainer(str(model), msgspec.structs.replace(TRAIN, mixed_precision="bf16"))
    AcceleratorState._reset_state()
    exact = Trainer(str(model), TRAIN)
    for name, parameter in half.lm.named_parameters():
        assert parameter.dtype == (torch.float32 if MARK in name else torch.bfloat16), name
    for trainer in (half, exact):
        trainer.step(record(1))
    ours, wanted, before = dict(half.named_tensors()), dict(exact.named_tensors()), Trainer(str(model), TRAIN)
    moved = {name: value for name, value in before.named_tensors() if not torch.equal(value, wanted[name])}
    assert moved
    for name, value in moved.items():
        start = value.bfloat16().float()
        way = float((ours[name] - start).norm())
        apart = float(((ours[name] - start) - (wanted[name] - value)).norm())
        assert apart < 0.3 * way, (name, apart / way)
        assert not torch.equal(ours[name].bfloat16().float(), ours[name]), f"{name} was rounded"
    (one,) = build_rank_batch(EPISODES, TRAIN, exact.traits).passes
    torch.testing.assert_close(logprobs(half.model, one), logprobs(exact.model, one), rtol=0, atol=0.05)
    for name, weight in half.weights_to_write():  # memory is got for what they say that they are
        whole = materialize(weight)
        assert (whole.shape, whole.dtype) == (weight.shape, weight.dtype), name


def test_what_is_pushed_is_merged_tensor_by_tensor(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(record(1))
    wanted = deduplicate(trainer.named_tensors())
    alive: list[weakref.ref[torch.Tensor]] = []

    def counted(adapter: LowRankUpdate, base: torch.Tensor) -> torch.Tensor:
        assert [each for each in alive if each() is not None] == [], "one merged tensor at a time"
        whole = added_to(adapter, base)
        alive.append(weakref.ref(whole))
        return whole

    added_to = LowRankUpdate.add_to
    monkeypatch.setattr(LowRankUpdate, "add_to", counted)
    tensors = deduplicate(trainer.weights_to_push())
    assert alive == []
    plan = PackedLayout.of(tensors, torch.float32)
    buffer = torch.empty(plan.size_bytes, dtype=torch.uint8)
    plan.pack(tensors, buffer)
    assert len(alive) > 4
    sent = plan.views(buffer)
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_is_a_whole_model_and_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    trainer, identity = Trainer(str(model), TRAIN), RunIdentity(run="r", policy="main", model=str(model))
    trainer.step(record(1))
    save_load.save_checkpoint(tmp_path, trainer, identity, model=str(model), keep=1)
    trainer.step(record(2))
    found = find_newest(tmp_path, identity)
    assert found is not None
    assert {file.name for file in model.glob("*.json")} <= {file.name for file in found.path.glob("*.json")}
    assert not has_adapters(AutoModelForCausalLM.from_pretrained(found.path))
    assert [file.name for file in found.path.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads all of them"
    again = Trainer(str(found.path), TRAIN, initial=str(model))
    save_load.restore(again, found)
    again.step(record(2))
    ours, wanted = dict(again.named_tensors()), dict(trainer.named_tensors())
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_without_lora_every_parameter_learns(tiny_qwen: Path) -> None:
    trainer = Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, lora=None))
    assert not has_adapters(trainer.lm)
    assert all(parameter.requires_grad for parameter in trainer.lm.parameters())


@pytest.mark.parametrize("wanted", ["nope", "lm_head", "embed_tokens", "self_attn", "norm", "proj"])
def test_modules_that_cannot_have_adapters_are_named_with_those_that_can(wanted: str, tiny_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, lora=Lora(modules=("q_proj", wanted)))
    choices = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(LearnerError, match=rf"train\.lora\.modules: .*'{wanted}'.* has {choices}$"):
        Trainer(str(tiny_qwen), train)


def test_experts_are_named_as_in_the_folder_and_a_layer_by_its_whole_name() -> None:
    experts = msgspec.structs.replace(TRAIN, lora=Lora(modules=("gate_proj", "up_proj", "layers.1.self_attn.q_proj")))
    names = {name for name, _ in Trainer(str(tiny_experts("qwen3_moe")), experts).lm.named_parameters() if MARK in name}
    assert {name.partition(MARK)[0].removeprefix("model.layers.") for name in names} == {
        "0.mlp.experts",
        "1.mlp.experts",
        "1.self_attn.q_proj",
    }


@pytest.mark.parametrize(
    "now", [None, Lora(rank=8, alpha=8.0), Lora(rank=4, alpha=16.0), Lora(rank=4, modules=("q_proj",))]
)
def test_a_run_goes_on_with_the_adapters_that_it_has(now: Lora | None, tiny_qwen: Path, tmp_path: Path) -> None:
    """Others would not make the weights that engines sample with."""
    found = saved(tiny_qwen, TRAIN, tmp_path)
    with pytest.raises(
        LearnerError, match=r"step-00000001 was trained with train\.lora = \{rank = 4, alpha = 8\}, not with"
    ):
        Trainer(str(found), msgspec.structs.replace(TRAIN, lora=now), initial=str(tiny_qwen))


def test_adapters_do_not_begin_in_the_midst_of_a_run(tiny_qwen: Path, tmp_path: Path) -> None:
    found = saved(tiny_qwen, msgspec.structs.replace(TRAIN, lora=None), tmp_path)
    with pytest.raises(LearnerError, match=r"was trained with no train\.lora, not with train\.lora = \{rank = 4"):
        Trainer(str(found), TRAIN, initial=str(tiny_qwen))


def test_a_run_that_begins_from_a_checkpoint_has_its_weights_and_fresh_adapters(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    """What its adapters added is in the weights already."""
    found = saved(tiny_qwen, TRAIN, tmp_path)
    begun, wanted = Trainer(str(found), TRAIN), AutoModelForCausalLM.from_pretrained(found).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in begun.named_tensors())


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_the_reference_is_the_initial_model_after_steps_and_after_a_resume(
    model: Path, layout: str, tmp_path: Path
) -> None:
    train, identity = (
        msgspec.structs.replace(HELD, layout=layout),
        RunIdentity(run="r", policy="main", model=str(model)),
    )
    trainer = Trainer(str(model), train)
    initial = FrozenModel(str(model), trainer.accelerator, role="reference", vocab=0)
    works = build_rank_batch(EPISODES, train, trainer.traits).passes

    def judged(by: Any) -> list[torch.Tensor]:
        return [
            by.score(PlacedLayout.of(one.layout, CPU), torch.from_numpy(one.temperatures)).logprobs for one in works
        ]

    def same(policy: Trainer) -> bool:
        ours = judged(policy.frozen.of(train)["reference"])
        moved = max(float((logprobs(policy.model, o) - w).abs().max()) for o, w in zip(works, ours, strict=True))
        assert (moved > 1e-3) == (policy.version > 0), "the policy has its adapters on"
        return all(torch.equal(our, wanted) for our, wanted in zip(ours, judged(initial), strict=True))

    assert same(trainer)
    for version in (1, 2):
        trainer.step(record(version, train))
        assert same(trainer)
    save_load.save_checkpoint(tmp_path, trainer, identity, model=str(model), keep=1)
    found = find_newest(tmp_path, identity)
    assert found is not None
    again = Trainer(str(found.path), train, initial=str(model))
    save_load.restore(again, found)
    assert same(again)


def test_steps_are_those_with_the_initial_model_loaded_again_which_a_name_alone_does(model: Path) -> None:
    named = msgspec.structs.replace(HELD, reference=str(model))
    figures, weights = [], []
    for train, models in ((HELD, 1), (named, 2)):
        load = AutoModelForCausalLM.from_pretrained
        with mock.patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=load) as loaded:
            trainer = Trainer(str(model), train)
            assert loaded.call_count == models
            figures.append([trainer.step(record(version, train)) for version in (1, 2, 3)])
            assert loaded.call_count == models
        weights.append(dict(trainer.named_tensors()))
    assert figures[0][-1]["kl_reference"] > 0
    for ours, theirs in zip(*figures, strict=True):
        assert [ours[name] for name in ("loss", "grad_norm", "kl_reference")] == [
            theirs[name] for name in ("loss", "grad_norm", "kl_reference")
        ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_adapters_are_on_and_trained_again_when_the_reference_fails(model: Path) -> None:
    trainer = Trainer(str(model), HELD)
    trainer.step(record(1, HELD))
    (one,) = build_rank_batch(EPISODES, HELD, trainer.traits).passes
    before, trained = logprobs(trainer.model, one), [p.requires_grad for p in trainer.lm.parameters()]
    with pytest.raises(IndexError):
        trainer.frozen.of(HELD)["reference"].score(
            PlacedLayout.of(msgspec.structs.replace(one.layout, token_ids=one.layout.token_ids + 10**6), CPU),
            torch.from_numpy(one.temperatures),
        )
    assert torch.equal(logprobs(trainer.model, one), before)
    assert [p.requires_grad for p in trainer.lm.parameters()] == trained
    assert trainer.lm.training


def test_a_batch_of_a_start_with_adapters_trains_without_them(tiny_qwen: Path) -> None:
    """Nothing that the policy is was decided by the batch."""
    plain = msgspec.structs.replace(HELD, lora=None)
    ours, wanted = Trainer(str(tiny_qwen), plain), Trainer(str(tiny_qwen), plain)
    assert ours.step(record(1, HELD))["loss"] == wanted.step(record(1, plain))["loss"]


def saved(model: Path, train: Train, folder: Path) -> Path:
    """The checkpoint of a run that made a step."""
    trainer = Trainer(str(model), train)
    trainer.step(record(1))
    save_load.save_checkpoint(
        folder, trainer, RunIdentity(run="r", policy="main", model=str(model)), model=str(model), keep=1
    )
    return folder / "step-00000001"
