"""A push writes once, tells every engine, reports who failed and leaves no file behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarmq.engine import push
from swarmq.engine.push import FileTransfer, WeightPusher
from swarmq.errors import EngineError

GONE = "http://127.0.0.1:9"


@pytest.fixture
def weights():
    return [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3, dtype=torch.bfloat16))]


async def test_a_push_reports_the_version_and_its_times(vllm, weights, tmp_path):
    report = await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).push, weights, 5)
    assert report.version == 5
    assert 0 < report.pause_s <= report.total_s
    assert 0 < report.write_s <= report.total_s
    assert report.failed == {}
    assert vllm.label == "5"
    assert not await asyncio.to_thread(os.path.lexists, vllm.weights)


async def test_an_engine_that_is_gone_does_not_keep_the_others_back(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url, GONE], tmp_path)
    report = await asyncio.to_thread(pusher.push, weights, 5)
    assert list(report.failed) == [GONE]
    assert vllm.label == "5"


async def test_ensure_leaves_an_engine_alone_that_serves_the_version(vllm, weights, tmp_path):
    vllm.label = "5"
    report = await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).ensure, weights, 5)
    assert report.total_s == 0
    assert set(vllm.calls) == {"/weight_info", "/is_paused"}


@pytest.mark.parametrize(("label", "paused"), [("4", False), ("5", True), ("updating-5", True), ("default", False)])
async def test_ensure_pushes_to_an_engine_in_any_other_state(vllm, weights, tmp_path, label, paused):
    vllm.label, vllm.paused = label, paused
    await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).ensure, weights, 5)
    assert (vllm.label, vllm.paused) == ("5", False)


async def test_a_push_that_no_engine_takes_is_an_error_once_patience_ends(weights, tmp_path):
    with pytest.raises(EngineError, match="no engine took version 5"):
        await asyncio.to_thread(WeightPusher([GONE], tmp_path, patience_s=0).push, weights, 5)


async def test_weights_that_are_refused_are_not_offered_again(vllm, weights, tmp_path):
    vllm.fail["/update_weights"] = vllm.untouched()
    with pytest.raises(EngineError, match="no such file"):
        await asyncio.to_thread(WeightPusher([vllm.url], tmp_path, patience_s=600).push, weights, 5)
    assert vllm.calls.count("/update_weights") == 1
    assert not vllm.paused


def test_tensors_arrive_as_they_were_and_a_tied_one_once(weights, tmp_path):
    transfer = FileTransfer(["http://far.example:8000"], tmp_path)
    tied = [*weights, ("head", weights[0][1]), ("turned", weights[0][1].T)]
    path = Path(transfer.publish(tied, 1)["path"])
    assert path.is_relative_to(tmp_path)
    loaded = load_file(path)
    assert loaded.keys() == {"a", "b", "turned"}
    assert torch.equal(loaded["a"], weights[0][1])
    assert torch.equal(loaded["turned"], weights[0][1].T)
    assert loaded["b"].dtype == torch.bfloat16
    transfer.withdraw()
    assert not path.exists()


def test_the_files_of_a_killed_pusher_are_removed_and_those_of_a_living_one_kept(weights, tmp_path):
    dead = tmp_path / f"{push.FOLDER_PREFIX}4194305-x"  # above the kernel's largest pid
    alive = tmp_path / f"{push.FOLDER_PREFIX}1-x"
    dead.mkdir()
    alive.mkdir()
    FileTransfer(["http://far.example:8000"], tmp_path).publish(weights, 1)
    assert not dead.exists()
    assert alive.exists()
