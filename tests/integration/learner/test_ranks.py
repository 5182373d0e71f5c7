"""The same gradient and the same weights on one rank and on several, whole or sharded, however the batch is cut.

The objective has a reference model in it, so that one is laid out over the ranks too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from benchmarks.vlm.architecture import QWEN3_VL
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support import (
    checkpoint_ranks,
    critic_ranks,
    expert_ranks,
    hybrid_ranks,
    learner_ranks,
    leaving,
    listening_ranks,
    lora_ranks,
    vision_ranks,
)
from support.episodes import make_qwen
from support.launch import launch
from support.own_methods import OPTIMIZER, write_own_methods
from support.same_gradient import assert_same, assert_same_gradient, assert_same_way
from support.tiny_model import tiny_experts
from support.tiny_vision_model import tiny_vision_model
from swarmq.config import Critic, Lora, Loss, Sft, Train
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.distributed.processes import start_ranks
from swarmq.learner.store.records import RunIdentity
from swarmq.learner.train.trainer import Trainer

TRAIN = Train(learning_rate=1e-4, warmup_steps=0, loss=Loss(name="reinforce", kl=0.5), token_log=False, trackers=())
ROWS: dict[str, Any] = {"micro_batch_tokens": 88, "layout": "rows"}
FILTERED: dict[str, Any] = {"loss": Loss(name="reinforce"), "reference": None, "ratio_band": (0.8, 1.25), **ROWS}
SETTINGS: dict[str, dict[str, Any]] = {
    "token": {},
    "episode": {"normalisation": "episode"},
    "constant": {"normalisation": "constant"},
    "episode, filtered": {"normalisation": "episode", **FILTERED},
    "demonstrations beside": {"sft": Sft(demonstrations="in the record", weight=0.5), **FILTERED},
}
"""A filter leaves some of an episode's tokens, which weigh one by their number, and its calls lie in passes of several ranks."""
Made = dict[str, dict[str, Any]]
"""What `learner_ranks` made with each of them."""
ROUGHLY = 0.05
"""Of a parameter's own way: Muon multiplies in BF16, and AdamW may round a moment to the next of its 256 values."""
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def on_ranks(count: int, model: Path, train: Train, target: Path) -> Made:
    trains = [msgspec.structs.replace(train, **changes) for changes in SETTINGS.values()]
    launch(count, learner_ranks.__file__, str(model), msgspec.json.encode(trains).decode(), str(target))
    return dict(zip(SETTINGS, torch.load(target), strict=True))


def launch_alone_and_on_two(script: str, model: Path, plain: Train, ways: dict[str, Train], folder: Path) -> None:
    """Run a script with `plain` on one rank, then with each way on two. The folders "alone" and those named as the ways are for what it makes."""
    for count, named in (1, {"alone": plain}), (2, ways):
        for name in named:
            (folder / name).mkdir()
        launch(count, script, str(model), msgspec.json.encode(named).decode(), str(folder))


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    reference = make_qwen(tmp_path_factory.mktemp("models") / "reference", seed=1)
    return msgspec.structs.replace(TRAIN, reference=str(reference))


@pytest.fixture(scope="module")
def alone(tiny_qwen: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return on_ranks(1, tiny_qwen, train, tmp_path_factory.mktemp("alone") / "made")


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two launches, one after another
@pytest.mark.parametrize(
    ("count", "changed"),
    [(2, {}), (4, ROWS), (2, {"sharding": "full", **ROWS})],
    ids=["two", "four, small rows", "two sharded"],
)
def test_ranks_make_the_gradient_and_the_weights_of_one(
    count: int, changed: dict[str, Any], train: Train, tiny_qwen: Path, tmp_path: Path, alone: Made
) -> None:
    made = on_ranks(count, tiny_qwen, msgspec.structs.replace(train, **changed), tmp_path / "made")
    for name, ours in made.items():
        assert ours["sharded"] == ("sharding" in changed)
        assert_same(ours, alone[name])
        assert (ours["left_out"] > 0) == ("ratio_band" in SETTINGS[name])
    if "sharding" in changed:
        one_goes_on(tiny_qwen, train, tmp_path)


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one_with_every_optimizer_and_an_own_one(tiny_qwen: Path, tmp_path: Path) -> None:
    names = ["muon", "adamw_8bit", OPTIMIZER]
    write_own_methods(tmp_path)
    plain = msgspec.structs.replace(TRAIN, loss=Loss(name="reinforce"), **ROWS)
    trains = msgspec.json.encode([msgspec.structs.replace(plain, optimizer=name) for name in names]).decode()
    for count in (1, 2):
        launch(count, learner_ranks.__file__, str(tiny_qwen), trains, str(tmp_path / str(count)))
    alone, two = (torch.load(tmp_path / str(count)) for count in (1, 2))
    for made, wanted in zip(two, alone, strict=True):
        assert_same_gradient(made["gradient"], wanted["gradient"])
        assert_same_way(made["weights"], wanted["weights"], wanted["before"], ROUGHLY)


@pytest.mark.slow
def test_two_hosts_that_shard_a_model_within_each_make_the_gradient_and_the_weights_of_one_rank(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    plain = msgspec.structs.replace(TRAIN, loss=Loss(name="reinforce"), **ROWS)
    for count, hosts, sharding in ((1, 1, "none"), (4, 2, "hybrid")):
        train = msgspec.json.encode(msgspec.structs.replace(plain, sharding=sharding)).decode()
        launch(count, hybrid_ranks.__file__, str(tiny_qwen), train, str(tmp_path / sharding), hosts=hosts)
    made, alone = (torch.load(tmp_path / each) for each in ("hybrid", "none"))
    assert made["sharded"]
    assert not alone["sharded"]
    assert_same(made, alone)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_adapters_on_ranks_are_held_to_the_model_under_them(tiny_qwen: Path, tmp_path: Path) -> None:
    """The ranks themselves hold it to the initial model, loaded apart."""
    plain = msgspec.structs.replace(TRAIN, lora=Lora(rank=4, alpha=8.0), micro_batch_tokens=88, learning_rate=1e-3)
    shared = msgspec.structs.replace(plain, sharding="full")
    half = msgspec.structs.replace(shared, mixed_precision="bf16")  # which nothing but they themselves is compared with
    ways = {"two": plain, "two sharded": shared, "in bf16": half}
    launch_alone_and_on_two(lora_ranks.__file__, tiny_qwen, plain, ways, tmp_path)
    alone = tmp_path / "alone"
    before = dict(Trainer(str(tiny_qwen), plain).named_tensors())
    for name in ("two", "two sharded"):
        for when in ("made", "next"):
            made, wanted = torch.load(tmp_path / name / when), torch.load(alone / when)
            still = [each for each in wanted if torch.equal(wanted[each], before[each])]
            assert 0 < len(still) < len(wanted)
            assert all(torch.equal(made[each], wanted[each]) for each in still), "only adapted weights change"
            assert_same_way(*({k: v for k, v in each.items() if k not in still} for each in (made, wanted, before)))
        files = [next((tmp_path / each / "checkpoints").glob("*")) for each in (name, "alone")]
        for file in ("model.safetensors", "adapter/adapter.safetensors"):
            ours, theirs = (load_file(each / file) for each in files)
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                assert ours[key].shape == tensor.shape
                torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-5, msg=key)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_critic_on_ranks_learns_what_it_learns_on_one(tiny_qwen: Path, tmp_path: Path) -> None:
    """Whole on each rank, sharded, and with ranks that share passes. Each also continues from its checkpoint, to the bit."""
    critic = Critic(learning_rate=1e-2, gae_lambda=0.9, lora=Lora(rank=4))
    plain = msgspec.structs.replace(TRAIN, advantage="gae", critic=critic, loss=Loss(name="reinforce"), **ROWS)
    ways = {
        "two": plain,
        "two that share passes": msgspec.structs.replace(plain, context_parallel=2),
        "two sharded": msgspec.structs.replace(plain, sharding="full"),  # last, because accelerate stays with it
    }
    launch_alone_and_on_two(critic_ranks.__file__, tiny_qwen, plain, ways, tmp_path)
    alone = torch.load(tmp_path / "alone" / "made")
    for name in ways:
        made = torch.load(tmp_path / name / "made")
        assert_same_way(made["after"], alone["after"], alone["before"], 2e-2)
        for ours, wanted in zip(made["figures"], alone["figures"], strict=True):
            assert ours == pytest.approx(wanted, rel=1e-2, abs=1e-4), name


def one_goes_on(model: Path, train: Train, folder: Path) -> None:
    """What two sharded ranks saved, one process loads: a replay and the doctor are such."""
    wanted: dict[str, torch.Tensor] = torch.load(folder / "next")
    found = discovery.find_newest(folder / "checkpoints", RunIdentity(run="r", policy="main", model=str(model)))
    assert found is not None
    trainer = Trainer(str(found.path), train, initial=str(model))
    save_load.restore(trainer, found)
    before = learner_ranks.weights(trainer)
    trainer.step(learner_ranks.batch(learner_ranks.STEPS + 1, train))
    assert_same_way(dict(trainer.named_tensors()), wanted, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"),
    [("qwen3_moe", None), ("qwen3_moe", Lora(rank=4, alpha=8.0)), ("glm4_moe", Lora(rank=4, alpha=8.0))],
    ids=["all parameters", "adapters", "adapters around a router with a buffer"],
)
def test_ranks_that_share_experts_out_push_and_save_them_as_the_folder_has_them(
    tmp_path: Path, family: str, lora: Lora | None
) -> None:
    model, train = tiny_experts(family), msgspec.structs.replace(TRAIN, loss=Loss(name="reinforce"), lora=lora)
    shared = msgspec.structs.replace(train, sharding="full", learning_rate=1e-3)
    launch(2, expert_ranks.__file__, str(model), msgspec.json.encode(shared).decode(), str(tmp_path))
    pushed, saved, first = (
        load_file(file)
        for file in (tmp_path / "pushed.safetensors", tmp_path / "model.safetensors", model / "model.safetensors")
    )
    assert {name: tensor.shape for name, tensor in pushed.items()} == {n: t.shape for n, t in first.items()}
    assert saved.keys() == first.keys()
    for (
        name,
        tensor,
    ) in saved.items():  # what adapters add is added up over the ranks for the one, and on one of them for the other
        torch.testing.assert_close(pushed[name], tensor, rtol=0, atol=1e-6 if lora else 0)
    assert not torch.equal(pushed[EXPERT], first[EXPERT]), "nothing was learned"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert torch.equal(loaded["model.layers.1.mlp.experts.down_proj"][3], saved[EXPERT])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_ranks_go_on_together_where_one_finds_no_room_for_a_checkpoint(
    sharding: str, tiny_qwen: Path, tmp_path: Path
) -> None:
    launch(2, checkpoint_ranks.__file__, str(tiny_qwen), str(tmp_path), sharding)


@pytest.mark.slow
def test_ranks_leave_though_a_collective_of_a_backward_pass_is_under_way() -> None:
    launch(2, leaving.__file__)


@pytest.mark.slow
def test_ranks_listen_on_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the port of torch's store takes part in the run; `MASTER_ADDR` does not bind it."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    ranks = start_ranks([sys.executable, listening_ranks.__file__, str(tmp_path / "listens")], 2)
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"listens.{number}").read_text()) for number in range(2)]
    addresses = {one.rpartition(":")[0] for rank in found for one in rank}
    assert addresses == {"0100007F"}, found


@pytest.mark.slow
def test_ranks_of_which_one_sees_images_make_the_gradient_and_the_weights_of_one(tmp_path: Path) -> None:
    """Also on a batch without images, which leaves the vision tower as it is."""
    model = tiny_vision_model(QWEN3_VL)
    plain = msgspec.structs.replace(TRAIN, loss=Loss(name="reinforce"), micro_batch_tokens=32)
    changes: dict[str, Any] = {"two": {}, "sharing passes": {"context_parallel": 2}, "sharded": {"sharding": "full"}}
    ways = {name: msgspec.structs.replace(plain, **changed) for name, changed in changes.items()}
    launch_alone_and_on_two(vision_ranks.__file__, model, plain, ways, tmp_path)
    alone = torch.load(tmp_path / "alone" / "made")
    for name in ways:
        made = torch.load(tmp_path / name / "made")
        assert made["sharded"] == (name == "sharded")
        assert_same(made, alone)
        towers = {one: each for one, each in made["after_text"].items() if "visual" in one}
        assert all(torch.equal(each, made["weights"][one]) for one, each in towers.items())
        ours, wanted, before = (
            {one: each for one, each in tensors.items() if one not in towers}
            for tensors in (made["after_text"], alone["after_text"], alone["weights"])
        )
        assert_same_way(ours, wanted, before)
