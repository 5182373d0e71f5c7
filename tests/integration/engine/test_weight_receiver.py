"""An engine beside which a receiver runs gets its weights over HTTP; receivers and connections may die meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from support.engine import KNOWN, SECRET, Vllm, logprobs_in, running_engine
from support.launch import environment
from swarmq.config import Lora, Train
from swarmq.errors import ConfigError, EngineError
from swarmq.learner.train.trainer import Trainer
from swarmq.runtime.processes import reserve_port
from swarmq.testing.relay import TcpRelay
from swarmq.weights.format.chunks import CHUNK_BYTES
from swarmq.weights.format.conventions import RECEIVER_PORT_ENV
from swarmq.weights.format.scratch import FOLDER_PREFIX, SHARED_MEMORY
from swarmq.weights.push.http_transfer import HttpTransfer
from swarmq.weights.push.pusher import WeightPusher
from swarmq.weights.push.transfers import FileTransfer
from swarmq.weights.receiver.process import keep_receiver

from .conftest import PATIENT, TOLERANCE, disturb, logprobs_of

HOST = "127.0.0.1"
PROMPT = [(7 * i) % 500 for i in range(40)]


def receiving(port: int, folder: Path, secret: str = SECRET):
    return keep_receiver(HOST, port, secret=secret, log_path=folder / "receiver.log")


@pytest.mark.vllm
async def test_an_engine_samples_from_what_its_receiver_got_whole_as_a_difference_and_after_a_kill_or_restart(
    tiny_model, network, tmp_path, capsys
):
    port = reserve_port()
    with running_engine(tiny_model, tmp_path / "engine.log", environment={RECEIVER_PORT_ENV: str(port)}) as engine:
        pusher = WeightPusher([engine.url], tmp_path, secret=SECRET, patience_s=0, timeouts=PATIENT)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
            vllm = Vllm(engine.url, tiny_model, session)

            async def push(named, version: int, method: str) -> None:
                report = await asyncio.to_thread(pusher.push, named, version)
                assert report.methods == {engine.url: method}
                choice = await vllm.generate(PROMPT, 8)
                assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 8}]
                expected = logprobs_of(network, PROMPT, choice["token_ids"])
                assert logprobs_in(choice) == pytest.approx(expected, abs=TOLERANCE)

            async with receiving(port, tmp_path):
                for version in (1, 2):
                    disturb(network, version)
                    await push(network.named_parameters(), version, "http")
            assert [line for line in capsys.readouterr().out.splitlines() if "is_delta=True" in line]
            (beside := tmp_path / "beside").mkdir()
            async with receiving(0, beside) as receiver, TcpRelay.to(HOST, receiver.port, own_port=port) as relay:
                killed = await kill_a_learner_in_its_push(engine.url, tiny_model, tmp_path, relay, receiver.pid)
                assert "weights_received" not in (beside / "receiver.log").read_text()
                choice = await vllm.generate(PROMPT, 8)
                assert choice["weight_versions"] == [{"version": "2", "start": 0, "end": 8}]
                assert logprobs_in(choice) == pytest.approx(
                    logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE
                )
                [begun] = SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{receiver.pid}-*/*.safetensors")
                disturb(network, 3)
                await push(network.named_parameters(), 3, "http")
                [received] = SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{receiver.pid}-*/*.safetensors")
                assert received != begun
                assert not list(SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{killed}-*"))
            capsys.readouterr()
            disturb(network, 4)
            with pytest.raises(EngineError, match=f"{HOST}:{port}"):
                await asyncio.to_thread(pusher.push, network.named_parameters(), 4)
            assert (await vllm.generate(PROMPT, 1))["weight_versions"] == [{"version": "3", "start": 0, "end": 1}]
            async with receiving(port, tmp_path):
                await push(network.named_parameters(), 4, "http")
                assert "weights_sent_whole" in capsys.readouterr().out
                trainer = Trainer(str(tiny_model), Train(lora=Lora(rank=4), gradient_checkpointing=False))
                with torch.no_grad():
                    for name, parameter in trainer.lm.named_parameters():
                        if ".lora_B" in name:
                            parameter.normal_(std=0.05)
                network.load_state_dict(dict(trainer.named_tensors()))
                await push(trainer.weights_to_push(), 5, "http_adapters")


async def kill_a_learner_in_its_push(
    engine_url: str, model: Path, folder: Path, relay: TcpRelay, receiver_pid: int | None
) -> int:
    """Start a learner's process, and kill it when a part of the weights has arrived. Return its process id."""
    learner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.pushing_learner", engine_url, str(model), str(folder), "7"), env=environment()
    )
    async with asyncio.timeout(300):
        while not list(SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{receiver_pid}-*/*.safetensors")):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    relay.hold()
    learner.kill()
    await learner.wait()
    relay.cut()
    relay.release()
    return learner.pid


def weights(num_chunks: int):
    return {"a": torch.randint(-9000, 9000, (num_chunks, CHUNK_BYTES // 2), dtype=torch.int16)}


@pytest.fixture
def transfer(tmp_path):
    return HttpTransfer(FileTransfer((), tmp_path), secret=SECRET, retry_s=0.1)


async def deliver(transfer, sent, port: int) -> None:
    payload = transfer.publish(sent, 1, None)
    arrived = await payload.deliver(f"http://{HOST}:{port}")
    assert torch.equal(load_file(arrived.update_info["path"])["a"], sent["a"])
    transfer.withdraw()


async def test_a_push_outlives_a_broken_connection_and_a_killed_receiver_of_which_nothing_stays(transfer, tmp_path):
    sent = weights(3)
    async with receiving(0, tmp_path) as receiver, TcpRelay.to(HOST, receiver.port) as relay:
        relay.cut_after(CHUNK_BYTES)
        await deliver(transfer, sent, relay.port)
        sent["a"] += 1
        killed = receiver.pid
        pushing = asyncio.create_task(deliver(transfer, sent, relay.port))
        before = relay.connections
        async with asyncio.timeout(60):
            while relay.connections == before:  # noqa: ASYNC110 - a relay tells nobody
                await asyncio.sleep(0.01)
        os.kill(killed, signal.SIGKILL)
        await pushing
        assert receiver.pid != killed
        assert not list(SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{killed}-*"))
    assert not list(SHARED_MEMORY.glob(f"{FOLDER_PREFIX}{receiver.pid}-*"))


async def test_a_stranger_gets_nothing_and_a_taken_port_is_named(tmp_path):
    async with receiving(0, tmp_path) as receiver, aiohttp.ClientSession() as stranger:
        url = f"http://{HOST}:{receiver.port}/weights"
        for headers in ({}, {"authorization": "Bearer guess"}):
            async with stranger.post(url, data=b"{}", headers=headers) as answer:
                assert answer.status == 401
        async with stranger.post(url, data=b"{}", headers=KNOWN) as answer:
            assert (answer.status, "size_bytes" in await answer.text()) == (400, True)
        with pytest.raises(ConfigError, match=f"the weight receiver's port: {HOST}:{receiver.port} cannot be"):
            async with receiving(receiver.port, tmp_path):
                pass


async def test_a_receiver_that_cannot_run_is_given_up_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "aiohttp.py").write_text("raise ImportError('not on this host')")
    with pytest.raises(EngineError, match="ends again and again.*(?s:.)*(not on this host|No module)"):
        async with receiving(0, tmp_path):
            await asyncio.Event().wait()


async def test_an_error_of_the_engine_beside_a_receiver_is_raised_as_it_is(tmp_path):
    with pytest.raises(EngineError, match="no GPU"):
        async with receiving(0, tmp_path):
            raise EngineError("no GPU")
