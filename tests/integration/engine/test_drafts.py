"""N-gram drafts change neither what is sampled nor the log-probabilities that are recorded."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from support.engine import KNOWN, running_engine
from swarmq.engine.server.launch import EngineProcess, build_drafts

from .conftest import TOLERANCE, Vllm, logprobs_in

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TEMPERATURE = 0.2
"""At which the tiny model's answers repeat themselves, though not always."""
SAMPLES, LENGTH = 24, 24
IMPROBABLE = 4.5
"""Standard deviations, reached once in 150,000 runs."""


@pytest.fixture(scope="module")
def drafting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("drafts") / "engine.log"
    with running_engine(tiny_model, log, "--speculative-config", json.dumps(build_drafts(cuda=False))) as engine:
        yield engine


@pytest.fixture
async def vllm(drafting: EngineProcess, tiny_model: Path) -> AsyncIterator[Vllm]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
        yield Vllm(drafting.url, tiny_model, session)


@torch.no_grad()
def table_of(network: torch.nn.Module, prompt: list[int], sampled: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens [sampled, vocabulary] at `TEMPERATURE`."""
    logits = network(torch.tensor([[*prompt, *sampled]])).logits[0].float()
    return (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)


async def test_answers_and_logprobs_are_those_of_the_model(vllm: Vllm, network: torch.nn.Module) -> None:
    looped = (await vllm.generate(range(100, 120), 60, temperature=0.0))["token_ids"]
    assert looped == greedy(network, list(range(100, 120)), 60)
    prompt = [*range(100, 120), *looped]
    body = {
        "model": str(vllm.model),
        "token_ids": prompt,
        "sampling_params": {
            "max_tokens": LENGTH,
            "n": SAMPLES,
            "temperature": TEMPERATURE,
            "logprobs": 0,
            "ignore_eos": True,
        },
    }
    async with vllm.session.post(f"{vllm.url}/inference/v1/generate", json=body) as response:
        choices = (await response.json())["choices"]
    hits = expected = variance = 0.0
    for choice in choices:
        ids = choice["token_ids"]
        table = table_of(network, prompt, ids)
        own = table.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert logprobs_in(choice) == pytest.approx(own.tolist(), abs=TOLERANCE / TEMPERATURE)
        for at, drafted in enumerate(draft(prompt, ids)):
            if drafted is not None:
                chance = float(table[at, drafted].exp())
                hits, expected, variance = (
                    hits + (ids[at] == drafted),
                    expected + chance,
                    variance + chance * (1 - chance),
                )
    assert variance > 10, "too few drafts were in doubt"
    assert abs(hits - expected) < IMPROBABLE * math.sqrt(variance), (
        f"{hits} of drafts were sampled, {expected:.1f} expected"
    )
    accepted = await vllm.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted > 20


def draft(prompt: list[int], ids: list[int]) -> Iterator[int | None]:
    """What followed the newest two tokens the first time, at each place; None if they are new."""
    for at in range(len(ids)):
        known = [*prompt, *ids[:at]]
        yield next((known[i + 2] for i in range(len(known) - 2) if known[i : i + 2] == known[-2:]), None)


@torch.no_grad()
def greedy(network: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
