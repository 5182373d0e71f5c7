"""A push writes once, tells every engine, reports who failed and leaves no file behind."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from swarmq.errors import EngineError, LearnerError
from swarmq.weights.format.conventions import UNANNOUNCED
from swarmq.weights.format.packing import FolderWeight, LazyTensor, LowRankUpdate
from swarmq.weights.format.scratch import FOLDER_PREFIX
from swarmq.weights.push.engine_control import EngineControl, Payload, Timeouts, WorkerFacts
from swarmq.weights.push.pusher import MAX_DOUBTFUL_PUSHES, WeightPusher
from swarmq.weights.push.transfers import (
    FileTransfer,
    IpcTransfer,
    NcclTransfer,
    StagingBuffer,
    choose_route,
    deduplicate,
)

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


async def test_ensure_leaves_an_engine_alone_that_serves_the_version_as_it_was_pushed(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url], tmp_path)
    await asyncio.to_thread(pusher.push, weights, 5)
    vllm.calls.clear()
    report = await asyncio.to_thread(pusher.ensure, weights, 5)
    assert report.total_s == 0
    assert set(vllm.calls) == {"/version", "/weight_info", "/is_paused", "/swarmq/facts"}


def counting(*, loads=1, checksum=None):
    return {"gpu": "", "dtype": "float32", "pid": 7, "loads": loads, "checksum": checksum}


async def test_weights_that_somebody_changed_under_the_same_version_are_replaced_and_told_of(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url], tmp_path)
    vllm.workers = [counting()]
    await asyncio.to_thread(pusher.push, weights, 5)
    vllm.weights, vllm.workers = "zeros", [counting(loads=2)]
    report = await asyncio.to_thread(pusher.ensure, weights, 5)
    assert report.replaced == (vllm.url,)
    assert vllm.weights != "zeros"
    assert (await asyncio.to_thread(pusher.ensure, weights, 5)).replaced == ()


async def test_an_engine_whose_weights_changed_unannounced_is_told_of(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url], tmp_path)
    await asyncio.to_thread(pusher.push, weights, 5)
    vllm.label = UNANNOUNCED
    assert (await asyncio.to_thread(pusher.ensure, weights, 5)).replaced == (vllm.url,)
    assert vllm.label == "5"


async def test_an_engine_that_is_taken_over_gets_the_weights_whatever_its_label_says(vllm, weights, tmp_path):
    vllm.label, vllm.weights, vllm.workers = "5", "zeros", [counting()]
    report = await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).ensure, weights, 5)
    assert list(report.methods) == [vllm.url]
    assert vllm.weights != "zeros"
    assert report.replaced == (), "another learner's, for all that is known"


async def test_an_engine_that_loaded_other_bytes_than_were_sent_does_not_serve_them(vllm, weights, tmp_path):
    vllm.workers = [counting(checksum=1)]
    with pytest.raises(EngineError, match="has loaded weights that differ from those sent"):
        await asyncio.to_thread(WeightPusher([vllm.url], tmp_path, patience_s=0).push, weights, 5)
    assert (vllm.label, vllm.paused) == ("updating-5", True)


@pytest.mark.parametrize(("label", "paused"), [("4", False), ("5", True), ("updating-5", True), ("default", False)])
async def test_ensure_pushes_to_an_engine_in_any_other_state(vllm, weights, tmp_path, label, paused):
    vllm.label, vllm.paused = label, paused
    await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).ensure, weights, 5)
    assert (vllm.label, vllm.paused) == ("5", False)


async def test_a_push_to_engines_that_are_gone_gives_up_at_once(weights, tmp_path):
    for offer in ("push", "ensure"):
        with pytest.raises(EngineError, match="no engine took version 5"):
            await asyncio.to_thread(getattr(WeightPusher([GONE], tmp_path, patience_s=1e6), offer), weights, 5)


async def test_weights_that_are_refused_are_not_offered_again(vllm, weights, tmp_path):
    vllm.fail["/update_weights"] = vllm.untouched()
    with pytest.raises(EngineError, match="no such file"):
        await asyncio.to_thread(WeightPusher([vllm.url], tmp_path, patience_s=600).push, weights, 5)
    assert vllm.calls.count("/update_weights") == 1
    assert not vllm.paused


def test_tensors_arrive_as_they_were_and_a_tied_one_once(weights, tmp_path):
    transfer = FileTransfer(["http://far.example:8000"], tmp_path)
    tied = [*weights, ("head", weights[0][1]), ("turned", weights[0][1].T)]
    path = Path(transfer.publish(deduplicate(tied), 1, None).update_info["path"])
    assert path.is_relative_to(tmp_path)
    loaded = load_file(path)
    assert loaded.keys() == {"a", "b", "turned"}
    assert torch.equal(loaded["a"], weights[0][1])
    assert torch.equal(loaded["turned"], weights[0][1].T)
    assert loaded["b"].dtype == torch.bfloat16
    transfer.withdraw()
    assert not path.exists()


def test_the_files_of_a_killed_pusher_are_removed_and_those_of_a_living_one_kept(weights, tmp_path):
    dead = tmp_path / f"{FOLDER_PREFIX}4194305-x"  # above the kernel's largest pid
    alive = tmp_path / f"{FOLDER_PREFIX}1-x"
    dead.mkdir()
    alive.mkdir()
    FileTransfer(["http://far.example:8000"], tmp_path).publish(dict(weights), 1, None)
    assert not dead.exists()
    assert alive.exists()


def test_an_engine_gets_its_weights_in_the_type_it_computes_with(tmp_path):
    transfer = FileTransfer(["http://127.0.0.1:1"], tmp_path)
    mixed = {"a": torch.rand(3, 5), "count": torch.arange(4)}
    loaded = load_file(transfer.publish(mixed, 1, "bfloat16").update_info["path"])
    assert torch.equal(loaded["a"], mixed["a"].bfloat16())
    assert torch.equal(loaded["count"], mixed["count"])
    transfer.withdraw()


HERE, THERE = "GPU-1", "GPU-2"
LOCAL, FAR = "http://127.0.0.1:8000", "http://far.example:8000"


@pytest.mark.parametrize(
    ("url", "gpus", "own", "methods"),
    [
        (LOCAL, [HERE], HERE, ("ipc", "file")),
        (LOCAL, [HERE, HERE], HERE, ("ipc", "file")),
        (LOCAL, [THERE], HERE, ("nccl", "file")),
        (LOCAL, [THERE, "GPU-3"], HERE, ("nccl", "file")),
        (LOCAL, [HERE, THERE], HERE, ("file",)),
        (FAR, [THERE], HERE, ("nccl", "file")),
        (FAR, [""], HERE, ("file",)),
        (LOCAL, [""], HERE, ("file",)),
        (LOCAL, [THERE], "", ("file",)),
        (LOCAL, [], HERE, ("file",)),
    ],
)
def test_the_way_follows_from_where_learner_and_engine_are(url, gpus, own, methods):
    facts = [WorkerFacts(gpu=gpu, dtype="bfloat16", pid=number) for number, gpu in enumerate(gpus)]
    assert choose_route(url, facts, own).methods == methods
    assert choose_route(url, facts, own, has_adapters=True).methods == (*methods[:-1], "adapters", "file")


class Scripted:
    """A transfer that hands out a parcel of its own."""

    def __init__(self, **update_info):
        self.update_info, self.published, self.prepared, self.fail = update_info, 0, 0, None

    async def prepare(self, engine, route):
        self.prepared += 1
        if self.fail == "prepare":
            raise EngineError("no rendezvous")

    def publish(self, tensors, version, dtype):
        if self.fail == "publish":
            raise EngineError("no room")
        self.published += 1
        return Payload(update_info=self.update_info)

    def withdraw(self):
        pass


@pytest.fixture
def methods(monkeypatch):
    monkeypatch.setattr("swarmq.weights.push.pusher.get_gpu_uuid", lambda: HERE)
    return {
        "ipc": Scripted(handle=[1]),
        "nccl": Scripted(tensors=[]),
        "adapters": Scripted(adapters="parts"),
        "file": Scripted(path="there"),
    }


@pytest.fixture
def adapted(weights):
    adapter = LowRankUpdate(down=torch.ones(1, 3), up=torch.ones(2, 1), scale=2.0)
    return [(name, FolderWeight(tensor, adapter if name == "a" else None)) for name, tensor in weights]


def worker(gpu: str, pid: int = 7) -> dict[str, object]:
    return {"gpu": gpu, "dtype": "bfloat16", "pid": pid}


@pytest.mark.parametrize(("gpu", "way"), [(HERE, "ipc"), (THERE, "nccl"), ("", "file")])
async def test_a_push_takes_the_way_of_the_engine_and_says_which(vllm, weights, tmp_path, methods, gpu, way):
    vllm.workers = [worker(gpu)]
    pusher = WeightPusher([vllm.url], tmp_path, transfers=methods)
    report = await asyncio.to_thread(pusher.push, weights, 5)
    assert report.methods == {vllm.url: way}
    assert vllm.updates[0].keys() >= methods[way].update_info.keys()
    assert [name for name, transfer in methods.items() if transfer.published] == [way]


async def test_an_engine_that_refuses_a_way_gets_a_file_and_is_not_asked_again(vllm, weights, tmp_path, methods):
    vllm.workers = [worker(HERE)]
    vllm.fail_updates_with = {"handle": vllm.untouched()}
    pusher = WeightPusher([vllm.url], tmp_path, transfers=methods)
    assert (await asyncio.to_thread(pusher.push, weights, 5)).methods == {vllm.url: "file"}
    assert (vllm.label, vllm.weights, vllm.paused) == ("5", "there", False)
    await asyncio.to_thread(pusher.push, weights, 6)
    assert methods["ipc"].published == 1
    vllm.workers = [worker(HERE, pid=8)]
    await asyncio.to_thread(pusher.push, weights, 7)
    assert methods["ipc"].published == 2, "one that was started again is asked again"


@pytest.mark.parametrize(("loads", "goes_on"), [((3, 3), True), ((4, 3), False)])
async def test_an_engine_of_which_one_worker_refused_what_another_has_loaded_samples_nothing_before_all_have(
    vllm, weights, tmp_path, methods, loads, goes_on
):
    vllm.workers = [worker(HERE, pid) | {"loads": count} for pid, count in enumerate(loads)]
    vllm.label = "1"
    vllm.fail_updates_with = {"handle": vllm.untouched()}
    pusher = WeightPusher([vllm.url], tmp_path, transfers=methods)
    assert (await asyncio.to_thread(pusher.push, weights, 5)).methods == {vllm.url: "file"}
    assert (vllm.label, vllm.weights, vllm.paused) == ("5", "there", False)
    between = vllm.calls[vllm.calls.index("/update_weights") : -1 - vllm.calls[::-1].index("/update_weights")]
    assert ("/resume" in between) == goes_on


async def test_a_file_that_is_written_in_mid_push_holds_up_no_other_engine(
    vllm, another, weights, tmp_path, methods, monkeypatch
):
    vllm.workers, another.workers = [worker(HERE)], [worker(HERE, pid=8)]
    vllm.fail_updates_with = {"handle": vllm.untouched()}
    writing, going_on, update, publish = (
        threading.Event(),
        threading.Event(),
        EngineControl.update,
        methods["file"].publish,
    )

    async def waiting(self, *arguments):
        if self.url == another.url and await asyncio.to_thread(writing.wait, 5):
            going_on.set()
        return await update(self, *arguments)

    def slowly(*arguments):
        writing.set()
        assert going_on.wait(5), "the other engine's update stood still"
        return publish(*arguments)

    monkeypatch.setattr(EngineControl, "update", waiting)
    monkeypatch.setattr(methods["file"], "publish", slowly)
    pusher = WeightPusher([vllm.url, another.url], tmp_path, transfers=methods)
    report = await asyncio.to_thread(pusher.push, weights, 5)
    assert report.methods == {vllm.url: "file", another.url: "ipc"}


@pytest.mark.parametrize(("gpu", "way"), [(HERE, "ipc"), (THERE, "nccl"), ("", "adapters")])
async def test_adapters_are_what_goes_where_there_are_some_and_weights_would_go_as_a_file(
    vllm, weights, adapted, tmp_path, methods, gpu, way
):
    vllm.workers = [worker(gpu)]
    pusher = WeightPusher([vllm.url], tmp_path, transfers=methods)
    assert (await asyncio.to_thread(pusher.push, adapted, 5)).methods == {vllm.url: way}
    assert [name for name, transfer in methods.items() if transfer.published] == [way]
    frozen = [(name, FolderWeight(tensor)) for name, tensor in weights]
    for version, whole in ((6, weights), (7, frozen)):
        wanted = "file" if way == "adapters" else way
        assert (await asyncio.to_thread(pusher.push, whole, version)).methods == {vllm.url: wanted}


@pytest.mark.parametrize("knows", [True, False])
async def test_an_engine_that_refuses_adapters_gets_all_weights_and_is_not_asked_again(
    vllm, another, adapted, tmp_path, methods, capsys, knows
):
    """It has another model in its folder, or a swarmq of before; others go on as they did."""
    refusal = vllm.untouched() if knows else "Invalid update_info: an unexpected keyword argument"
    vllm.workers, another.workers = [worker("")], [worker("", pid=8)]
    vllm.fail_updates_with = {"adapters": refusal}
    pusher = WeightPusher([vllm.url, another.url], tmp_path, transfers=methods)
    for version in (5, 6):
        report = await asyncio.to_thread(pusher.push, adapted, version)
        assert report.methods == {vllm.url: "file", another.url: "adapters"}
        assert report.failed == {}
        assert [(each.label, each.weights, each.paused) for each in (vllm, another)] == [
            (str(version), "there", False),
            (str(version), "packed", False),
        ]
    assert vllm.calls.count("/update_weights") == 3, "adapters were offered once"
    said = capsys.readouterr().out
    assert refusal in said
    vllm.fail_updates_with, vllm.workers = {}, [worker("", pid=9)]
    assert (await asyncio.to_thread(pusher.push, adapted, 7)).methods[vllm.url] == "adapters", (
        "one that was started again"
    )


async def test_an_engine_in_doubt_that_refuses_adapters_is_repaired_with_all_weights(vllm, adapted, tmp_path, methods):
    vllm.workers, vllm.label, vllm.paused = [worker("")], "updating-4", True
    vllm.fail_updates_with = {"adapters": vllm.untouched()}
    pusher = WeightPusher([vllm.url], tmp_path, transfers=methods)
    assert (await asyncio.to_thread(pusher.push, adapted, 5)).methods == {vllm.url: "file"}
    assert (vllm.label, vllm.weights, vllm.paused) == ("5", "there", False)


def test_weights_of_the_folder_are_named_once_when_they_are_tied():
    head, adapter = torch.ones(2, 3), LowRankUpdate(down=torch.ones(1, 3), up=torch.ones(2, 1), scale=2.0)
    tied = [("a", FolderWeight(head)), ("b", FolderWeight(head)), ("c", FolderWeight(head, adapter)), ("d", head)]
    assert list(deduplicate(tied)) == ["a", "c"]


@pytest.mark.parametrize(("own", "engines"), [("", "2.29.2"), ("2.29.2", ""), ("2.28.9", "2.29.2")])
async def test_who_has_another_nccl_than_its_engine_does_not_wait_for_it(
    vllm, weights, tmp_path, methods, monkeypatch, capsys, own, engines
):
    monkeypatch.setattr("swarmq.weights.format.nccl_group.get_nccl_version", lambda: own)
    vllm.workers = [worker(THERE) | {"nccl": engines}]
    methods["nccl"] = NcclTransfer(StagingBuffer())
    report = await asyncio.to_thread(WeightPusher([vllm.url], tmp_path, transfers=methods).push, weights, 5)
    assert report.methods == {vllm.url: "file"}
    said = f"different versions of NCCL ({own or 'none'}, {engines or 'none'})"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("transfer", [IpcTransfer, NcclTransfer])
def test_ranks_that_share_a_policy_out_get_the_memory_of_a_push_back_for_their_next_step(monkeypatch, transfer):
    """Their weights are in host memory; a GPU that has the whole policy has counted the buffer in."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    staging, ones = StagingBuffer(), torch.ones(3)
    made_on_it = LazyTensor(ones.shape, ones.dtype, torch.device("cuda"), ones.clone)
    made_here = made_on_it._replace(device=ones.device)
    for weights, kept in (({"a": ones, "b": made_here}, False), ({"a": made_on_it}, True)):
        staging.pack(weights, "float32")
        transfer(staging).withdraw()
        assert (staging._buffer is not None) is kept


async def test_a_rendezvous_that_the_engine_misses_is_waited_for_by_nobody(
    vllm, weights, tmp_path, methods, monkeypatch
):
    missed = threading.Event()
    monkeypatch.setattr("swarmq.weights.format.nccl_group.get_nccl_version", lambda: "2.29.2")
    monkeypatch.setattr("swarmq.weights.format.nccl_group.join_group", lambda *_, **__: missed.wait())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    vllm.workers = [worker(THERE) | {"nccl": "2.29.2"}]
    vllm.fail["/init_weight_transfer_engine"] = "a worker was killed"
    methods["nccl"] = NcclTransfer(StagingBuffer())
    pushing = asyncio.to_thread(WeightPusher([vllm.url], tmp_path, transfers=methods).push, weights, 5)
    try:
        report = await asyncio.wait_for(pushing, 60)
    finally:
        missed.set()
    assert report.methods == {vllm.url: "file"}


@pytest.mark.parametrize("step", ["prepare", "publish"])
async def test_a_way_that_cannot_be_gone_leaves_the_file(vllm, weights, tmp_path, methods, step):
    vllm.workers = [worker(THERE)]
    methods["nccl"].fail = step
    report = await asyncio.to_thread(WeightPusher([vllm.url], tmp_path, transfers=methods).push, weights, 5)
    assert report.methods == {vllm.url: "file"}


async def test_no_room_for_the_weights_anywhere_is_told_at_once(vllm, weights, tmp_path, methods):
    methods["file"].fail = "publish"
    with pytest.raises(EngineError, match="no room"):
        await asyncio.to_thread(WeightPusher([vllm.url], tmp_path, transfers=methods, patience_s=600).push, weights, 5)
    assert not vllm.paused


async def test_an_engine_left_in_doubt_again_and_again_is_condemned_and_left_out_until_restarted(
    vllm, weights, tmp_path
):
    vllm.drop.add("/update_weights")
    pusher = WeightPusher([vllm.url], tmp_path, patience_s=0)
    for _ in range(MAX_DOUBTFUL_PUSHES):
        with pytest.raises(EngineError):
            await asyncio.to_thread(pusher.push, weights, 5)
    assert vllm.label == "updating-5-restart"
    vllm.drop.clear()
    with pytest.raises(EngineError, match="is skipped until its restart"):
        await asyncio.to_thread(pusher.push, weights, 6)
    vllm.label, vllm.paused, vllm.active = "default", False, False
    await asyncio.to_thread(pusher.ensure, weights, 6)
    assert (vllm.label, vllm.paused) == ("6", False)


async def test_a_dead_engine_does_not_hold_up_the_care_for_the_others(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url, GONE], tmp_path, patience_s=600)
    await asyncio.to_thread(pusher.push, weights, 5)
    with pytest.raises(EngineError, match="no engine took version 5"):
        await asyncio.to_thread(pusher.ensure, weights, 5)


def test_an_update_may_take_as_long_as_its_size_needs_and_no_longer():
    limits = Timeouts(update_s=600)
    assert limits.for_size(0).update_s == 60
    assert limits.for_size(10**10).update_s == 160
    assert limits.for_size(10**12).update_s == 600


async def test_an_engine_that_a_learner_left_asleep_is_woken_before_it_is_updated(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url, GONE], tmp_path, patience_s=0)
    await asyncio.to_thread(pusher.sleep)
    assert vllm.asleep
    await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).ensure, weights, 5)
    assert (vllm.label, vllm.paused) == ("5", False)


async def test_engines_wake_when_the_learner_says_so(vllm, weights, tmp_path):
    pusher = WeightPusher([vllm.url], tmp_path)
    await asyncio.to_thread(pusher.push, weights, 5)
    await asyncio.to_thread(pusher.sleep)
    await asyncio.to_thread(pusher.wake)
    assert (vllm.label, vllm.paused, vllm.asleep) == ("5", False, False)


async def test_an_engine_that_is_being_started_again_is_waited_for_and_put_to_sleep(vllm, tmp_path):
    vllm.label, vllm.paused = "updating-5-restart", True
    learner = asyncio.create_task(asyncio.to_thread(WeightPusher([vllm.url], tmp_path, retry_s=0.01).sleep))
    async with asyncio.timeout(60):
        while vllm.calls.count("/weight_info") < 2:  # noqa: ASYNC110 - a server announces no caller
            await asyncio.sleep(0)
    vllm.label, vllm.paused = "default", False
    await learner
    assert vllm.asleep


async def test_an_engine_that_does_not_come_back_is_not_waited_for_again(tmp_path, monkeypatch):
    pusher = WeightPusher([GONE], tmp_path, patience_s=0.02, retry_s=0.01)
    await asyncio.to_thread(pusher.sleep)
    monkeypatch.setattr(pusher, "_patience_s", 600)
    await asyncio.to_thread(pusher.sleep)


@pytest.mark.parametrize("error", [OSError("no space"), SafetensorError("no space")])
async def test_a_file_that_cannot_be_written_is_an_error_of_the_push_and_is_not_left(
    vllm, weights, tmp_path, monkeypatch, error
):
    def torn(_, path, *__):
        path.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr("swarmq.weights.push.transfers.save_file", torn)
    transfer = FileTransfer(["http://far.example:8000"], tmp_path)
    with pytest.raises(EngineError, match=rf"{tmp_path}/.*5\.safetensors: no space; free space there"):
        transfer.publish(dict(weights), 5, None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EngineError, match="no space"):
        await asyncio.to_thread(WeightPusher([vllm.url], tmp_path).push, weights, 5)


def test_a_folder_for_weights_that_cannot_be_made_is_named(weights, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=f"no folder for weights can be created in {tmp_path}/file/weights"):
        FileTransfer(["http://far.example:8000"], tmp_path / "file" / "weights").publish(dict(weights), 5, None)


async def test_what_is_no_vllm_does_not_keep_the_engines_back(vllm, another, weights, tmp_path):
    another.foreign = "<html>"
    pusher = WeightPusher([vllm.url, another.url], tmp_path)
    report = await asyncio.to_thread(pusher.push, weights, 5)
    assert vllm.label == "5"
    assert list(report.failed) == list(pusher.failing) == [another.url]
    with pytest.raises(EngineError, match="which is not vLLM's answer"):
        await asyncio.to_thread(pusher.ensure, weights, 5)


@pytest.mark.parametrize("step", ["/pause", "/resume", "/wake_up"])
async def test_an_engine_that_cannot_be_paused_or_resumed_again_and_again_is_condemned(
    vllm, another, weights, tmp_path, step
):
    vllm.fail[step] = "EngineDeadError"
    pusher = WeightPusher([vllm.url, another.url], tmp_path)
    for version in range(1, MAX_DOUBTFUL_PUSHES + 1):
        assert not vllm.label.endswith("-restart")
        vllm.paused = step == "/wake_up"
        report = await asyncio.to_thread(pusher.push, weights, version)
        assert list(report.failed) == [vllm.url]
    assert vllm.label == f"updating-{MAX_DOUBTFUL_PUSHES}-restart"
    assert another.label == f"{MAX_DOUBTFUL_PUSHES}"


async def test_a_busy_engine_that_answers_too_late_again_and_again_is_not_condemned(vllm, weights, tmp_path):
    """As one in the middle of a long prompt: it goes on computing, and takes the weights when it has time."""
    vllm.late.add("/pause")
    pusher = WeightPusher([vllm.url], tmp_path, timeouts=Timeouts(pause_s=0.1))
    for step in range(5):
        vllm.metrics = f"vllm:iteration_tokens_total_count {step}.0\n"
        with pytest.raises(EngineError, match="did not answer /pause"):
            await asyncio.to_thread(pusher.push, weights, 5)
        assert not vllm.label.endswith("-restart")
    with pytest.raises(EngineError, match="did not answer /pause"):
        await asyncio.to_thread(pusher.push, weights, 5)
    assert vllm.label.endswith("-restart"), "it stands still"


async def test_an_engine_that_refuses_the_weights_and_goes_on_is_not_condemned(vllm, another, weights, tmp_path):
    """A restart would give it the same model again."""
    vllm.label, vllm.fail["/update_weights"] = "1", vllm.untouched()
    pusher = WeightPusher([vllm.url, another.url], tmp_path)
    for version in range(2, MAX_DOUBTFUL_PUSHES + 4):
        await asyncio.to_thread(pusher.push, weights, version)
    assert (vllm.label, vllm.paused) == ("1", False)
    assert "no such file" in pusher.failing[vllm.url]


async def test_who_is_behind_is_known_until_it_is_not_or_has_left(vllm, another, weights, tmp_path):
    urls = [vllm.url, another.url]
    pusher = WeightPusher([vllm.url], tmp_path, current=lambda: urls)
    another.fail["/update_weights"] = another.untouched()
    await asyncio.to_thread(pusher.push, weights, 5)
    with pytest.raises(EngineError):
        await asyncio.to_thread(pusher.ensure, weights, 5)
    assert list(pusher.failing) == [another.url]
    another.fail.clear()
    await asyncio.to_thread(pusher.ensure, weights, 5)
    assert pusher.failing == {}
    another.fail["/update_weights"] = another.untouched()
    await asyncio.to_thread(pusher.push, weights, 6)
    assert list(pusher.failing) == [another.url]
    another.label = "6"
    await asyncio.to_thread(pusher.ensure, weights, 6)
    assert pusher.failing == {}, "it had taken them, and its answer was lost"
    await asyncio.to_thread(pusher.push, weights, 7)
    assert list(pusher.failing) == [another.url]
    urls.pop()
    await asyncio.to_thread(pusher.push, weights, 8)
    assert pusher.failing == {}


@pytest.mark.parametrize("offer", [WeightPusher.push, WeightPusher.ensure, WeightPusher.repair])
async def test_a_policy_without_engines_is_told_how_to_get_one(weights, tmp_path, offer):
    pusher = WeightPusher([GONE], tmp_path, patience_s=600, current=list)
    with pytest.raises(EngineError, match="no engine serves the policy: .*swarmq engine add"):
        await asyncio.to_thread(offer, pusher, weights, 5)


@pytest.mark.parametrize("turn", [WeightPusher.sleep, WeightPusher.wake])
async def test_a_learner_that_cannot_tell_its_engines_goes_on_and_says_so(tmp_path, capsys, turn):
    def unreadable():
        raise EngineError("roster.json cannot be read")

    await asyncio.to_thread(turn, WeightPusher([GONE], tmp_path, current=unreadable))
    assert "roster.json cannot be read" in capsys.readouterr().out


async def test_an_engine_that_answers_nobody_is_waited_for_once_in_a_while_and_brought_up_to_date_when_it_is_back(
    vllm, another, weights, tmp_path, monkeypatch
):
    another.silent = True
    timeouts = Timeouts(ask_s=2.0)  # one must answer within it
    pusher = WeightPusher([vllm.url, another.url], tmp_path, timeouts=timeouts, cooldown_s=600.0)
    for version in (5, 6):
        report = await asyncio.to_thread(pusher.push, weights, version)
        assert list(report.failed) == list(pusher.failing) == [another.url]
        with pytest.raises(EngineError, match=f"{another.url} did not answer"):
            await asyncio.to_thread(pusher.ensure, weights, version)
    assert len(another.calls) == 1
    another.silent = False
    monkeypatch.setattr(
        "swarmq.weights.push.pusher.time",
        SimpleNamespace(monotonic=lambda: time.monotonic() + 601, perf_counter=time.perf_counter),
    )
    await asyncio.to_thread(pusher.ensure, weights, 6)
    assert another.label == "6"
    assert pusher.failing == {}


async def test_an_engine_that_fails_at_once_holds_up_nobody_and_is_asked_every_time(vllm, another, weights, tmp_path):
    another.drop.add("/version")
    pusher = WeightPusher([vllm.url, another.url], tmp_path)
    assert list((await asyncio.to_thread(pusher.push, weights, 5)).failed) == [another.url]
    another.drop.clear()
    assert (await asyncio.to_thread(pusher.push, weights, 6)).failed == {}
    assert another.label == "6"


async def test_the_rest_between_two_questions_grows_to_a_bound(vllm, another, weights, tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(
        "swarmq.weights.push.pusher.time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: 0.0)
    )
    another.silent = True
    urls = [vllm.url]
    pusher = WeightPusher(urls, tmp_path, timeouts=Timeouts(ask_s=1.0))
    await asyncio.to_thread(pusher.push, weights, 5)
    urls.append(another.url)
    asked = []
    for now in range(0, 500, 5):
        before = len(another.calls)
        with pytest.raises(EngineError):
            await asyncio.to_thread(pusher.ensure, weights, 5)
        if len(another.calls) > before:
            asked.append(now)
    assert asked == [0, 30, 90, 210, 330, 450]


async def test_when_no_engine_answers_they_are_asked_again_and_again(vllm, weights, tmp_path):
    vllm.silent = True
    pusher = WeightPusher([vllm.url], tmp_path, timeouts=Timeouts(ask_s=0.2))
    for offer in (pusher.push, pusher.ensure):
        before = len(vllm.calls)
        with pytest.raises(EngineError, match="no engine took version 5"):
            await asyncio.to_thread(offer, weights, 5)
        assert len(vllm.calls) > before
    vllm.silent = False
    await asyncio.to_thread(pusher.ensure, weights, 5)
    assert vllm.label == "5"


async def test_a_learner_whose_place_was_taken_on_the_way_updates_nothing(vllm, weights, tmp_path, methods):
    def taken():
        raise LearnerError("taken over")

    pusher = WeightPusher([vllm.url], tmp_path, transfers=methods, check=taken)
    with pytest.raises(LearnerError, match="taken over"):
        await asyncio.to_thread(pusher.push, weights, 5)
    assert methods["file"].published == 1, "it stood still until now"
    assert set(vllm.calls) == {"/version", "/weight_info", "/is_paused", "/swarmq/facts"}
