"""N-gram drafts change neither what is sampled nor the log-probabilities that are recorded (`tests/gpu/test_drafts_cuda.py`: on a GPU)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from support import drafts
from support.engine import KNOWN, Vllm, running_engine
from swarmq.engine.server.launch import EngineProcess

from .conftest import TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def drafting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("drafts") / "engine.log"
    with running_engine(tiny_model, log, speculation="ngram") as engine:
        yield engine


@pytest.fixture
async def vllm(drafting: EngineProcess, tiny_model: Path) -> AsyncIterator[Vllm]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
        yield Vllm(drafting.url, tiny_model, session)


async def test_drafts_are_what_other_conversations_said(vllm: Vllm) -> None:
    await drafts.assert_drafts_from_other_conversations(vllm)


async def test_answers_are_the_same_with_each_number_of_drafts(vllm: Vllm, network: torch.nn.Module) -> None:
    await drafts.assert_exact_with_each_number_of_drafts(vllm, network, TOLERANCE)


async def test_answers_and_logprobs_are_those_of_the_model(vllm: Vllm, network: torch.nn.Module) -> None:
    await drafts.assert_sampled_from_the_model(vllm, network, TOLERANCE)
