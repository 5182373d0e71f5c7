"""Run on two ranks: the gradient of a batch that forks and of a long row, whose passes each rank computes alone or both share. Rank 0
saves gradients, peaks of memory and times.

python context_cuda.py FOLDER_OF_MODELS LONG_ROW_TOKENS TARGET
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.episodes import make_group
from support.learner_ranks import forget, own_work
from swarmq.config import Loss, Train
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.distributed.sharding import full_tensor
from swarmq.learner.model import layout_attention
from swarmq.learner.model.layout_model import LayoutModel
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout, VersionSpan, pack_floats, pack_ids

PASS = 2048
"""Tokens of a pass of the batch that forks."""
ANSWER = 1000
"""Tokens that are sampled at the end of the long row: a rank that computes its middle scores none."""
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1 << 17,
    "initializer_range": 0.05,
}
FORKING = (*make_group("a", (0.0, 1.0, 0.5), turns=5, length=90), *make_group("b", (2.0, 0.0), turns=7, length=60))
TRAIN = Train(loss=Loss(name="reinforce"), sharding="none", token_log=False, trackers=(), micro_batch_tokens=PASS)


def main(models: Path, tokens: int, target: Path) -> None:
    made = exactly(str(models / "windows")) | in_bf16(str(models / "full"), tokens)
    if torch.distributed.get_rank() == 0:
        torch.save(made, target)
    torch.distributed.barrier()


def save_models(folder: Path) -> None:
    """For `main`."""
    windows = {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0, "head_dim": 32}
    for name, fields in {"windows": windows, "full": {}}.items():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**(SHAPE | fields))).save_pretrained(folder / name)


def exactly(model: str) -> dict[str, Any]:
    """In FP32, as rows and as trees, of a model whose layers look 100 tokens back. Layers are left uncompiled, for time's sake."""
    made = {}
    with (
        mock.patch.object(layout_attention, "LENGTHS", [PASS]),
        mock.patch.object(LayoutModel, "compile_layers"),
        torch._dynamo.config.patch(optimize_ddp=False),  # which compiling layers does
    ):
        for ranks in (1, 2):
            train = msgspec.structs.replace(TRAIN, mixed_precision="no", context_parallel=ranks)
            trainer = Trainer(model, train)
            for layout in ("rows", "tree"):
                made[f"fp32 {layout} {ranks}"] = gradient(
                    trainer, msgspec.structs.replace(train, layout=layout), FORKING
                )
            del trainer
            release()
    return made


def in_bf16(model: str, tokens: int) -> dict[str, Any]:
    """The same batch as trees, and a row of `tokens`: its peak of memory above what there was before, and how long it took."""
    made: dict[str, Any] = {}
    row = long_row(tokens)
    with mock.patch.object(layout_attention, "LENGTHS", [tokens]):
        for name, changes in {
            "alone": {},
            "shared": {"context_parallel": 2},
            "shared, sharded": {"context_parallel": 2, "sharding": "full"},
        }.items():
            train = msgspec.structs.replace(
                TRAIN, mixed_precision="bf16", micro_batch_tokens=tokens, layout="tree", **changes
            )
            trainer = Trainer(model, train)
            made[f"bf16 {name}"] = gradient(trainer, train, FORKING)
            made[f"long {name}"] = gradient(trainer, train, row)
            made[f"figures {name}"] = measured(trainer, train, row)
            del trainer
            release()
    return made


def gradient(trainer: Trainer, train: Train, episodes: tuple[Rollout, ...]) -> dict[str, Tensor]:
    trainer.accumulate(own_work(trainer, train, episodes), train)
    made = {name: full_tensor(parameter.grad).float().cpu() for name, parameter in trainer.lm.named_parameters()}
    trainer.optimizer.zero_grad()
    return made


def measured(trainer: Trainer, train: Train, episodes: tuple[Rollout, ...]) -> dict[str, float]:
    """Of the rank that took the most memory."""
    device, work = trainer.accelerator.device, own_work(trainer, train, episodes)
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    torch.distributed.barrier()
    began = time.perf_counter()
    fields = trainer.accumulate(work, train).fields
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    trainer.optimizer.zero_grad()
    taken = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    most = trainer.accelerator.gather(torch.tensor([float(taken)], device=device)).max()
    return {"peak_gib": float(most) / (1 << 30), "seconds": seconds, "loss": fields["loss"]}


def long_row(tokens: int) -> tuple[Rollout, ...]:
    """Two episodes, one of which has a call of `tokens`; without another there is nothing to compare it with."""
    torch.manual_seed(1)
    ids = torch.randint(SHAPE["vocab_size"], (tokens,)).tolist()
    answer = min(ANSWER, tokens // 8)
    first, second = make_group("long", (1.0, 0.0), turns=1)
    (turn,) = first.turns
    long = msgspec.structs.replace(
        turn,
        prompt_ids=pack_ids(ids[:-answer]),
        sampled_ids=pack_ids(ids[-answer:]),
        logprobs=pack_floats([-7.5] * answer),
        versions=(VersionSpan(version=0, start=0, end=answer),),
    )
    return msgspec.structs.replace(first, turns=(long,)), second


def release() -> None:
    torch.compiler.reset()  # what is compiled holds on to the model it was compiled for
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    forget()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    leave_group()
