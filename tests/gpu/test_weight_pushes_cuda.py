"""Weights reach a real vLLM by the learner's own memory or by a broadcast, and are what it samples from afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET
from support.tiny_model import tiny_experts, tiny_model
from swarmq.config import EngineSettings, Lora, Policy, Train
from swarmq.engine.server.launch import EngineProcess
from swarmq.errors import EngineError
from swarmq.learner.model.hf_names import to_hf_names
from swarmq.learner.model.lora import MARK
from swarmq.learner.train.trainer import Trainer
from swarmq.runtime.processes import find_free_port
from swarmq.weights.format.packing import FolderWeight, LowRankUpdate, Weight, materialize
from swarmq.weights.push.engine_control import EngineControl
from swarmq.weights.push.pusher import WeightPusher
from swarmq.weights.push.transfers import AdapterTransfer, FileTransfer, IpcTransfer, Route, StagingBuffer, Transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # compilers warn about many things
]

PROMPT = [(7 * i) % 500 for i in range(64)]
TOLERANCE = 0.01
"""FP32 on both sides, by different kernels; in BF16 a logit of 8 is rounded by more."""
FP8_GAP = 0.3
"""Nats on average: FP8 is 0.12 from FP32 here, and the weights before a push are 0.88 from those after it."""


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, *, model: Path | None = None, gpu: int = 0, sleep: bool = False, **settings: Any
) -> AsyncIterator[tuple[str, WeightPusher, torch.nn.Module]]:
    """An engine's url, who pushes to it, and on the first GPU the model that it serves."""
    engine = EngineSettings(
        max_model_len=512,
        gpu_memory_utilization=0.2,
        sleep=sleep,
        arguments=(
            "--enforce-eager",
            "--kv-cache-memory-bytes",
            str(1 << 28),
        ),  # vLLM cannot measure a GPU that others use, too
        **{"dtype": "float32", **settings},
    )
    folder = model or tiny_model()
    policy = Policy(model=str(folder), engine=engine)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    async with EngineProcess(
        policy, port=find_free_port(), log_path=tmp_path / "engine.log", secret=SECRET, gpus=[gpu]
    ) as process:
        yield process.url, WeightPusher([process.url], tmp_path, secret=SECRET, patience_s=0), network


@pytest.mark.parametrize("source", ["cuda", "cpu"])
@pytest.mark.parametrize("way", ["ipc", "nccl"])
async def test_the_engine_samples_from_what_was_pushed(way: str, source: str, tmp_path: Path) -> None:
    """Ranks that share a policy out have its weights in host memory, and no GPU's memory is theirs after a push."""
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    async with serving(tmp_path, gpu=0 if way == "ipc" else 1) as (url, pusher, network):
        first = copy.deepcopy(list(network.parameters()))
        for version in range(1, 4):
            disturb(network, first)
            weights = {name: tensor.to(source) for name, tensor in network.state_dict().items()}
            before = torch.cuda.memory_allocated()
            report = await asyncio.to_thread(pusher.push, weights.items(), version)
            assert report.methods == {url: way}
            torch.cuda.ipc_collect()
            taken, size = torch.cuda.memory_allocated() - before, sum(tensor.nbytes for tensor in weights.values())
            assert source == "cuda" or taken < size / 2
            told, ids = await _sampled(url)
            assert told == pytest.approx(_logprobs(network, ids), abs=TOLERANCE)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8")
@pytest.mark.parametrize("cache", ["auto", "fp8"])
async def test_an_fp8_engine_quantises_what_was_pushed(cache: str, tmp_path: Path) -> None:
    async with serving(tmp_path, dtype="bfloat16", quantization="fp8", kv_cache_dtype=cache) as (url, pusher, network):
        first, former = copy.deepcopy(list(network.parameters())), copy.deepcopy(network)
        disturb(network, first)
        await asyncio.to_thread(pusher.push, network.named_parameters(), 1)
        told, ids = await _sampled(url)
        now, before = (
            sum(abs(a - b) for a, b in zip(told, _logprobs(weights, ids), strict=True)) / len(ids)
            for weights in (network, former)
        )
        assert now < FP8_GAP < before


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
async def test_experts_are_those_that_were_pushed(family: str, tmp_path: Path) -> None:
    """By the kernels for experts that vLLM chooses on a GPU; transformers has the experts of a layer in one tensor."""
    model = tiny_experts(family)
    async with serving(tmp_path, model=model) as (url, pusher, network):
        first = copy.deepcopy(list(network.parameters()))
        for version in range(1, 4):
            torch.manual_seed(version)  # of other weights, rounding might choose another expert where two are as good
            disturb(network, first)
            named = to_hf_names(network, network.state_dict().items())
            await asyncio.to_thread(pusher.push, named, version)
            told, ids = await _sampled(url, model)
            assert told == pytest.approx(_logprobs(network, ids), abs=TOLERANCE)


class Closed(IpcTransfer):
    """As if the engine were on another host."""

    async def prepare(self, engine: EngineControl, route: Route) -> None:
        raise EngineError("not this way")


@pytest.mark.parametrize(
    ("way", "source"), [("ipc", "cuda"), ("ipc", "cpu"), ("adapters", "cuda"), ("adapters", "cpu")]
)
async def test_adapters_are_merged_by_the_learner_or_by_the_engine(way: str, source: str, tmp_path: Path) -> None:
    """Ranks that share a policy out have both in host memory: the learner adds them up on its GPU then, too."""
    train = Train(lora=Lora(rank=4, alpha=8.0), mixed_precision="no", token_log=False, trackers=())
    trainer, staging = Trainer(str(tiny_model()), train), StagingBuffer()
    async with serving(tmp_path) as (url, _, network):
        transfers: dict[str, Transfer] = {
            "ipc": IpcTransfer(staging) if way == "ipc" else Closed(staging),
            "adapters": AdapterTransfer([url], tmp_path),
            "file": FileTransfer([url], tmp_path),
        }
        pusher = WeightPusher([url], tmp_path, secret=SECRET, transfers=transfers, patience_s=0)
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in trainer.lm.named_parameters():
                    if MARK in name:
                        parameter.normal_(std=0.05)
            weights = trainer.weights_to_push()
            if source == "cpu":
                weights = ((name, on_host(weight)) for name, weight in weights)
            report = await asyncio.to_thread(pusher.push, weights, version)
            assert report.methods == {url: way}
            told, ids = await _sampled(url)
            assert told != pytest.approx(_logprobs(network, ids), abs=10 * TOLERANCE), "as before"
            network.load_state_dict(dict(trainer.named_tensors()))
            assert told == pytest.approx(_logprobs(network, ids), abs=TOLERANCE)


def on_host(weight: Weight) -> FolderWeight:
    assert isinstance(weight, FolderWeight)
    down, up, scale = weight.adapter or (None, None, 0.0)
    adapter = LowRankUpdate(down.cpu(), up.cpu(), scale) if down is not None and up is not None else None
    return FolderWeight(materialize(weight.base).cpu(), adapter)


def disturb(network: torch.nn.Module, first: list[torch.Tensor]) -> None:
    """Other weights, always as far from the first: rounding grows with the weights."""
    with torch.no_grad():
        for parameter, before in zip(network.parameters(), first, strict=True):
            parameter.copy_(before + 0.02 * torch.randn_like(before))


async def _sampled(url: str, model: Path | None = None) -> tuple[list[float], list[int]]:
    body = {
        "model": str(model or tiny_model()),
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 16, "logprobs": 0, "ignore_eos": True},
    }
    async with (
        aiohttp.ClientSession(headers=KNOWN) as http,
        http.post(f"{url}/inference/v1/generate", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    return [token["logprob"] for token in choice["logprobs"]["content"]], choice["token_ids"]


def _logprobs(network: torch.nn.Module, ids: list[int]) -> list[float]:
    whole = torch.tensor([[*PROMPT, *ids]], device="cuda")
    with torch.no_grad():
        logits = network(input_ids=whole).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids, device="cuda")[:, None])[:, 0].tolist()


KILLED_IN_AN_UPDATE = (
    ("/pause?mode=keep&clear_cache=true", {}),
    ("/update_weight_version", {"new_version": "updating-2"}),
    ("/start_weight_update", {}),
)


async def test_an_engine_whose_learner_was_killed_in_an_update_sleeps_and_is_repaired(tmp_path: Path) -> None:
    async with serving(tmp_path, sleep=True) as (url, pusher, network):
        async with aiohttp.ClientSession(headers=KNOWN) as http:
            for path, body in KILLED_IN_AN_UPDATE:
                async with http.post(url + path, json=body) as response:
                    assert response.status == 200, await response.text()
        waiting = asyncio.create_task(_sampled(url))
        free, whole = torch.cuda.mem_get_info()
        await asyncio.to_thread(pusher.sleep)
        assert torch.cuda.mem_get_info()[0] - free > 0.1 * whole
        await asyncio.to_thread(pusher.wake)
        assert torch.cuda.mem_get_info()[0] - free > 0.1 * whole, "it would sample from weights in doubt"
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        await asyncio.to_thread(pusher.repair, network.state_dict().items(), 1)
        told, ids = await waiting
        assert told == pytest.approx(_logprobs(network, ids), abs=TOLERANCE)


async def test_a_sleeping_engine_gives_its_memory_back_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path, sleep=True) as (url, pusher, network):
        await asyncio.to_thread(pusher.push, network.state_dict().items(), 1)
        before = torch.cuda.mem_get_info()[0]
        await asyncio.to_thread(pusher.sleep)
        assert torch.cuda.mem_get_info()[0] - before > 0.1 * torch.cuda.mem_get_info()[1]
        waiting = asyncio.create_task(_sampled(url))
        await asyncio.to_thread(pusher.wake)
        told, ids = await waiting
        assert told == pytest.approx(_logprobs(network, ids), abs=TOLERANCE)
