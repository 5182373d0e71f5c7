"""An FP8 engine takes pushes: vLLM quantises the weights that arrive. A CPU computes the products slowly, so few tokens are sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET, Vllm, logprobs_in, running_engine
from swarmq.engine.server.launch import FP8_WEIGHTS
from swarmq.weights.push.pusher import WeightPusher

from .conftest import PATIENT, disturb, logprobs_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT, TOKENS = [3, 14, 15, 92], 3


async def test_an_fp8_engine_samples_from_what_was_pushed(tiny_model: Path, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    arguments = ("--quantization", FP8_WEIGHTS, "--dtype", "bfloat16")
    with running_engine(tiny_model, tmp_path / "engine.log", *arguments) as engine:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), headers=KNOWN) as session:
            vllm = Vllm(engine.url, tiny_model, session)

            async def measure_gap() -> float:
                choice = await vllm.generate(PROMPT, TOKENS)
                pairs = zip(logprobs_in(choice), logprobs_of(network, PROMPT, choice["token_ids"]), strict=True)
                return sum(abs(a - b) for a, b in pairs) / TOKENS

            disturb(network, 1)
            before = await measure_gap()
            pusher = WeightPusher([engine.url], tmp_path, secret=SECRET, patience_s=0, timeouts=PATIENT)
            await asyncio.to_thread(pusher.push, network.named_parameters(), 1)
            assert await measure_gap() < 0.3 < before
