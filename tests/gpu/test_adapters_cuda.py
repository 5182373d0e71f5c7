"""What adapters add is merged for a checkpoint in host memory: a GPU has no room for the whole model once more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from swarmq.config import Lora, Train
from swarmq.learner.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 1024}


def test_a_checkpoint_of_adapters_takes_one_merged_weight_of_the_gpu_at_a_time(tmp_path: Path) -> None:
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
