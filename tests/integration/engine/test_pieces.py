"""On a CPU a long prompt is computed in pieces: others go on meanwhile, and what is sampled is the same."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET, Vllm, logprobs_in, running_engine
from swarmq.engine.server.launch import EngineProcess
from swarmq.weights.push.engine_control import EngineControl

from .conftest import TOLERANCE, logprobs_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LONG = 30_000
PIECE = 512
SEEDED = {"seed": 7, "temperature": 1.0}


def prompt(length: int, number: int = 0) -> list[int]:
    return [(7 * i + 13 * number) % 500 for i in range(length)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Of a model that was made for long prompts."""
    folder = tmp_path_factory.mktemp("long") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LONG}))
    arguments = ("--max-model-len", str(LONG + 100), "--max-num-batched-tokens", str(PIECE))
    with running_engine(folder, folder.parent / "engine.log", *arguments) as engine:
        yield engine


@pytest.fixture
async def vllm(engine: EngineProcess, tmp_path: Path) -> AsyncIterator[Vllm]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, headers=KNOWN) as session:
        yield Vllm(engine.url, Path(engine.log_path.parent / "model"), session)


async def test_an_engine_answers_and_samples_while_it_computes_a_long_prompt(vllm: Vllm) -> None:
    long = asyncio.create_task(vllm.generate(prompt(LONG), 2, **SEEDED))
    looks = 0
    async with EngineControl(vllm.url, secret=SECRET) as control:
        while not await control.count_open_requests():
            assert not long.done()
        told = set()
        while not long.done():
            await control.status()  # within ten seconds, or it raises
            await vllm.generate(prompt(20), 1)
            told.add(await control.steps())
            looks += 1
    assert len(told) > 3, "it is seen to compute"
    assert looks > 3
    assert len((await long)["token_ids"]) == 2


async def test_pieces_change_neither_what_a_seed_gives_nor_its_log_probabilities(vllm: Vllm) -> None:
    alone = await vllm.generate(prompt(1500), 8, **SEEDED)
    together = await asyncio.gather(*(vllm.generate(prompt(1500 - 100 * n, n), 8, **SEEDED) for n in range(5)))
    assert together[0]["token_ids"] == alone["token_ids"]
    network = AutoModelForCausalLM.from_pretrained(vllm.model, dtype=torch.float32).eval()
    for number, choice in enumerate(together):
        theirs = logprobs_of(network, prompt(1500 - 100 * number, number), choice["token_ids"])
        assert logprobs_in(choice) == pytest.approx(theirs, abs=TOLERANCE)
