"""Adapters on GPUs: on one, on two that hold the whole model each, on two that share it out, and in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from support import lora_ranks
from support.episodes import make_qwen
from support.launch import launch
from support.same_gradient import assert_same_way
from swarmq.config import Lora, Loss, Train
from swarmq.learner.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]

TRAIN = Train(
    lora=Lora(rank=4, alpha=8.0),
    loss=Loss(name="reinforce", kl=0.5),
    learning_rate=1e-3,
    warmup_steps=0,
    micro_batch_tokens=88,
    mixed_precision="no",
    token_log=False,
    trackers=(),
)
WAYS = {
    "alone": (1, TRAIN),
    "two": (2, TRAIN),
    "two, sharded": (2, msgspec.structs.replace(TRAIN, sharding="full")),
}
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 1024}

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_ranks_train_adapters_as_one_does(tmp_path: Path) -> None:
    """What each checks of itself is in support/lora_ranks.py."""
    model = make_qwen(tmp_path / "model")
    alone, *others = (learned(model, ranks, train, tmp_path / way) for way, (ranks, train) in WAYS.items())
    for made in others:
        assert_same_steps(made, alone, model, lora_ranks.NEAR)


@two_gpus
def test_layers_compute_in_bf16_over_weights_that_are_kept_so(tmp_path: Path) -> None:
    model = make_qwen(tmp_path / "model")
    exact = learned(model, 1, TRAIN, tmp_path / "exact")
    for way, (ranks, train) in WAYS.items():
        made = learned(model, ranks, msgspec.structs.replace(train, mixed_precision="bf16"), tmp_path / way)
        assert_same_steps(made, exact, model, lora_ranks.ROUNDED)


def assert_same_steps(
    made: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], model: Path, tolerance: float
) -> None:
    """Of all weights that adapters are for."""
    before = lora_ranks.first(model)
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, wanted[name])]
    assert 0 < len(moved) < len(before)
    ours, theirs, start = ({name: each[name].float() for name in moved} for each in (made, wanted, before))
    assert_same_way(ours, theirs, start, tolerance)


def learned(model: Path, ranks: int, train: Train, folder: Path) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    folder.mkdir()
    ways = msgspec.json.encode({folder.name: train}).decode()
    launch(ranks, lora_ranks.__file__, str(model), ways, str(folder.parent))
    made: dict[str, torch.Tensor] = torch.load(folder / "next", map_location="cpu")
    return made


def test_a_checkpoint_of_adapters_takes_one_merged_weight_of_the_gpu_at_a_time(tmp_path: Path) -> None:
    """It has no room for the whole model once more."""
    config = Qwen3Config(**SIZES, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    trainer = Trainer(str(tmp_path / "model"), Train(lora=Lora(rank=4), token_log=False, trackers=()))
    (saved := tmp_path / "saved").mkdir()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.save_weights(saved)
    taken = torch.cuda.max_memory_allocated() - before
    sizes = [tensor.nbytes for tensor in load_file(saved / "model.safetensors").values()]
    assert taken < 8 * max(sizes) < sum(sizes) / 2, (taken, max(sizes), sum(sizes))
