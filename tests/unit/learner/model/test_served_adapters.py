"""What an engine makes of adapters and the folder that it serves is what the learner would have sent whole; of another folder, nothing."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from benchmarks.vlm.architecture import QWEN2_5_VL, QWEN3_VL
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.tiny_model import tiny_experts, tiny_model, tiny_tied
from support.tiny_vision_model import tiny_vision_model
from swarmq.config import Lora, Train
from swarmq.learner.model.lora import MARK
from swarmq.learner.train.trainer import Trainer
from swarmq.weights.format import adapter_file, served_folder
from swarmq.weights.format.conventions import UNTOUCHED
from swarmq.weights.format.packing import materialize
from swarmq.weights.format.served_folder import ServedFolder
from swarmq.weights.push.transfers import AdapterTransfer, FileTransfer, deduplicate

CPU = torch.device("cpu")
TRAIN = Train(lora=Lora(rank=4, alpha=6.0), token_log=False)
ATTENTION = msgspec.structs.replace(TRAIN, lora=Lora(rank=4, modules=("q_proj", "v_proj")))
FILE = "model.safetensors"
FAR = ["http://far.example:8000"]
Q, NORM, HEAD = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"


def trained(model: Path, train: Train = TRAIN) -> Trainer:
    trainer = Trainer(str(model), train)
    learn(trainer, seed=0)
    return trainer


def learn(trainer: Trainer, seed: int) -> None:
    """Other adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.lm.named_parameters():
            if MARK in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


Send = Callable[..., Path]


@pytest.fixture
def send(tmp_path: Path) -> Iterator[Send]:
    """`send(trainer, dtype)`: the file that an engine gets."""
    transfer = AdapterTransfer(FAR, tmp_path / "sent")

    def path(trainer: Trainer, dtype: str | None = "float32") -> Path:
        return Path(transfer.publish(deduplicate(trainer.weights_to_push()), 1, dtype).update_info["adapters"])

    yield path
    transfer.withdraw()


def merged(path: Path, model: Path | ServedFolder) -> dict[str, torch.Tensor]:
    folder = ServedFolder(model) if isinstance(model, Path) else model
    with adapter_file.open_merged(str(path), folder, CPU) as weights:
        tensors = {name: materialize(weight).clone() for name, weight in weights.items()}
        assert all(weights[name].shape == tensor.shape for name, tensor in tensors.items())
        return tensors


def whole(trainer: Trainer, dtype: str | None = "float32") -> dict[str, torch.Tensor]:
    """As a push without adapters has them."""
    wanted = getattr(torch, dtype) if dtype else None
    return {name: materialize(weight).to(wanted) for name, weight in deduplicate(trainer.weights_to_push()).items()}


def same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(ours) == list(wanted) and all(
        torch.equal(tensor, wanted[name]) and tensor.dtype == wanted[name].dtype for name, tensor in ours.items()
    )


def saved(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(folder)
    return folder


MODELS = {
    "float32": lambda _: tiny_model(),
    "bfloat16": lambda folder: saved(tiny_model(), folder, torch.bfloat16),
    "experts": lambda _: tiny_experts("qwen3_moe"),
    "gemma2": lambda _: tiny_tied("gemma2"),
    "bloom": lambda _: tiny_tied("bloom"),
    "qwen2_5_vl": lambda _: tiny_vision_model(QWEN2_5_VL),
    "qwen3_vl": lambda _: tiny_vision_model(QWEN3_VL),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_merges_to_the_bit_what_the_learner_merges(kind: str, dtype: str, send: Send, tmp_path: Path) -> None:
    model = MODELS[kind](tmp_path / "model")
    trainer = trained(model)
    before = whole(Trainer(str(model), TRAIN), dtype)
    wanted = whole(trainer, dtype)
    assert sum(not torch.equal(before[name], tensor) for name, tensor in wanted.items()) >= 8, "adapters add nothing"
    assert same(merged(send(trainer, dtype), model), wanted)


@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_merges_to_the_bit_where_the_learner_keeps_in_bf16_what_it_does_not_train(
    kind: str, send: Send, tmp_path: Path
) -> None:
    model = MODELS[kind](tmp_path / "model")
    AcceleratorState._reset_state()
    trainer = trained(model, msgspec.structs.replace(TRAIN, mixed_precision="bf16"))
    AcceleratorState._reset_state()
    exact = trained(model)
    for dtype in ("bfloat16", "float32"):
        ours = merged(send(trainer, dtype), model)
        assert same(ours, whole(trainer, dtype))
        rounding = {
            name: float((ours[name].float() - each.float()).abs().max()) for name, each in whole(exact, dtype).items()
        }
        assert max(rounding.values()) < 0.01, rounding


def test_an_engine_that_does_not_say_its_type_gets_what_is_merged_in_float32(send: Send, tmp_path: Path) -> None:
    model = saved(tiny_model(), tmp_path / "half", torch.bfloat16)
    trainer = trained(model)
    told, wanted = merged(send(trainer, None), model), whole(trainer)
    assert told[Q].dtype == torch.float32
    assert same({name: tensor.float() for name, tensor in told.items()}, wanted)


def test_the_file_holds_adapters_and_nothing_else_of_the_model(tiny_qwen: Path, send: Send, tmp_path: Path) -> None:
    trainer = trained(tiny_qwen)
    tensors = load_file(send(trainer))
    matrices = {name for name in load_file(tiny_qwen / FILE) if "_proj" in name}
    assert tensors.keys() == {f"{name}:{part}" for name in matrices for part in ("down", "up")}
    assert tensors[f"{Q}:down"].shape[0] == tensors[f"{Q}:up"].shape[1] == 4
    few, all_of = (
        send(trained(tiny_model())),
        FileTransfer(FAR, tmp_path).publish(load_file(tiny_model() / FILE), 1, None),
    )
    assert few.stat().st_size < Path(all_of.update_info["path"]).stat().st_size / 15


def test_a_tied_head_is_neither_sent_nor_made_twice(send: Send) -> None:
    model = tiny_model()
    assert HEAD in trained(model).lm.state_dict()
    assert HEAD not in merged(send(trained(model)), model)


def test_experts_and_routers_that_adapters_change_are_sent_whole_and_others_not_at_all(send: Send) -> None:
    model = tiny_experts("qwen3_moe")
    stacked = {name for name in load_file(model / FILE) if ".mlp." in name}
    assert {name for name in load_file(send(trained(model))) if ":" not in name} == stacked
    trainer = trained(model, ATTENTION)
    path = send(trainer)
    assert {name.partition(":")[0].split(".")[-2] for name in load_file(path)} == {"q_proj", "v_proj"}
    assert same(merged(path, model), whole(trainer))


def test_what_is_not_known_to_be_the_folders_is_sent_whole(tiny_qwen: Path, send: Send) -> None:
    """Somebody trains it beside the adapters."""
    trainer = trained(tiny_qwen)
    norm = trainer.lm.get_parameter(NORM).requires_grad_()
    with torch.no_grad():
        norm.add_(0.1)
    path = send(trainer, "bfloat16")
    assert torch.equal(load_file(path)[NORM], norm.bfloat16())
    assert same(merged(path, tiny_qwen), whole(trainer, "bfloat16"))


def test_adapters_of_a_later_push_replace_those_before(tiny_qwen: Path, send: Send) -> None:
    trainer, folder = trained(tiny_qwen), ServedFolder(tiny_qwen)
    first = merged(send(trainer), folder)
    learn(trainer, seed=1)
    second = merged(send(trainer), folder)
    assert not torch.equal(first[Q], second[Q])
    assert same(second, whole(trainer))


def test_a_base_that_was_written_to_is_looked_at_again(tiny_qwen: Path, send: Send) -> None:
    trainer = trained(tiny_qwen)
    merged(send(trainer), tiny_qwen)
    with torch.no_grad():
        trainer.lm.get_parameter(NORM).add_(0.1)
    with pytest.raises(ValueError, match=rf"1 differ from the learner's, such as \['{NORM}'\]"):
        merged(send(trainer), tiny_qwen)


@pytest.mark.parametrize("kind", ["float32", "experts"])
def test_checksums_are_computed_once_and_again_of_what_was_written_to(
    kind: str, send: Send, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of experts, too, which are taken apart for that."""
    trainer = trained(MODELS[kind](tmp_path / "model"), ATTENTION)
    summed = mock.Mock(side_effect=adapter_file.checksum_tensor)
    monkeypatch.setattr(adapter_file, "checksum_tensor", summed)
    send(trainer)
    weights = {name: weight for name, weight in deduplicate(trainer.weights_to_push()).items() if "norm" not in name}
    assert summed.call_count >= len(weights)
    summed.reset_mock()
    learn(trainer, seed=1)
    send(trainer)
    assert summed.call_count == 0
    with torch.no_grad():
        for name, parameter in trainer.lm.named_parameters():
            if "layers.0.mlp" in name:
                parameter.add_(0.1)
    send(trainer)
    changed = sum("layers.0.mlp" in name for name in weights)
    assert changed <= summed.call_count <= 2 * changed


def another_of_the_same_shape(folder: Path) -> None:
    save_file(load_file(tiny_model(seed=1) / FILE), folder / FILE)


def one_more_number(folder: Path) -> None:
    tensors = load_file(folder / FILE)
    tensors[NORM][-1] += 1e-3
    save_file(tensors, folder / FILE)


def rounded(folder: Path) -> None:
    save_file({name: tensor.bfloat16() for name, tensor in load_file(folder / FILE).items()}, folder / FILE)


def incomplete(folder: Path) -> None:
    save_file({name: tensor for name, tensor in load_file(folder / FILE).items() if name != NORM}, folder / FILE)


def gone(folder: Path) -> None:
    (folder / FILE).unlink()


@pytest.mark.parametrize("change", [another_of_the_same_shape, one_more_number, rounded, incomplete, gone])
@pytest.mark.parametrize("when", ["before", "later"])
def test_nothing_is_merged_into_another_model(
    change: Callable[[Path], None], when: str, send: Send, tmp_path: Path
) -> None:
    served = Path(shutil.copytree(tiny_model(), tmp_path / "served"))
    folder, path = ServedFolder(served), send(trained(tiny_model()))
    if when == "later":
        merged(path, folder)
    change(served)
    with pytest.raises(ValueError, match=f"{UNTOUCHED}: .*differ from the learner's"):
        merged(path, folder)


@pytest.mark.parametrize(("learners", "engines"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_same_numbers_in_another_type_are_the_same_model(
    learners: torch.dtype, engines: torch.dtype, send: Send, tmp_path: Path
) -> None:
    half = saved(tiny_model(), tmp_path / "half", torch.bfloat16)
    ours, theirs = (saved(half, tmp_path / name, dtype) for name, dtype in (("ours", learners), ("theirs", engines)))
    trainer = trained(ours)
    assert same(merged(send(trainer, "bfloat16"), theirs), whole(trainer, "bfloat16"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def missing(path: Path) -> None:
    path.unlink()


def of_all_weights(path: Path) -> None:
    save_file(load_file(tiny_model() / FILE), path)


def without_a_part(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.pop(f"{Q}:up"))


def of_another_shape(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({f"{Q}:up": tensors[f"{Q}:up"][:-1].clone()}))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        outline = file.metadata()
    change(tensors)
    save_file(tensors, path, outline)


@pytest.mark.parametrize("damage", [cut, missing, of_all_weights, without_a_part, of_another_shape])
def test_a_damaged_file_is_refused_before_anything_is_made(damage: Callable[[Path], None], send: Send) -> None:
    path = send(trained(tiny_model()))
    damage(path)
    with (
        pytest.raises(ValueError, match=f"cannot be merged, {UNTOUCHED}: "),
        adapter_file.open_merged(str(path), ServedFolder(tiny_model()), CPU),
    ):
        pytest.fail("weights of a damaged file")


@pytest.mark.parametrize("size", [1, 3, 4, 7, 16, 17, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_number_wherever_it_lies(size: int, dtype: torch.dtype) -> None:
    checksum = functools.partial(served_folder.checksum_tensor, dtype=dtype, chunk_elements=16)
    numbers = torch.linspace(0.5, 1.5, size + 1, dtype=dtype)
    plain, shifted = numbers[1:].clone(), numbers[1:]
    expected = checksum(plain)
    assert checksum(shifted) == expected
    for place in range(size):
        other = plain.clone()
        other[place] *= 1.5
        assert checksum(other) != expected
