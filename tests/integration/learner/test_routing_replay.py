"""Steps with replayed routing are the same after a crash, on several ranks, and only with the recorded experts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from support import expert_ranks
from support.episodes import make_group, route
from support.launch import launch
from support.same_gradient import assert_same_way
from support.tiny_model import tiny_experts
from swarmq.config import Loss, Policy, Train
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity, decode_record, encode_record
from swarmq.learner.train.trainer import Trainer, load_trainer

TRAIN = Train(
    loss=Loss(name="reinforce"), learning_rate=1e-3, warmup_steps=0, token_log=False, trackers=(), routing_replay=True
)


def make_record(version: int, train: Train = TRAIN) -> BatchRecord:
    episodes = tuple(route(make_group(f"a{version}", (0.0, 1.0))))
    return BatchRecord(index=BatchIndex(record=version, version=version), episodes=episodes, settings=train)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_tensors()}


def test_a_resumed_learner_makes_the_same_step_bit_for_bit(tmp_path: Path) -> None:
    """From the checkpoint and the batch log, as after a crash; also if the setting was changed meanwhile."""
    model = str(tiny_experts("qwen3_moe"))
    trainer, identity = Trainer(model, TRAIN), RunIdentity(run="r", policy="main", model=model)
    trainer.step(make_record(1))
    save_load.save_checkpoint(tmp_path, trainer, identity, model=model, keep=1)
    logged = encode_record(make_record(2))
    trainer.step(make_record(2))
    expected = weights(trainer)
    for now in (TRAIN, msgspec.structs.replace(TRAIN, routing_replay=False)):
        again = load_trainer(discovery.find_newest(tmp_path, identity), Policy(model=model, train=now))
        again.step(decode_record(logged))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(again).items())
    plain = load_trainer(discovery.find_newest(tmp_path, identity), Policy(model=model, train=TRAIN))
    plain.step(make_record(2, msgspec.structs.replace(TRAIN, routing_replay=False)))
    assert not all(torch.equal(tensor, expected[name]) for name, tensor in weights(plain).items())


@pytest.mark.slow
def test_ranks_that_share_experts_out_replay_them_as_one_rank_does(tmp_path: Path) -> None:
    model = tiny_experts("qwen3_moe")
    alone = Trainer(str(model), TRAIN)
    episodes = tuple(route(make_group("a", (0.0, 1.0))))
    alone.step(BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes, settings=TRAIN))
    shared = msgspec.structs.replace(TRAIN, sharding="full", micro_batch_tokens=64)
    launch(2, expert_ranks.__file__, str(model), msgspec.json.encode(shared).decode(), str(tmp_path))
    (tmp_path / "alone").mkdir()
    alone.save_weights(tmp_path / "alone")
    before = load_file(model / "model.safetensors")
    ours, wanted = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "alone" / "model.safetensors")
    moved = {name for name, tensor in wanted.items() if not torch.equal(tensor, before[name])}
    assert {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"} <= moved, "routers learn"
    assert_same_way({n: ours[n] for n in moved}, {n: wanted[n] for n in moved}, before)
