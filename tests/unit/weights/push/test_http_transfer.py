"""Weights go to receivers on other hosts: whole, then as differences, and on from where a broken connection left them."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file

from support.deaf import deaf_port
from swarmq.errors import EngineError
from swarmq.testing.relay import TcpRelay, Way
from swarmq.weights.format.scratch import has_room
from swarmq.weights.push.engine_control import EngineSilentError, WorkerFacts
from swarmq.weights.push.http_transfer import NUM_CONNECTIONS, HttpTransfer
from swarmq.weights.push.pusher import WeightPusher
from swarmq.weights.push.transfers import (
    FileTransfer,
    NcclTransfer,
    StagingBuffer,
    choose_route,
    find_own_address,
)
from swarmq.weights.receiver.server import make_app
from swarmq.weights.receiver.store import WeightStore

SECRET = "of the engines"


class Host:
    """A host with a receiver. `chunks`: sizes in bytes of the chunks that came; `damage`: how many of the next are damaged; `begun`: called
    with each manifest."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.damage = folder, 0
        self.begun = lambda: None
        self.chunks: list[int] = []
        self.holds_one_file = self.is_full = False
        self.store = WeightStore(folder, self.has_room)

    def has_room(self, folder: Path, size_bytes: int) -> bool:
        taken = self.is_full or (self.holds_one_file and list(folder.iterdir()))
        return not taken and has_room(folder, size_bytes)

    def begin(self, *given):
        self.begun()
        return self.store.begin(*given)

    def write(self, *given):
        self.store.write(*given)

    @asynccontextmanager
    async def serving(self):
        app = make_app(self, SECRET)
        app.middlewares.append(self._count)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield self
        self.store.close()

    def restart(self) -> None:
        """Lose everything, as a process that was killed does."""
        self.store.close()
        self.store = WeightStore(self.folder, self.has_room)

    @web.middleware
    async def _count(self, request, handler):
        if request.method == "PUT":
            body = await request.read()
            self.chunks.append(len(body))
            if self.damage:
                self.damage -= 1
                request._read_bytes = body[:-1] + bytes([body[-1] ^ 1])
        return await handler(request)

    def take_bytes(self) -> int:
        size_bytes = sum(self.chunks)
        self.chunks.clear()
        return size_bytes


@pytest.fixture
async def host(tmp_path):
    async with Host(tmp_path / "there").serving() as host:
        yield host


@pytest.fixture
async def other_host(tmp_path):
    async with Host(tmp_path / "elsewhere").serving() as host:
        yield host


@pytest.fixture
def transfer(tmp_path):
    return HttpTransfer(FileTransfer(["http://far.example:8000"], tmp_path / "here"), secret=SECRET, retry_s=0)


@pytest.fixture
def weights():
    return {"a": torch.randn(300, 100), "b": torch.ones(7)}


def step(weights) -> None:
    """A step with a small learning rate: BF16 shows a part of it."""
    for tensor in weights.values():
        tensor.mul_(1 + 1e-4)


async def push(transfer, weights, *urls):
    """What the receivers then have."""
    payload = transfer.publish(weights, 1, "bfloat16")
    try:
        return await asyncio.gather(*(payload.deliver(url) for url in urls))
    finally:
        transfer.withdraw()


def assert_arrived(payload, weights) -> None:
    arrived = load_file(payload.update_info["path"])
    assert arrived.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(arrived[name], tensor.bfloat16())


async def test_weights_arrive_whole_and_then_as_a_difference(transfer, weights, host):
    (payload,) = await push(transfer, weights, host.url)
    assert_arrived(payload, weights)
    whole = host.take_bytes()
    step(weights)
    (payload,) = await push(transfer, weights, host.url)
    assert_arrived(payload, weights)
    assert host.take_bytes() < whole / 5


async def test_the_engine_is_given_the_path_there_and_the_checksum_of_what_was_sent(transfer, weights, host):
    published = transfer.publish(weights, 1, "bfloat16")
    payload = await published.deliver(host.url)
    assert Path(payload.update_info["path"]).is_relative_to(host.folder)
    assert payload.update_info["checksum"] == published.checksum == payload.checksum


async def test_the_learner_keeps_one_file_as_the_base_and_no_other(transfer, weights, host, tmp_path):
    for _ in range(3):
        await push(transfer, weights, host.url)
        step(weights)
        assert len(list((tmp_path / "here").glob("*/*"))) == 1


async def test_the_base_goes_with_the_learner(weights, host, tmp_path):
    transfer = HttpTransfer(FileTransfer(["http://far.example:8000"], tmp_path / "here"), secret=SECRET)
    await push(transfer, weights, host.url)
    assert list((tmp_path / "here").glob("*/*"))
    del transfer
    gc.collect()
    assert not list((tmp_path / "here").glob("*/*"))


async def test_several_receivers_get_them_side_by_side_and_each_chunk_is_encoded_once(
    transfer, weights, host, other_host, monkeypatch
):
    encoded = []
    real = HttpTransfer.publish.__globals__["encode_chunk"]
    monkeypatch.setattr(
        "swarmq.weights.push.http_transfer.encode_chunk", lambda *given: encoded.append(1) or real(*given)
    )
    for payload in await push(transfer, weights, host.url, other_host.url):
        assert_arrived(payload, weights)
    assert len(encoded) == 1


async def test_a_receiver_that_lost_the_base_gets_the_whole_weights_in_the_same_push(
    transfer, weights, host, other_host
):
    await push(transfer, weights, host.url, other_host.url)
    whole = host.take_bytes()
    host.restart()
    other_host.take_bytes()
    step(weights)
    for payload in await push(transfer, weights, host.url, other_host.url):
        assert_arrived(payload, weights)
    assert host.take_bytes() > whole / 2
    assert other_host.take_bytes() < whole / 5


async def test_a_receiver_that_has_no_room_beside_the_base_gets_the_whole_weights(transfer, weights, host):
    host.holds_one_file = True
    await push(transfer, weights, host.url)
    step(weights)
    (payload,) = await push(transfer, weights, host.url)
    assert_arrived(payload, weights)


async def test_a_receiver_without_any_room_is_named(transfer, weights, host):
    host.is_full = True
    with pytest.raises(EngineError, match=f"{host.url}: no room for .*{host.folder}: free space there"):
        await push(transfer, weights, host.url)


async def test_a_damaged_chunk_is_sent_again_and_one_that_is_damaged_for_ever_is_an_error(transfer, weights, host):
    host.damage = 2
    (payload,) = await push(transfer, weights, host.url)
    assert_arrived(payload, weights)
    assert len(host.chunks) == 3
    step(weights)
    host.damage = 100
    with pytest.raises(EngineError, match=f"{host.url}: chunk 0 is damaged"):
        await push(transfer, weights, host.url)


async def test_a_push_goes_on_where_a_broken_connection_left_it(host, tmp_path):
    transfer = HttpTransfer(FileTransfer((), tmp_path), secret=SECRET, retry_s=0, chunk_bytes=65536)
    weights = {"a": torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 15, (64, 16384), np.int16))}
    payload = transfer.publish(weights, 1, None)
    async with TcpRelay.to("127.0.0.1", port_of(host.url)) as relay:
        relay.cut_after(1_000_000)
        arrived = await payload.deliver(f"http://127.0.0.1:{relay.port}")
    assert torch.equal(load_file(arrived.update_info["path"])["a"], weights["a"])
    transfer.withdraw()
    assert relay.connections > NUM_CONNECTIONS, "connections broke"
    assert len(host.chunks) <= 33 + NUM_CONNECTIONS, "chunks that had arrived were not sent again"


async def test_a_wrong_secret_and_a_port_where_nothing_listens_are_named_with_the_address(transfer, weights, host):
    transfer._secret = "another"
    with pytest.raises(EngineError, match=f"{host.url} requires another secret"):
        await push(transfer, weights, host.url)
    with pytest.raises(EngineError, match="sent to http://127.0.0.1:9 .*does a firewall"):
        await push(transfer, weights, "http://127.0.0.1:9")


async def test_an_address_that_never_answered_holds_up_a_push_for_one_attempt(weights, tmp_path, capsys):
    transfer = HttpTransfer(FileTransfer((), tmp_path), retry_s=1e6)
    with pytest.raises(EngineError, match="127.0.0.1:9"):
        await asyncio.wait_for(push(transfer, weights, "http://127.0.0.1:9"), 60)
    assert "upload_interrupted" not in capsys.readouterr().out


async def test_two_learners_disturb_each_other_and_what_is_complete_is_whole(weights, host, tmp_path):
    transfers = [HttpTransfer(FileTransfer(["http://far"], tmp_path), secret=SECRET, retry_s=0) for _ in range(2)]
    others = {name: tensor + 1 for name, tensor in weights.items()}
    results = await asyncio.gather(
        *(push(transfer, each, host.url) for transfer, each in zip(transfers, (weights, others), strict=True)),
        return_exceptions=True,
    )
    assert all(isinstance(result, list | EngineError) for result in results), results
    last = load_file(next(host.folder.glob("*/*.safetensors")))
    assert any(torch.equal(last["a"], each["a"].bfloat16()) for each in (weights, others))


async def test_an_address_that_drops_packets_is_given_up_after_the_time_for_a_connection(weights, tmp_path):
    transfer = HttpTransfer(FileTransfer((), tmp_path), retry_s=1e6, connect_s=0.1)
    with (
        deaf_port() as port,
        pytest.raises(EngineSilentError, match=f"sent to http://127.0.0.1:{port} .*does a firewall"),
    ):
        await asyncio.wait_for(push(transfer, weights, f"http://127.0.0.1:{port}"), 60)


async def test_a_connection_that_dies_in_the_middle_is_noticed_and_the_push_goes_on(host, tmp_path, capsys):
    """The weights (64 MiB) exceed what all buffers between here and the host can hold, so the held connection is left with some."""
    transfer = HttpTransfer(FileTransfer((), tmp_path), secret=SECRET, retry_s=0, dead_s=0.5)
    weights = {"a": torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 15, (2048, 16384), np.int16))}
    payload = transfer.publish(weights, 1, None)
    async with TcpRelay.to("127.0.0.1", port_of(host.url)) as relay:
        host.begun = lambda: relay.hold(Way.REQUESTS)
        delivering = asyncio.create_task(payload.deliver(f"http://127.0.0.1:{relay.port}"))
        async with asyncio.timeout(60):
            while "upload_interrupted" not in capsys.readouterr().out:  # noqa: ASYNC110 - a log line tells nobody
                await asyncio.sleep(0.05)
        host.begun = lambda: None
        relay.release()
        arrived = await delivering
    assert torch.equal(load_file(arrived.update_info["path"])["a"], weights["a"])
    transfer.withdraw()


async def test_engines_get_the_weights_side_by_side_and_none_waits_for_another_link(
    vllm, another, weights, host, other_host, tmp_path
):
    """The link of one engine stands still until the other engine serves the new weights. Each gets every byte once."""
    async with TcpRelay.to("127.0.0.1", port_of(other_host.url)) as relay:
        relay.hold()
        for engine, port in ((vllm, port_of(host.url)), (another, relay.port)):
            engine.workers = [{"gpu": "", "dtype": "bfloat16", "pid": 7, "receiver_port": port}]
        pusher = WeightPusher([another.url, vllm.url], tmp_path, secret=SECRET)
        pushing = asyncio.create_task(asyncio.to_thread(pusher.push, weights.items(), 5))
        async with asyncio.timeout(60):
            while vllm.label != "5" or vllm.paused:  # noqa: ASYNC110 - a scripted engine tells nobody
                await asyncio.sleep(0.01)
        assert another.label == "default"
        assert not pushing.done()
        relay.release()
        report = await pushing
    assert report.methods == {vllm.url: "http", another.url: "http"}
    assert another.label == "5"
    assert len(host.chunks) == len(other_host.chunks) == 1
    assert host.take_bytes() == other_host.take_bytes()


async def test_an_engine_whose_receiver_answers_nothing_is_skipped_for_a_while(vllm, another, weights, host, tmp_path):
    with deaf_port() as port:
        for engine, receiver in ((vllm, port_of(host.url)), (another, port)):
            engine.workers = [{"gpu": "", "dtype": "bfloat16", "pid": 7, "receiver_port": receiver}]
        transfer = HttpTransfer(FileTransfer((), tmp_path), secret=SECRET, connect_s=0.1)
        pusher = WeightPusher([vllm.url, another.url], tmp_path, transfers={"http": transfer})
        for version in (5, 6):
            another.calls.clear()
            report = await asyncio.to_thread(pusher.push, weights.items(), version)
            assert vllm.label == str(version)
            assert f"127.0.0.1:{port}" in report.failed[another.url]
        assert (another.calls, another.label) == ([], "default"), "the second push did not wait for it"


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def facts(gpu: str = "", port: int = 8001):
    return [WorkerFacts(gpu=gpu, dtype="bfloat16", pid=7, receiver_port=port)]


@pytest.mark.parametrize(
    ("gpu", "own", "port", "methods"),
    [
        ("", "", 8001, ("http",)),
        ("", "GPU-1", 8001, ("http",)),
        ("GPU-2", "", 8001, ("http",)),
        ("GPU-2", "GPU-1", 8001, ("nccl", "http")),
        ("GPU-2", "GPU-1", 0, ("nccl", "file")),
    ],
)
def test_an_engine_with_a_receiver_gets_weights_over_http_where_nccl_cannot(gpu, own, port, methods):
    url = "http://far.example:8000"
    route = choose_route(url, facts(gpu, port), own)
    assert route.methods == methods
    assert route.receiver == ("http://far.example:8001" if port else "")
    adapters = "http_adapters" if port else "adapters"
    assert choose_route(url, facts(gpu, port), own, has_adapters=True).methods == (
        *methods[:-1],
        adapters,
        methods[-1],
    )


def test_the_receiver_of_an_address_of_ipv6_is_found():
    assert choose_route("http://[fd00::1]:8000", facts(), "").receiver == "http://[fd00::1]:8001"


def test_the_address_for_a_rendezvous_is_the_one_from_which_packets_go_to_the_engine():
    assert find_own_address("http://127.0.0.1:8000") == "127.0.0.1"
    with pytest.raises(EngineError, match="http://no-such-host.invalid:8000: no way leads to its host"):
        find_own_address("http://no-such-host.invalid:8000")


async def test_a_pusher_sends_to_the_receiver_and_the_engine_loads_from_there(vllm, weights, host, tmp_path):
    port = port_of(host.url)
    vllm.workers = [{"gpu": "", "dtype": "bfloat16", "pid": 7, "receiver_port": port}]
    pusher = WeightPusher([vllm.url], tmp_path, secret=SECRET)
    report = await asyncio.to_thread(pusher.push, weights.items(), 5)
    assert report.methods == {vllm.url: "http"}
    assert Path(vllm.weights).is_relative_to(host.folder)
    assert_arrived(SimpleNamespace(update_info={"path": vllm.weights}), weights)


async def test_an_engine_whose_receiver_is_gone_serves_on_and_gets_the_weights_later(vllm, weights, tmp_path):
    vllm.workers = [{"gpu": "", "dtype": "bfloat16", "pid": 7, "receiver_port": 9}]
    transfers = {"http": HttpTransfer(FileTransfer((), tmp_path), retry_s=0)}
    pusher = WeightPusher([vllm.url], tmp_path, transfers=transfers)
    with pytest.raises(EngineError, match="127.0.0.1:9"):
        await asyncio.to_thread(pusher.push, weights.items(), 5)
    assert (vllm.label, vllm.paused, vllm.weights) == ("default", False, "on disk")
    assert set(vllm.calls) == {"/version", "/weight_info", "/is_paused", "/swarmq/facts"}
    async with Host(tmp_path / "back").serving() as host:
        port = port_of(host.url)
        vllm.workers = [{"gpu": "", "dtype": "bfloat16", "pid": 7, "receiver_port": port}]
        transfers["http"]._secret = SECRET
        assert (await asyncio.to_thread(pusher.ensure, weights.items(), 5)).methods == {vllm.url: "http"}
    assert vllm.label == "5"


async def test_an_engine_whose_rendezvous_fails_gets_the_weights_over_http_in_the_same_push(
    vllm, weights, host, tmp_path, monkeypatch
):
    missed = threading.Event()
    monkeypatch.setattr("swarmq.weights.push.pusher.get_gpu_uuid", lambda: "GPU-1")
    monkeypatch.setattr("swarmq.weights.format.nccl_group.get_nccl_version", lambda: "2.29.2")
    monkeypatch.setattr("swarmq.weights.format.nccl_group.join_group", lambda *_, **__: missed.wait())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    port = port_of(host.url)
    vllm.workers = [{"gpu": "GPU-2", "dtype": "bfloat16", "pid": 7, "nccl": "2.29.2", "receiver_port": port}]
    vllm.fail["/init_weight_transfer_engine"] = "the learner cannot be reached"
    transfers = {
        "nccl": NcclTransfer(StagingBuffer()),
        "http": HttpTransfer(FileTransfer((), tmp_path), secret=SECRET, retry_s=0),
    }
    try:
        report = await asyncio.to_thread(
            WeightPusher([vllm.url], tmp_path, transfers=transfers).push, weights.items(), 5
        )
    finally:
        missed.set()
    assert report.methods == {vllm.url: "http"}
    assert vllm.label == "5"
