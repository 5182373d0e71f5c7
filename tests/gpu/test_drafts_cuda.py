"""On a GPU, too, n-gram drafts change neither what is sampled nor the log-probabilities that are recorded.

vLLM's other model runner and scheduler, with graphs for each number of drafts: `tests/integration/engine/test_drafts.py` has the same
claims on a CPU.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support import drafts
from support.engine import KNOWN, Vllm, running_engine
from support.tiny_model import tiny_model
from swarmq.engine.server.launch import EngineProcess

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # compilers warn about many things
]

TOLERANCE = 0.02
"""FP32 on both sides, by different kernels; the log-probability of another token, or at another temperature, is 1 nat away."""


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("drafts") / "engine.log"
    arguments = ("--api-server-count", "1", "--max-num-seqs", "32", "--kv-cache-memory-bytes", str(1 << 28))
    with running_engine(tiny_model(), log, *arguments, gpus=[0], dtype="float32", speculation="ngram") as engine:
        yield engine


@pytest.fixture
async def vllm(drafting: EngineProcess) -> AsyncIterator[Vllm]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
        yield Vllm(drafting.url, tiny_model(), session)


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).cuda().eval()


async def test_drafts_are_what_other_conversations_said(vllm: Vllm) -> None:
    await drafts.assert_drafts_from_other_conversations(vllm)


async def test_answers_are_the_same_with_each_number_of_drafts(vllm: Vllm, network: torch.nn.Module) -> None:
    await drafts.assert_exact_with_each_number_of_drafts(vllm, network, TOLERANCE)


async def test_answers_and_logprobs_are_those_of_the_model(vllm: Vllm, network: torch.nn.Module) -> None:
    await drafts.assert_sampled_from_the_model(vllm, network, TOLERANCE)
