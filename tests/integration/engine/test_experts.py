"""A mixture of experts goes the whole way on a real vLLM: trained, saved, served, and pushed again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET, Vllm, logprobs_in, running_engine
from support.episodes import make_group
from support.tiny_model import tiny_experts
from swarmq.config import Loss, Train
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train.trainer import Trainer
from swarmq.weights.push.pusher import WeightPusher

from .conftest import PATIENT, TOLERANCE, disturb, logprobs_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [(7 * i) % 500 for i in range(100)]
TRAIN = Train(loss=Loss(name="reinforce"), learning_rate=1e-2, warmup_steps=0, token_log=False)


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("mixtral", "gpt_oss")]


@pytest.fixture(scope="module", params=["qwen3_moe", *SLOW])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A trainer that has taken a step, and its checkpoint."""
    model, folder = str(tiny_experts(request.param)), tmp_path_factory.mktemp("checkpoints")
    trainer = Trainer(model, TRAIN)
    episodes = tuple(make_group("a", (0.0, 1.0)))
    trainer.step(BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes, settings=TRAIN))
    identity = RunIdentity(run="r", policy="main", model=model)
    save_load.save_checkpoint(folder, trainer, identity, model=model, keep=1)
    found = discovery.find_newest(folder, identity)
    assert found is not None
    return trainer, found.path


@pytest.fixture(scope="module")
def url(trained: tuple[Trainer, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that serves the checkpoint."""
    with running_engine(trained[1], tmp_path_factory.mktemp("vllm") / "engine.log") as engine:
        yield engine.url


@pytest.fixture
async def vllm(url: str, trained: tuple[Trainer, Path]) -> AsyncIterator[Vllm]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
        yield Vllm(url, trained[1], session)


async def test_the_engine_samples_from_a_checkpoint_and_from_every_push_after_it(
    vllm: Vllm, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trainer, folder = trained
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    choice = await vllm.generate(PROMPT, 16)
    assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)
    pusher = WeightPusher([vllm.url], tmp_path, secret=SECRET, patience_s=0, timeouts=PATIENT)
    for version in (2, 3, 4):
        before = logprobs_of(network, PROMPT, choice["token_ids"])
        disturb(trainer.lm, version)
        network.load_state_dict(trainer.lm.state_dict())
        after = logprobs_of(network, PROMPT, choice["token_ids"])
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.1, "as good as the old weights"
        await asyncio.to_thread(pusher.push, trainer.weights_to_push(), version)
        choice = await vllm.generate(PROMPT, 16)
        assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 16}]
        assert logprobs_in(choice) == pytest.approx(logprobs_of(network, PROMPT, choice["token_ids"]), abs=TOLERANCE)
