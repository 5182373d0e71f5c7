"""The floating-point operations of a step are those that torch counts, whatever is trained and of however many experts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from support.episodes import make_group
from support.tiny_model import tiny_experts
from swarmq.config import Lora, Train
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.distributed.sharding import compute_dtype
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.throughput import measure_matrix_rate
from swarmq.learner.train.trainer import Trainer

TRAIN = Train(gradient_checkpointing=False, token_log=False, layout="rows", micro_batch_tokens=256)
EPISODES = tuple(make_group("a", turns=1, length=60) + make_group("b", turns=1, length=60))
ADAPTERS = Lora(rank=4, alpha=8.0)
OF_ATTENTION = Lora(rank=4, alpha=8.0, modules=("q_proj", "v_proj"))
"""Those of stacked experts are multiplied with each other before any token comes, which is no part of the model."""


def trainer_of(folder: Path, lora: Lora | None) -> Trainer:
    trainer = Trainer(str(folder), msgspec.structs.replace(TRAIN, lora=lora))
    trainer.lm.enable_input_require_grads()  # below the first adapter torch computes no gradient, which is not looked at
    if hasattr(trainer.lm.config, "num_experts_per_tok"):
        trainer.lm.set_experts_implementation("eager")  # one after another, in products that torch knows
    return trainer


def counted(trainer: Trainer) -> tuple[float, float]:
    """What the step says, and what torch counts of products with weights, which leaves attention to us: for each pair of tokens,
    query by key and weight by value, and twice that backward."""
    with FlopCounterMode(display=False) as counter:
        fields = trainer.accumulate(build_rank_batch(EPISODES, TRAIN, trainer.traits), TRAIN).fields
    products = sum(
        counter.get_flop_counts()["Global"].get(product, 0) for product in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    config = trainer.lm.config
    width = trainer.lm.model.layers[0].self_attn.head_dim * config.num_attention_heads
    lengths = [(len(turn.prompt_ids) + len(turn.sampled_ids)) // 4 for episode in EPISODES for turn in episode.turns]
    pairs = config.num_hidden_layers * sum(length * (length + 1) // 2 for length in lengths)
    return fields["flops"], products + 3 * 4 * width * pairs


@pytest.mark.parametrize("lora", [None, ADAPTERS])
def test_a_dense_model_computes_what_torch_counts(tiny_qwen: Path, lora: Lora | None) -> None:
    ours, theirs = counted(trainer_of(tiny_qwen, lora))
    assert ours == pytest.approx(theirs, rel=0.02), "norms count as products"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
@pytest.mark.parametrize("lora", [None, OF_ATTENTION])
def test_experts_compute_the_tokens_that_are_routed_to_them(family: str, lora: Lora | None) -> None:
    ours, theirs = counted(trainer_of(tiny_experts(family), lora))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_adapters_of_experts_compute_the_same_tokens_as_these() -> None:
    """By hand: in two layers those of query, key, value and output, of the router, and of the two experts of a token, whose gate and
    up projection are one matrix with twice the rank."""
    attention, router = 4 * (128 + 128) + 2 * 4 * (128 + 64) + 4 * (128 + 128), 4 * (128 + 4)
    experts = 2 * (8 * (128 + 2 * 96) + 4 * (96 + 128))
    cost = trainer_of(tiny_experts("qwen3_moe"), ADAPTERS).traits.cost
    assert cost.token - cost.frozen == 2 * 2 * (attention + router + experts)


def test_mfu_is_these_operations_over_what_the_device_can_do_in_that_time(tiny_qwen: Path) -> None:
    trainer = trainer_of(tiny_qwen, None)
    fields = trainer.step(BatchRecord(index=BatchIndex(record=1, version=1), episodes=EPISODES, settings=TRAIN))
    rate = measure_matrix_rate(trainer.accelerator.device, compute_dtype(trainer.accelerator))
    assert fields["mfu"] == pytest.approx(fields["flops"] / (rate * fields["train_s"]))
