"""Calls that the tests of pushes make: log-probabilities by vLLM and by transformers, and other weights to push."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.drafts import table_of
from support.engine import KNOWN, SECRET, Vllm
from swarmq.weights.push.engine_control import Timeouts
from swarmq.weights.push.pusher import WeightPusher

TOLERANCE = 1e-4
PATIENT = Timeouts(ask_s=60.0, pause_s=120.0, finish_s=120.0, resume_s=60.0)


@pytest.fixture
async def vllm(engine_url: str, tiny_model: Path) -> AsyncIterator[Vllm]:
    # vLLM closes what is idle for 5 s; a kept connection would fail a test that computes for longer.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
        yield Vllm(engine_url, tiny_model, session)


@pytest.fixture
def network(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture
def pusher(engine_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[WeightPusher]:
    """Pushes to the shared engine; afterwards it has its first weights again."""
    pusher = WeightPusher([engine_url], tmp_path, secret=SECRET, patience_s=0, timeouts=PATIENT)
    yield pusher
    first = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    pusher.push(first.named_parameters(), 0)


@pytest.fixture
def push(pusher: WeightPusher) -> Callable[..., Any]:
    """`await push(network, version)`."""

    async def send(network: torch.nn.Module, version: int) -> Any:
        return await asyncio.to_thread(pusher.push, network.named_parameters(), version)

    return send


def disturb(network: torch.nn.Module, seed: int) -> None:
    """Other weights, far enough away that no log-probability stays the same."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def logprobs_of(network: torch.nn.Module, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    table = table_of(network, prompt, sampled)
    return table.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
